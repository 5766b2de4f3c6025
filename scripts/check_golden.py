"""Compare drafters, losses and masks with golden vectors: numbers that other implementations computed.

    python scripts/check_golden.py DIR [--verbose]

DIR holds folders with ``vectors.json`` and ``vectors.safetensors``; "family" in the former says what
they are.  Checkpoints go through the project's own loaders.  Shown is the largest error of each vector, of
all of them with --verbose, else the worst of each folder and every failure.  The exit status is 1 if any
fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from angelspec_backend.drafters.spec import BLOCK_KINDS, CHAIN_KINDS
from golden_blocks import check_blocks
from golden_chain import check_chain
from golden_compare import Comparison, Comparisons
from golden_losses import check_losses
from golden_masks import check_chat_mask, check_masks

CHECKS: Mapping[str, Callable[[Path, Comparisons], None]] = {
    **dict.fromkeys(BLOCK_KINDS, check_blocks),
    **dict.fromkeys(CHAIN_KINDS, check_chain),
    "losses": check_losses,
    "masks": check_masks,
    "chat_mask": check_chat_mask,
}
"""What checks a folder, by its family."""


def find_folders(root: Path) -> list[Path]:
    """All folders with vectors, ``root`` itself included."""
    return sorted(path.parent for path in root.rglob("vectors.json"))


def check_folder(folder: Path, name: str = "") -> list[Comparison]:
    """All comparisons of one folder; what cannot even be loaded or computed is a failed one."""
    compare = Comparisons(name or folder.name)
    try:
        family = json.loads((folder / "vectors.json").read_text()).get("family")
        if family in CHECKS:
            CHECKS[family](folder, compare)
            if not compare.all:
                compare.fail("vectors", "the folder holds nothing that is checked")
        else:
            compare.fail("family", f"is '{family}', known are {', '.join(CHECKS)}")
    except Exception as error:  # a broken folder must not hide the results of the others
        compare.fail("check", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return compare.all


def results_table(results: list[Comparison], verbose: bool) -> Table:
    """One line per comparison, or per folder and failure."""
    table = Table("folder", "vector", "largest error", "allowed", "result", "remark", show_edge=False)
    for folder in dict.fromkeys(each.folder for each in results):
        mine = [each for each in results if each.folder == folder]
        shown = mine if verbose else [each for each in mine if not each.passed]
        for each in shown:
            table.add_row(folder, each.name, *_figures(each))
        if not shown:
            worst = max(mine, key=lambda each: each.error)
            table.add_row(folder, f"all {len(mine)}, worst: {worst.name}", *_figures(worst))
    return table


def _figures(each: Comparison) -> tuple[str, str, str, str]:
    allowed = "exact"
    if each.tolerance is not None:
        allowed = f"{each.tolerance[0]:g}" + (f" + {each.tolerance[1]:g} rel." if each.tolerance[1] else "")
    return f"{each.error:.2g}", allowed, "ok" if each.passed else "[red]FAILED", each.remark


def main() -> int:
    """Check all folders and print what was found."""
    parser = argparse.ArgumentParser(description="Compare with golden vectors.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the vectors are")
    parser.add_argument("--verbose", action="store_true", help="show every vector")
    args = parser.parse_args()
    folders = find_folders(args.folder)
    if not folders:
        print(f"{args.folder}: no vectors.json below it", file=sys.stderr)
        return 1
    results = [
        each
        for folder in folders
        for each in check_folder(folder, str(folder.relative_to(args.folder)) or folder.name)
    ]
    Console().print(results_table(results, args.verbose))
    failed = sum(not each.passed for each in results)
    print(f"{len(results)} vectors in {len(folders)} folders, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
