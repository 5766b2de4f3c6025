"""Draw how far engine steps are from their floor, from the lines that benchmark_engine wrote.

    python scripts/plot_engine.py [--steps results/engine_steps.jsonl] [--out results/engine_floor.png]

One panel per context length: bars of the medians, the floor at the bottom and what the step takes beyond
it on top, with their ratio.  Besides the PNG an SVG of the same name is written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FLOOR, BEYOND, TEXT, GRID = "#4477aa", "#ee9944", "#333333", "#dddddd"
"""Told apart without colour vision and, on their own white ground, on a page of any colour."""


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The last line of every cell: rows, new tokens and context.

    Raises:
        SystemExit: there are no cells in the file.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        steps = [line for line in lines if "prefill_tokens" not in line]
        cells = {(cell["context"], cell["rows"], cell["new_tokens"]): cell for cell in steps}
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path} holds no lines of benchmark_engine: {error}") from None
    if not cells:
        raise SystemExit(f"{path} is empty; benchmark_engine --out writes it")
    return [cells[key] for key in sorted(cells)]


def draw(cells: list[dict[str, Any]]) -> Figure:
    """The picture."""
    contexts = sorted({cell["context"] for cell in cells})
    # Without pyplot there is no global state and no window.
    figure = Figure(figsize=(5.2 * len(contexts), 3.8), facecolor="white", layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for panel, context in zip(panels, contexts, strict=True):
        _draw_panel(panel, [cell for cell in cells if cell["context"] == context])
        panel.set_title(f"{context} tokens of context", fontsize=9, color=TEXT)
    panels[0].set_ylabel("median ms per step", fontsize=9, color=TEXT)
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")
    threads = f"{cells[0].get('cores', '?')} cores, {cells[0].get('bandwidth_gb_s', 0):.0f} GB/s"
    figure.suptitle(f"Engine steps over their floor ({threads})", fontsize=10, color=TEXT)
    return figure


def _draw_panel(panel: Any, cells: list[dict[str, Any]]) -> None:
    places = range(len(cells))
    floors = [cell["floor_ms"] for cell in cells]
    beyond = [max(cell["step_ms"] - cell["floor_ms"], 0.0) for cell in cells]
    panel.bar(places, floors, color=FLOOR, label="floor: matrix products, reading of KV")
    panel.bar(places, beyond, bottom=floors, color=BEYOND, label="all else in the step")
    for place, cell in zip(places, cells, strict=True):
        height = max(cell["step_ms"], cell["floor_ms"])
        label = f"{cell['step_ms'] / cell['floor_ms']:.2f}×"
        panel.annotate(label, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    labels = [f"{cell['rows']}×{cell['new_tokens']}" for cell in cells]
    panel.set_xticks(list(places), labels, fontsize=7, rotation=45)
    panel.set_xlabel("rows × new tokens per row", fontsize=9, color=TEXT)
    panel.tick_params(colors=TEXT, labelsize=7)
    panel.set_axisbelow(True)
    panel.grid(axis="y", color=GRID)
    panel.margins(y=0.3)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=Path, default=ROOT / "results" / "engine_steps.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "engine_floor.png")
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "engine"  # the same lines give the same file
    figure = draw(read_cells(options.steps))
    figure.savefig(options.out.with_suffix(".png"), dpi=110)
    figure.savefig(options.out.with_suffix(".svg"), metadata={"Date": None})
    print(f"{options.out.with_suffix('.png')} and .svg")


if __name__ == "__main__":
    main()
