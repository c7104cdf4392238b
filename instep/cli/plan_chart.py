"""Charts of ``instep plan``: a rank's memory by number of ranks, and the parts of a step.

It imports matplotlib, which takes half a second: the command imports it for --chart alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from instep.plan.memory_estimate import MemoryPlan
from instep.plan.memory_table import GB, shards
from instep.plan.step_table import COLUMNS, ScalePlan, figures, scale
from instep.plan.step_time import TimePlan
from instep.timeline import style
from instep.timeline.palette import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PURPLE, SKY

PARTS = {
    "weights": (BLUE, "parameters", "compute copy", "master weights", "gathered"),
    "gradients": (ORANGE, "gradients", "partial sums", "buffers"),
    "optimizer": (GREEN, "optimizer"),
    "activations": (SKY, "activations", "recomputation"),
    "snapshots": (PURPLE, "snapshots"),
    "not tensors": (GREY, "constants"),
}
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # a number over the line of the device
MOST_DEVICES = 2.5  # what is far beyond the device is cut off, and has its number


def draw(plan: MemoryPlan, path: str) -> list[Path]:
    """Write what ``plan`` answers as PNG and SVG; returns the two files."""
    if isinstance(plan, TimePlan):
        return _step(plan, path)
    smallest, ranks = shards(plan)
    device = plan.device.memory_gb
    sizes = {name: [rank.of(*parts) / GB for rank in ranks.values()] for name, (_, *parts) in PARTS.items()}
    colours = {name: colour for name, (colour, *_) in PARTS.items()}
    fits = f"{smallest:,} ranks fit" if smallest else "no number of ranks fits"
    words = f"dashed: a device of {device:g} GB; {fits}", f"ranks in stage {plan.parallel.stage or 3}"
    return _stacked(sizes, colours, list(map(str, ranks)), ("Memory of a rank, GB", *words), path, device)


def _step(plan: TimePlan, path: str) -> list[Path]:
    if isinstance(plan, ScalePlan):
        found = {f"{row['ranks']:,}": row["parts"][0] for row in scale(plan)}
        words = "the same work per rank" if plan.weak else "the same work per step", "ranks"
    else:
        found = {f"{row.rank}": row for row in figures(plan)["parts"]}
        words = f"of {plan.parallel.world_size:,} ranks", "first rank of each kind"
    sizes = {name: [1e3 * row.totals()[name] for row in found.values()] for name in COLUMNS}
    return _stacked(sizes, COLOURS, list(found), ("Step, ms", *words), path)


def _stacked(
    sizes: Mapping[str, Sequence[float]], colours: Mapping[str, str], ticks: Sequence[str],
    head: tuple[str, str, str], path: str, line: float = 0.0,
) -> list[Path]:  # fmt: skip
    """A bar per tick, of parts from the ground up, with its sum."""
    with style.styled():
        figure = Figure(figsize=(9.5, 4.6))
        axes = figure.subplots()
        style.head(figure, *head[:2])
        style.place(figure, left=0.8, right=2.6, top=1.1, bottom=0.7)
        axes.set_xlabel(head[2])
        totals = [0.0] * len(ticks)
        for name, values in sizes.items():
            if any(values):
                axes.bar(ticks, values, 0.7, totals, color=colours[name], label=name, zorder=2)
            totals = [a + b for a, b in zip(totals, values, strict=True)]
        top = min(max(*totals, line), MOST_DEVICES * line if line else max(totals))
        axes.set_ylim(0, 1.1 * top)
        for place, total in enumerate(totals):
            axes.annotate(
                f"{total:,.4g}" if total < 1e4 else f"{total:,.0f}", (place, min(total, 1.02 * top)), (0, 4),
                textcoords="offset points", ha="center", fontsize=9, zorder=5, bbox=BEHIND,
            )  # fmt: skip
        if line:
            axes.axhline(line, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=4)
        axes.grid(visible=False, axis="x")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
        return style.save(figure, path)
