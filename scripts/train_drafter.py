"""Train a drafter.

    python scripts/train_drafter.py --config scripts/configs/dfly_smollm2.yaml [section.key=value ...]
    torchrun --nproc-per-node 8 scripts/train_drafter.py --config FILE run.device=cuda run.sharding=full

A run that was stopped, at whatever moment, goes on where its last checkpoint was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from angelspec_backend.engine.loader import LoadError
from angelspec_backend.training.checkpoint import CheckpointError
from angelspec_backend.training.config import TrainConfigError, load_config
from angelspec_backend.training.conversation import TemplateError
from angelspec_backend.training.distributed import Processes
from angelspec_backend.training.records import RecordError
from angelspec_backend.training.setup import make_trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    try:
        config = load_config(options.config, options.overrides)
        processes = Processes(config.run.device)
        evaluation = make_trainer(config, processes).run()
    except (CheckpointError, LoadError, RecordError, TemplateError, TrainConfigError, ValueError) as error:
        raise SystemExit(str(error)) from None
    if processes.is_main:
        reached = f"accepted length {evaluation.accepted_length:.2f} held out" if evaluation else "done"
        print(f"{reached}; the drafter is in {config.run.out}")
    processes.close()


if __name__ == "__main__":
    main()
