"""Of what recoveries are made: a bar per fault, a colour per part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.faults.judge import PARTS
from instep.bench.tables import cell
from instep.timeline import palette, style

WIDTH, BAR = 10.5, 0.3  # inches
# Apart, because what is watched for seconds before it is believed would dwarf the rest.
AT_ONCE_S = 1.0
COLOURS = {
    "detect": palette.VERMILION,
    "ready": palette.ORANGE,
    "join": palette.SKY,
    "state": palette.BLUE,
    "step": palette.GREEN,
}
WORDS = {
    "detect": "noticed",
    "ready": "survivors and newcomer ready",
    "join": "group joined",
    "state": "state agreed",
    "step": "first new step",
}


def recoveries(rows: Sequence[dict[str, Any]], path: Path, *, subtitle: str) -> list[Path]:
    """Stacked bars of the seconds of each of ``PARTS``, in two panels: noticed at once, and watched for."""
    panels = {
        "noticed when it happens": [row for row in rows if row["detect"] < AT_ONCE_S],
        "noticed because nothing happens": [row for row in rows if row["detect"] >= AT_ONCE_S],
    }
    panels = {title: part for title, part in panels.items() if part}
    with style.styled():
        figure = Figure(figsize=(WIDTH, 1.6 + BAR * len(rows) + 0.75 * len(panels)))
        counts = [len(part) for part in panels.values()]
        grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": counts})[:, 0]
        style.head(figure, "From the fault to the first new step", f"seconds, {subtitle}")
        longest = max(len(row["name"]) for row in rows)
        style.place(figure, left=0.4 + 0.085 * longest, right=0.75, top=1.55, bottom=0.6)
        figure.subplots_adjust(hspace=0.95 / BAR / (len(rows) / len(panels)))
        for axes, (title, part) in zip(grid, panels.items(), strict=True):
            _stack(axes, part)
            axes.set_title(title, loc="left", fontsize=12, color=palette.INK, pad=6)
        figure.legend(
            *grid[0].get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=(style.EDGE / WIDTH, 1 - 0.85 / figure.get_size_inches()[1]),
            ncols=len(PARTS),
            frameon=False,
            fontsize=10,
            handlelength=1.0,
            borderpad=0,
        )
        return style.save(figure, path)


def _stack(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    left = [0.0] * len(rows)
    for part in PARTS:
        widths = [row[part] for row in rows]
        axes.barh(range(len(rows)), widths, left=left, height=0.66, color=COLOURS[part], label=WORDS[part])
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(
            cell(total, 3),
            (total, place),
            (6, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=10,
        )
    axes.set_yticks(range(len(rows)), names, color=palette.INK, fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(left) * 1.08)
    axes.grid(visible=False, axis="y")
