"""The chart of predicted against measured: step times and memory of the runs of the Sailor paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.published.sailor import off
from instep.timeline import style
from instep.timeline.palette import BLUE, GREEN, GRID, INK, MUTED, VERMILION

KINDS = {"OPT-350M on GH200": BLUE, "GPT-Neo-2.7B on GH200": GREEN, "OPT-350M on mixed GPUs": VERMILION}
PANELS = (  # predicted, measured, unit, words
    ("by_profile_s", "step_s", 1.0, "predicted step, s", "measured step, s"),
    ("memory", "memory_bytes", 1e9, "predicted peak memory, GB", "measured peak memory, GB"),
)
BAND = 1.1


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the chart as PNG: a point per run, on the diagonal where the prediction is right."""
    with style.styled():
        figure = Figure(figsize=(9.5, 5.3))
        panels = figure.subplots(1, 2)
        style.head(
            figure,
            "Steps and memory of published runs, as planned",
            "Runs of the Sailor paper (SOSP 2025) on 4 to 256 GPUs; grey: within 10 %. Steps by the authors' "
            "profile of a block on one host, memory by formula",
        )
        style.place(figure, left=0.75, right=0.3, top=1.35, bottom=0.95)
        figure.subplots_adjust(wspace=0.22)
        for axes, panel in zip(panels, PANELS, strict=True):
            _points(axes, found, *panel)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="lower center", ncols=3, frameon=False, fontsize=10)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def _points(
    axes: Axes, found: Sequence[Mapping[str, Any]], predicted: str, measured: str, unit: float, y: str, x: str
) -> None:
    rows = [row for row in found if off(row, predicted, measured) is not None]
    both = [(float(row[measured]) / unit, row[predicted] / unit) for row in rows]
    low, high = 0.7 * min(map(min, both)), 1.4 * max(map(max, both))
    ends = [low, high]
    axes.fill_between(
        ends, [v / BAND for v in ends], [v * BAND for v in ends], color=GRID, linewidth=0, zorder=1
    )
    axes.plot(ends, ends, color=MUTED, linewidth=1, zorder=2)
    for name, colour in KINDS.items():
        mine = [point for point, row in zip(both, rows, strict=True) if _kind(row) == name]
        axes.scatter(*zip(*mine, strict=True), s=34, color=colour, edgecolor="white", label=name, zorder=3)
    for which, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        style.log_axis(axes, which, lambda value: f"{value:g}")
        if high / low < 50:  # one power of ten is no scale
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set(xlim=ends, ylim=ends)
    axes.set_xlabel(x)
    style.caption(axes, y)
    axes.tick_params(colors=INK)


def _kind(row: Mapping[str, Any]) -> str:
    return f"{row['model']} on {'GH200' if row['gpus'] == 'GH200' else 'mixed GPUs'}"
