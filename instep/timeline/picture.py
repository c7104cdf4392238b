"""A picture of a step, for a paper or a README: what every rank did, what it sent, and what it waited for.

    step_picture     one step of all ranks
    side_by_side     a step by each strategy, one under the other, over one axis of time

    rank 0   |forward|backward |////|update|      hatched: a bubble, by its cause
                   ___|0|_|1|_|  2  |             a number: a bucket; a line: one is ready, but not its turn

It imports matplotlib, which takes half a second: modules that ranks import must not import this one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from instep.events import BATCH_NORM, COMPARISON, GLOBAL_LOSS, GRADIENT_SYNC, PARAMETER_UPDATE, Timeline
from instep.timeline import style
from instep.timeline.boxes import (
    BACKWARD,
    BUBBLES,
    DATA,
    HEADERS,
    OTHER,
    QUEUED,
    SENDS,
    SLOWER,
    TRAINS,
    UPDATE,
    Box,
    Panel,
    merged,
    panel,
)
from instep.timeline.style import GRID, INK, MUTED

HATCHES = {
    GRADIENT_SYNC: "////",
    PARAMETER_UPDATE: "xxxx",
    GLOBAL_LOSS: "----",
    BATCH_NORM: "||||",
    COMPARISON: "++++",
    SLOWER: "\\\\\\\\",
}
OTHER_HATCH = "//"
MOSTLY = 0.9  # bubbles next to each other are labelled as one if so much of them is of one kind
DARK = {BACKWARD, UPDATE, DATA, OTHER, HEADERS}  # words on them are white
LINE = 0.22  # how much of a row's height a line has

NARROWEST = 0.3 / style.PNG_DPI  # inches
SEAM = 0.006  # inches between boxes that have room for it
WORDS = 9.5  # size of the words in boxes, in points
GAP = 0.03  # inches between the rows of a rank
RANK_NAME = 0.17  # inches of height that a rank's name needs
PAD = 0.02  # inches beside them
LEFT, RIGHT = 0.8, 0.2  # inches beside the axes
AXIS, LEGEND, TITLE = 0.56, 0.24, 0.36  # inches: under the axes, per line of the legend, over a panel


@dataclass(frozen=True)
class Size:
    """How large things are, in inches."""

    width: float
    trains: float  # the height of a row of the thread that trains, or of a replica
    sends: float
    apart: float  # between ranks
    most: float = 14.0  # of a panel's height: more ranks get flatter


ONE = Size(width=5.8, trains=0.34, sends=0.2, apart=0.14)
SEVERAL = Size(width=9.5, trains=0.27, sends=0.17, apart=0.1)


def step_picture(
    timeline: Timeline,
    path: str | Path,
    *,
    step: int,
    title: str = "",
    subtitle: str = "",
    ranks: Sequence[int] | None = None,
) -> list[Path]:
    """Draw ``step`` of all ranks, or of ``ranks``; as SVG and as PNG, both named after ``path``.

    Raises:
        ValueError: these ranks have no events of this step.
    """
    with style.styled():
        return style.save(draw([panel(timeline, step, ranks)], ONE, title, subtitle), path)


def side_by_side(
    steps: Mapping[str, tuple[Timeline, int]],
    path: str | Path,
    *,
    title: str = "",
    subtitle: str = "",
    notes: Mapping[str, str] | None = None,
    ranks: Sequence[int] = (0, 1),
) -> list[Path]:
    """Draw a step by each strategy, all on one axis of time; as SVG and as PNG, both named after ``path``.

    Args:
        steps: by the strategy's name, the timeline and the step in it.
        notes: a few words on a strategy, to be written beside its name.

    Raises:
        ValueError: one of the steps has no events.
    """
    said = notes or {}
    panels = [panel(where, step, ranks, name, said.get(name, "")) for name, (where, step) in steps.items()]
    with style.styled():
        return style.save(draw(panels, SEVERAL, title, subtitle), path)


def draw(panels: Sequence[Panel], size: Size, title: str = "", subtitle: str = "") -> Figure:
    """The panels one under the other, below a head, above an axis of time and a legend."""
    titles = TITLE if any(one.name for one in panels) else 0.06
    layouts = [Layout.of(one, size) for one in panels]
    kinds = list(dict.fromkeys(kind for one in panels for kind in one.kinds))
    lines = _legend_lines(kinds, size.width)
    top = style.head_inches(title, subtitle, size.width) + titles
    bottom = AXIS + LEGEND * len(lines) + 0.06
    height = top + sum(layout.height for layout in layouts) + titles * (len(panels) - 1) + bottom
    figure = Figure(figsize=(size.width, height))
    style.head(figure, title, subtitle)
    across = size.width - LEFT - RIGHT
    longest = max(one.ms for one in panels)
    room = _inches(_length(longest), 11, bold=True) + 0.15
    y, above = height - top, None
    for one, layout in zip(panels, layouts, strict=True):
        y -= layout.height
        place = (LEFT / size.width, y / height, across / size.width, layout.height / height)
        above = axes = figure.add_axes(place, sharex=above)
        axes.set_xlim(0, longest * across / (across - room))
        _panel(axes, one, layout)
        last = one is panels[-1]
        axes.tick_params(axis="x", labelbottom=last)
        axes.spines["bottom"].set_color(MUTED if last else GRID)
        y -= titles
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:,.10g}")
    axes.set_xlabel("ms since the step began", fontsize=10.5)
    _legend(figure, lines)
    return figure


@dataclass(frozen=True)
class Layout:
    """Where the rows of a panel are; from the top, in inches."""

    rows: dict[tuple[int, str], tuple[float, float]]  # by rank and lane: from where, and how high
    ranks: dict[int, tuple[float, float]]  # from where to where
    height: float

    @classmethod
    def of(cls, one: Panel, size: Size) -> Layout:
        rows, ranks, y = {}, {}, 0.0
        for rank, lanes in one.rows.items():
            top, y = y, y + size.apart / 2
            for lane in lanes:
                rows[rank, lane] = y, size.sends if lane == SENDS else size.trains
                y += rows[rank, lane][1] + GAP
            y += size.apart / 2 - GAP
            ranks[rank] = top, y
        shrink = min(1.0, size.most / y)
        return cls(
            {row: (top * shrink, high * shrink) for row, (top, high) in rows.items()},
            {rank: (top * shrink, end * shrink) for rank, (top, end) in ranks.items()},
            y * shrink,
        )


def _panel(axes: Axes, one: Panel, layout: Layout) -> None:
    axes.set_ylim(layout.height, 0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    per_ms = _axes_inches(axes) / axes.get_xlim()[1]
    for (rank, lane), place in layout.rows.items():
        row = merged(one.rows[rank][lane], NARROWEST / per_ms * 1e6)
        _row(axes, row, one.start_ns, place, per_ms)
    for rank, (top, end) in layout.ranks.items():
        axes.vlines((one.ends_ns[rank] - one.start_ns) / 1e6, top, end, color=INK, linewidth=1.6)
    axes.annotate(
        _length(one.ms), (one.ms, layout.height / 2), (5, 0), textcoords="offset points", va="center",
        color=INK, fontsize=11, fontweight="bold",
    )  # fmt: skip
    every = math.ceil(RANK_NAME * len(layout.ranks) / layout.height)
    named = list(layout.ranks)[::every]
    middles = [top + high / 2 for top, high in (layout.rows[rank, TRAINS] for rank in named)]
    axes.set_yticks(middles, [f"rank {rank}" for rank in named])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10.5)
    if one.name:
        _name(axes, one)


def _name(axes: Axes, one: Panel) -> None:
    colour = style.COLOURS.get(one.name, INK)
    at: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(one.name, (0, 1), (0, 4), color=colour, fontsize=12, fontweight="bold", **at)
    beside = _inches(one.name, 12, bold=True) * 72 + 8
    axes.annotate(one.note, (0, 1), (beside, 4), color=MUTED, fontsize=10, **at)


def _row(axes: Axes, row: Sequence[Box], zero_ns: int, place: tuple[float, float], per_ms: float) -> None:
    """Draw the boxes of a row, kind by kind, then the words that have room in them."""
    top, high = place
    spans: dict[str, list[tuple[float, float]]] = {}
    for box in row:
        start, length = (box.start_ns - zero_ns) / 1e6, (box.end_ns - box.start_ns) / 1e6
        seam = SEAM / per_ms if length * per_ms > 5 * SEAM and box.kind not in BUBBLES else 0.0
        spans.setdefault(box.kind, []).append((start, length - seam))
    for kind, where in spans.items():
        line = high * LINE if kind == QUEUED else high
        axes.broken_barh(where, (top + (high - line) / 2, line), zorder=2, **_look(kind))
    if high < WORDS / 72:
        return
    for box in _labelled(row):
        length = (box.end_ns - box.start_ns) / 1e6 * per_ms
        text = next((text for text in box.texts if _inches(text, WORDS) + 2 * PAD < length), "")
        if text:
            middle = ((box.start_ns + box.end_ns) / 2 - zero_ns) / 1e6
            _write(axes, text, (middle, top + high / 2), box.kind)


def _labelled(row: Sequence[Box]) -> Iterator[Box]:
    """What to write into: the boxes of the row, but a bubble that slivers of another kind cut up as one."""
    for part in _touching(row):
        took = Counter[Box]()
        for box in part:
            took[replace(box, start_ns=0, end_ns=0)] += box.end_ns - box.start_ns
        [(most, ns)] = took.most_common(1)
        if ns > MOSTLY * took.total():
            yield replace(most, start_ns=part[0].start_ns, end_ns=part[-1].end_ns)
        else:
            yield from part


def _touching(row: Sequence[Box]) -> Iterator[list[Box]]:
    """Bubbles that touch each other, together; every other box by itself."""
    part: list[Box] = []
    for box in row:
        goes_on = part and part[-1].end_ns >= box.start_ns  # greater: it was widened
        if not (goes_on and {part[-1].kind, box.kind} <= set(BUBBLES)):
            if part:
                yield part
            part = []
        part.append(box)
    if part:
        yield part


def _write(axes: Axes, text: str, at: tuple[float, float], kind: str) -> None:
    look: dict[str, Any] = {"color": "white" if kind in DARK else INK}
    if kind in BUBBLES:
        look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9}
    axes.text(*at, text, ha="center", va="center_baseline", fontsize=WORDS, zorder=4, clip_on=True, **look)


def _look(kind: str) -> dict[str, Any]:
    if kind not in BUBBLES:
        return {"facecolor": style.COLOURS[kind], "linewidth": 0}
    colour = style.COLOURS[kind if kind == SLOWER else "waits for messages"]
    hatch = HATCHES.get(kind, OTHER_HATCH)
    return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "linewidth": 0}


def _legend_lines(kinds: Sequence[str], width: float) -> list[list[str]]:
    """The kinds in lines that fit."""
    lines: list[list[str]] = [[]]
    for kind in kinds:
        if lines[-1] and sum(map(_entry, [*lines[-1], kind])) > width - 2 * style.EDGE:
            lines.append([])
        lines[-1].append(kind)
    return lines


def _entry(kind: str) -> float:
    return 0.5 + _inches(_label(kind), 10)


def _legend(figure: Figure, lines: Sequence[Sequence[str]]) -> None:
    width, height = figure.get_size_inches()
    for number, line in enumerate(reversed(lines)):
        x, y = style.EDGE, 0.12 + LEGEND * number
        for kind in line:
            high = 0.15 * (LINE if kind == QUEUED else 1)
            corner = x / width, (y + (0.15 - high) / 2) / height
            patch = Rectangle(corner, 0.3 / width, high / height, transform=figure.transFigure, **_look(kind))
            figure.add_artist(patch)
            figure.text((x + 0.36) / width, (y + 0.075) / height, _label(kind), fontsize=10, va="center")
            x += _entry(kind)


def _label(kind: str) -> str:
    return f"bubble: {kind}" if kind in BUBBLES else kind


def _length(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


@cache
def _inches(text: str, points: float, *, bold: bool = False) -> float:
    """How wide a text is."""
    font = FontProperties(family=style.STYLE["font.family"], weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=points, prop=font).get_extents().width) / 72 if text else 0.0


def _axes_inches(axes: Axes) -> float:
    figure = axes.figure
    return axes.get_position().width * figure.get_figwidth()  # type: ignore[union-attr]
