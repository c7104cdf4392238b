"""The grids of schedules as boxes in simulated time, one schedule under the other over one axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from instep.pipeline.actions import BACKWARD, COMPUTE, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from instep.pipeline.check import peak_activations
from instep.pipeline.simulate import Simulated, StageTimes, bubble_rate, makespan_s, run, simulate
from instep.timeline import style
from instep.timeline.style import GRID, INK, MUTED

WIDTH = 9.5  # inches
ROW, APART, LEFT, RIGHT, BOTTOM = 0.2, 0.46, 0.75, 0.75, 0.85
LONGEST = 34.0  # what goes on after it is cut off
WORDS = 7.5
COLOURS = {
    FORWARD: style.SKY,
    BACKWARD: style.BLUE,
    INPUT_GRADIENT: style.ORANGE,
    WEIGHT_GRADIENT: style.GREEN,
}
LEGEND = {
    FORWARD: "forward F",
    BACKWARD: "backward B = I + W",
    INPUT_GRADIENT: "input gradient I",
    WEIGHT_GRADIENT: "weight gradient W",
}
WHITE_ON = {BACKWARD, WEIGHT_GRADIENT}
TITLE = "What a pipeline's schedule makes of its ranks' time"


def grids(schedules: Sequence[Schedule], path: Path) -> list[Path]:
    """Draw ``schedules``; F, I and W of all a rank's stages take one unit each, messages nothing."""
    first = schedules[0]
    subtitle = (
        f"{first.num_ranks} ranks, {first.num_micro_batches} micro-batches, simulated; a number is a "
        f"micro-batch, underlined: in a rank's second stage; grey is a rank that waits. Bubbles count from a "
        f"rank's first box to its last, activations are what a rank keeps of one micro-batch."
    )
    with style.styled():
        top = style.head_inches(TITLE, subtitle, WIDTH)
        panel = ROW * first.num_ranks
        height = top + len(schedules) * (panel + APART) + BOTTOM
        figure = Figure(figsize=(WIDTH, height))
        style.head(figure, TITLE, subtitle)
        y = height - top
        for schedule in schedules:
            y -= panel + APART
            place = (LEFT / WIDTH, y / height, (WIDTH - LEFT - RIGHT) / WIDTH, panel / height)
            axes = figure.add_axes(place)
            _panel(axes, schedule)
            axes.tick_params(axis="x", labelbottom=schedule is schedules[-1])
        axes.set_xlabel("time, in forwards of one micro-batch on one rank")
        _legend(figure)
        return style.save(figure, path)


def _panel(axes: Axes, schedule: Schedule) -> None:
    chunks = schedule.num_stages // schedule.num_ranks
    times = StageTimes(1 / chunks, 1 / chunks, 1 / chunks)
    timeline = simulate(schedule, times)
    end = makespan_s(timeline)
    axes.set_xlim(0, LONGEST)
    axes.set_ylim(schedule.num_ranks, 0)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks(
        [rank + 0.5 for rank in range(schedule.num_ranks)],
        [f"rank {rank}" for rank in range(schedule.num_ranks)],
    )
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    for rank in range(schedule.num_ranks):
        axes.add_patch(Rectangle((0, rank + 0.06), min(end, LONGEST), 0.88, facecolor=GRID, linewidth=0))
    for one in run(schedule, times):
        if one.action.kind in COMPUTE and one.end_s <= LONGEST:
            _box(axes, one, later=one.action.stage >= schedule.num_ranks)
    peak = max(peak_activations(schedule)) / chunks
    said = (
        f"{bubble_rate(timeline):.0%} bubble, at most {peak:g} {'activation' if peak == 1 else 'activations'}"
    )
    axes.annotate(
        schedule.name, (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points",
        fontsize=11.5, fontweight="bold", color=INK,
    )  # fmt: skip
    axes.annotate(
        said, (0, 1), (88, 4), xycoords="axes fraction", textcoords="offset points", fontsize=10,
        color=MUTED,
    )  # fmt: skip
    words = f"{end:g}" if end <= LONGEST else f"... {end:g}"
    axes.annotate(
        words, (min(end, LONGEST), schedule.num_ranks / 2), (5, 0), textcoords="offset points",
        va="center", fontsize=11, fontweight="bold", color=INK, annotation_clip=False,
    )  # fmt: skip


def _box(axes: Axes, one: Simulated, later: bool) -> None:
    length, kind = one.end_s - one.start_s, one.action.kind
    seam = 0.045
    corner = one.start_s, one.rank + 0.06
    axes.add_patch(Rectangle(corner, length - seam, 0.88, facecolor=COLOURS[kind], linewidth=0))
    if later:
        corner = one.start_s, one.rank + 0.82
        axes.add_patch(Rectangle(corner, length - seam, 0.12, facecolor=INK, linewidth=0))
    axes.text(
        one.start_s + (length - seam) / 2,
        one.rank + (0.48 if later else 0.52),
        str(one.action.micro_batch),
        ha="center",
        va="center",
        fontsize=WORDS,
        color="white" if kind in WHITE_ON else INK,
    )


def _legend(figure: Figure) -> None:
    width, height = figure.get_size_inches()
    x = LEFT
    for kind, words in LEGEND.items():
        corner = x / width, 0.14 / height
        figure.add_artist(
            Rectangle(
                corner, 0.24 / width, 0.15 / height, transform=figure.transFigure,
                facecolor=COLOURS[kind], linewidth=0,
            )
        )  # fmt: skip
        figure.text((x + 0.31) / width, 0.215 / height, words, fontsize=10, va="center")
        x += 0.55 + 0.085 * len(words)
