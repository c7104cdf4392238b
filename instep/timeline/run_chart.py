"""Charts of a run over its steps: a curve, and the parts of a step stacked on each other.

Both return a PNG. A figure that is missing is a gap in a curve, and nothing in a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan

from matplotlib.figure import Figure

from instep.timeline.palette import COLOURS
from instep.timeline.style import place, png_of, styled

HIGHEST = 1e30  # what is beyond is no figure to draw
USUAL = 0.97  # of the steps: a first one that takes ten times as long would press all others flat

Values = Sequence[float | None]


def curve(steps: Values, values: Values, dots: Iterable[Values] = (), *, from_zero: bool = False) -> bytes:
    """A curve; ``dots`` are (step, value) of a second figure."""
    with styled():
        figure = Figure(figsize=(4.6, 2.5))
        axes = figure.add_subplot()
        y = [_drawable(value) for value in values]
        axes.plot([_drawable(step) for step in steps], y, color=COLOURS["compute"])
        axes.plot(
            *([_drawable(at[i]) for at in dots] for i in (0, 1)), "o", color=COLOURS["exposed communication"]
        )
        if from_zero:
            axes.set_ylim(0, _ceiling(y))
        axes.set_xlabel("step")
        place(figure, left=0.75, right=0.15, top=0.1, bottom=0.55)
        return png_of(figure)


def stacked_parts(steps: Sequence[int], parts: Mapping[str, Values]) -> bytes:
    """The ms of each of ``parts`` of the steps, in the colours of the parts."""
    with styled():
        figure = Figure(figsize=(9.5, 2.8))
        axes = figure.add_subplot()
        layers = [[_drawable(value or 0.0) for value in values] for values in parts.values()]
        axes.stackplot(steps, layers, colors=[COLOURS[name] for name in parts])
        axes.set_ylim(0, _ceiling([sum(at) for at in zip(*layers, strict=True)]))
        axes.set_xlabel("step")
        axes.set_ylabel("ms")
        place(figure, left=0.75, right=0.15, top=0.1, bottom=0.55)
        return png_of(figure)


def _drawable(value: float | None) -> float:
    return value if value is not None and abs(value) < HIGHEST else nan


def _ceiling(values: Iterable[float]) -> float:
    """The upper end of an axis from zero, which a few steps may go beyond."""
    known = sorted(value for value in values if value >= 0) or [1.0]
    usual = known[int(len(known) * USUAL)] if len(known) > 1 else known[0]
    return (usual * 1.25 if known[-1] > 2 * usual else known[-1] * 1.08) or 1.0
