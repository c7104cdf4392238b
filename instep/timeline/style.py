"""How every chart looks: type, margins in inches, and the files."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from instep.regular_files import create_over
from instep.timeline.palette import GRID, INK, MUTED

STYLE: Any = {
    "svg.hashsalt": "instep",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "hatch.linewidth": 1.1,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
}
PNG_DPI = 160
LETTER = 0.083  # inches, on average and at size 10
EDGE = 0.3  # inches between the figure's edge and its words


@contextmanager
def styled() -> Iterator[None]:
    """In the block, matplotlib draws in this style."""
    with matplotlib.rc_context(STYLE):
        yield


def place(figure: Figure, *, left: float, right: float, top: float, bottom: float) -> None:
    """Margins around the axes, in inches, whatever the figure's size."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height
    )


def head(figure: Figure, title: str, subtitle: str) -> None:
    """The title says what is seen, the subtitle how it was measured."""
    width, height = figure.get_size_inches()
    lines = "\n".join(_lines(subtitle, width))
    figure.text(EDGE / width, 1 - 0.28 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(EDGE / width, 1 - 0.60 / height, lines, fontsize=10, color=MUTED, va="top")


def head_inches(title: str, subtitle: str, width: float) -> float:
    """How high the head of a figure that is ``width`` inches wide is; none without words."""
    return 0.6 + 0.16 * len(_lines(subtitle, width)) if title or subtitle else 0.0


def _lines(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, width=int((width - 2 * EDGE) / LETTER))


def caption(axes: Axes, text: str) -> None:
    """What the vertical axis counts, above its upper end, to be read without turning the head."""
    axes.annotate(
        text, (0, 1), (-2, 7), xycoords="axes fraction", textcoords="offset points", color=MUTED, fontsize=10
    )


def log_axis(axes: Axes, which: str, text: object) -> None:
    """A logarithmic axis with a labelled tick at every power of ten."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(base=10, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))  # type: ignore[operator]


def label_ends(axes: Axes, ends: dict[str, float], colour: dict[str, str], size: float = 11) -> None:
    """Names to the right of the axes, at the heights ``ends`` (in data) or as near as they fit."""
    axes.autoscale_view()
    to_points = 72 / axes.figure.dpi
    box = axes.get_window_extent()
    heights = {name: (axes.transData.transform((1, y))[1] - box.y0) * to_points for name, y in ends.items()}
    for name, height in spread(heights, size * 1.35, 0, box.height * to_points).items():
        axes.annotate(
            name, (1, 0), (9, height), xycoords="axes fraction", textcoords="offset points", va="center",
            color=colour[name], fontsize=size, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def spread(
    heights: dict[str, float], gap: float, low: float = -math.inf, high: float = math.inf
) -> dict[str, float]:
    """The same names in the same order of height, none nearer to the next than ``gap``.

    Names that would overlap become a stack around the mean of their heights; stacks stay within ``low`` and
    ``high`` if there is room.
    """
    stacks: list[tuple[list[str], float]] = []  # names from the lowest, and their middle
    for name in sorted(heights, key=lambda name: heights[name]):
        names, wanted = [name], heights[name]
        middle = _within(wanted, names, gap, low, high)
        while stacks and middle - stacks[-1][1] < gap * (len(names) + len(stacks[-1][0])) / 2:
            below, centre = stacks.pop()
            wanted = (middle * len(names) + centre * len(below)) / (len(names) + len(below))
            names = below + names
            middle = _within(wanted, names, gap, low, high)
        stacks.append((names, middle))
    return {
        name: middle + gap * (i - (len(names) - 1) / 2)
        for names, middle in stacks
        for i, name in enumerate(names)
    }


def _within(middle: float, names: list[str], gap: float, low: float, high: float) -> float:
    half = gap * (len(names) - 1) / 2
    return max(low + half, min(middle, high - half))


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write the figure as SVG and as PNG, both named after ``path``; the same figure gives the same bytes."""
    svg, png = Path(path).with_suffix(".svg"), Path(path).with_suffix(".png")
    with styled(), os.fdopen(create_over(svg), "wb") as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    with os.fdopen(create_over(png), "wb") as file:
        file.write(png_of(figure))
    return [svg, png]


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG."""
    file = io.BytesIO()
    with styled():
        figure.savefig(file, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return file.getvalue()
