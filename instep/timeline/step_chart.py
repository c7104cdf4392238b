"""Charts of a step, for a paper or a README: what every rank did, what it sent, and what it waited for.

    step_chart       one step of all ranks
    side_by_side     a step by each strategy, one under the other, over one axis of time

    rank 0   |forward|backward |////|update|      hatched: a bubble, by its cause
                   ___|0|_|1|_|  2  |             a number: a bucket; a line: one is ready, but not its turn

In a step of a pipeline the numbers in forwards and backwards are micro-batches; over the rows stands when the
pipeline fills, is in its steady state, in which all ranks have begun and none is done, and drains.

Per rank there is a row of the thread that trains, and under it one of the thread of exchanges. Events nest,
the boxes of a row do not: of what covers each other, only what is on top is there.

    events   |---- step -----------------------------|        boxes   |forward|backward|///////|update|
             |forward|backward|-- gradient sync --|update|
                                                  bubbles: what of a wait nothing else covers

It imports matplotlib, which takes half a second: modules that ranks import must not import this one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from instep.events import (
    BATCH_NORM,
    COMPARISON,
    GLOBAL_LOSS,
    GRADIENT_SYNC,
    PARAMETER_UPDATE,
    PIPELINE,
    STEP,
    WAITS,
    Event,
    Timeline,
)
from instep.pipeline.actions import INPUT_GRADIENT as I
from instep.pipeline.actions import SPANS
from instep.pipeline.actions import WEIGHT_GRADIENT as W
from instep.timeline import style
from instep.timeline.bubbles import DRAIN, FILL, PHASES, STEADY, StepWindow, bubbles
from instep.timeline.palette import COLOURS, GRID, INK, MUTED

TRAINS, SENDS = "compute", "communication"  # the rows of a rank
# Kinds of boxes, besides the causes of bubbles in which messages travel.
HOST, DATA, UPDATE, OTHER, FORWARD, BACKWARD = (
    "host code",
    "data",
    "update",
    "other compute",
    "forward",
    "backward",
)
INPUT_GRADIENT, WEIGHT_GRADIENT = SPANS[I], SPANS[W]
SLOWER = "waits for a slower rank"
QUEUED, LATE, HEADERS, EXCHANGE, MESSAGE = (
    "ready, queued",
    "ready, waits for another rank",
    "headers",
    "exchange",
    "message between stages",
)
OF_EXCHANGES = {"queued": QUEUED, "wait": LATE, "agree": HEADERS}  # and all else is EXCHANGE
BUBBLES = (SLOWER, *PHASES, *sorted(WAITS - {PIPELINE}))
SHORT = {FILL: "fill", STEADY: "waits", DRAIN: "drain"}  # in boxes
# In the order in which a reader meets them.
_WORK = (DATA, FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, OTHER, UPDATE, HOST)
KINDS = (*_WORK, MESSAGE, EXCHANGE, HEADERS, LATE, QUEUED, *BUBBLES)
# What covers what: the later one. Bubbles lie on the backward that they are in, but not on each other.
_ON_TOP = (QUEUED, LATE, MESSAGE, EXCHANGE, HEADERS)
_COVERS = (HOST, DATA, UPDATE, OTHER, FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, *_ON_TOP)
_LAYERS = {kind: _COVERS.index(kind) if kind in _COVERS else len(_COVERS) for kind in KINDS}

HATCHES = {
    GRADIENT_SYNC: "////",
    PARAMETER_UPDATE: "xxxx",
    GLOBAL_LOSS: "----",
    BATCH_NORM: "||||",
    COMPARISON: "++++",
    SLOWER: "\\\\\\\\",
    FILL: "////",
    STEADY: "....",
    DRAIN: "\\\\\\\\",
}
OTHER_HATCH = "//"
MOSTLY = 0.9  # bubbles next to each other are labelled as one if so much of them is of one kind
DARK = {BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, UPDATE, DATA, OTHER, HEADERS}  # words on them are white
LINE = 0.22  # how much of a row's height a line has

NARROWEST = 0.3 / style.PNG_DPI  # inches
SEAM = 0.006  # inches between boxes that have room for it
WORDS = 9.5  # size of the words in boxes, in points
GAP = 0.03  # inches between the rows of a rank
RANK_NAME = 0.17  # inches of height that a rank's name needs
PAD = 0.02  # inches beside them
LEFT, RIGHT = 0.8, 0.2  # inches beside the axes
AXIS, LEGEND, TITLE = 0.56, 0.24, 0.36  # inches: under the axes, per line of the legend, over a panel
BAND = 0.26  # inches over the rows, where a pipeline's phases are named


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


def step_chart(
    timeline: Timeline,
    *,
    step: int,
    title: str = "",
    subtitle: str = "",
    ranks: Sequence[int] | None = None,
) -> Figure:
    """Draw ``step`` of all ranks, or of ``ranks``.

    Raises:
        ValueError: these ranks have no events of this step.
    """
    with style.styled():
        one = panel(timeline, step, ranks)
        size = ONE if one.phases_ns is None else replace(ONE, width=SEVERAL.width)  # many boxes, with numbers
        return draw([one], size, title, subtitle)


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


@dataclass(frozen=True)
class Box:
    """An interval of one of ``KINDS`` in a row; ``texts`` are what may be written into it, best first."""

    kind: str
    start_ns: int
    end_ns: int
    texts: tuple[str, ...] = ()


Phases: TypeAlias = tuple[int, int, int, int]
"""When a pipeline's fill, its steady state and its drain begin, and when that ends."""


@dataclass(frozen=True)
class Panel:
    """One step of some ranks; times count from ``start_ns``, when the first of them began."""

    name: str
    note: str
    rows: dict[int, dict[str, list[Box]]]  # by rank, and by lane from the top
    ends_ns: dict[int, int]
    start_ns: int
    phases_ns: Phases | None = None  # of a pipeline

    @property
    def ms(self) -> float:
        """From when the first rank began the step to when the last one ended it."""
        return (max(self.ends_ns.values()) - self.start_ns) / 1e6

    @property
    def kinds(self) -> list[str]:
        """The kinds that occur, in the order of ``KINDS``."""
        found = {box.kind for lanes in self.rows.values() for row in lanes.values() for box in row}
        return [kind for kind in KINDS if kind in found]


def panel(
    timeline: Timeline, step: int, ranks: Sequence[int] | None = None, name: str = "", note: str = ""
) -> Panel:
    """What is drawn of ``step``, of all ranks or of some. One that has not ended is drawn as far as it went.

    Raises:
        ValueError: these ranks have no events of this step.
    """
    ranks = timeline.ranks if ranks is None else ranks
    found = {rank: events for rank in ranks if (events := timeline.of(rank, step))}
    if not found:
        steps = f"{timeline.steps[0]} to {timeline.steps[-1]}" if timeline.steps else "none"
        raise ValueError(f"step {step}: no events of ranks {list(ranks)}; steps that have events: {steps}")
    windows = {}
    for rank, events in found.items():
        ended = [event for event in events if event.name == STEP]
        windows[rank] = ended[-1] if ended else _extent(events)  # the last, if the step was done again
        found[rank] = events if ended else [*events, windows[rank]]
    return Panel(
        name,
        note,
        {rank: rows(events, windows[rank]) for rank, events in found.items()},
        {rank: window.end_ns for rank, window in windows.items()},
        min(window.start_ns for window in windows.values()),
        _phases_of(found.values()),
    )


def _phases_of(ranks: Iterable[Sequence[Event]]) -> Phases | None:
    """Those of the step; None without stages, and where one rank is done before another begins."""
    windows = [window for events in ranks if (window := StepWindow.of(events)) is not None and window.stages]
    computed = [[x for intervals in window.stages.values() for x in intervals] for window in windows]
    begins = [min(start for start, _ in its) for its in computed]
    ends = [max(end for _, end in its) for its in computed]
    if len(windows) < 2 or max(begins) > min(ends):
        return None
    return min(begins), max(begins), min(ends), max(ends)


def _extent(events: Sequence[Event]) -> Event:
    times = min(event.start_ns for event in events), max(event.end_ns for event in events)
    return Event(events[0].rank, "host", STEP, *times, step=events[0].step)


def rows(events: Sequence[Event], window: Event) -> dict[str, list[Box]]:
    """The rows of one rank's step, by lane from the top; in each what is on top at any time, by its start."""
    found: dict[str, list[Box]] = {TRAINS: []}
    for event in events:
        if event.name != STEP and event.name not in WAITS:  # of a wait, the bubbles are drawn
            lane = TRAINS if event.lane in ("data", "host") else event.lane
            found.setdefault(lane, []).append(_box(event))
    for bubble in bubbles(events):
        times, peer = (bubble.start_ns, bubble.end_ns), f"rank {bubble.peer}"
        found[TRAINS].append(
            Box(bubble.cause, *times, (SHORT.get(bubble.cause, bubble.cause),))
            if not bubble.is_slowness
            else Box(SLOWER, *times, (f"waits for {peer}", peer))
        )
    order = sorted(found, key=lambda lane: (lane != TRAINS, lane == SENDS, lane))
    return {lane: on_top(found[lane], window.start_ns, window.end_ns) for lane in order}


def _box(event: Event) -> Box:
    times = event.start_ns, event.end_ns
    if event.stage >= 0:
        kind = MESSAGE if event.lane == SENDS else event.name
        # The second text keeps boxes of two stages apart.
        named = (str(event.leaf), f"stage {event.stage}")
        return Box(kind if kind in KINDS else OTHER, *times, named)
    if event.lane == SENDS:
        kind = OF_EXCHANGES.get(event.name, EXCHANGE)
        texts = (f"bucket {event.bucket}", str(event.bucket)) if event.bucket >= 0 else (event.name,)
        return Box(kind, *times, texts if kind == EXCHANGE else ())
    if event.lane == "host":
        return Box(HOST, *times, (event.name,))
    return Box(
        event.name if event.name in (DATA, FORWARD, BACKWARD, UPDATE) else OTHER, *times, (event.name,)
    )


def on_top(boxes: Sequence[Box], start_ns: int, end_ns: int) -> list[Box]:
    """What is seen of ``boxes`` that may cover each other, between two times; nothing overlaps any more.

    Of two boxes of one layer the one that began later is on top: it is a part of the other.
    """
    edges: dict[int, list[tuple[int, Box]]] = defaultdict(list)  # with a number: boxes may be equal
    for numbered in enumerate(boxes):
        for edge in (max(numbered[1].start_ns, start_ns), min(numbered[1].end_ns, end_ns)):
            edges[edge].append(numbered)
    seen: list[Box] = []
    shown: dict[int, Box] = {}
    before = start_ns
    for edge in sorted(edges):
        if shown and start_ns <= before < edge <= end_ns:
            _append(
                seen, max(shown.values(), key=lambda box: (_LAYERS[box.kind], box.start_ns)), before, edge
            )
        for number, box in edges[edge]:
            if box.start_ns <= edge < min(box.end_ns, end_ns):
                shown[number] = box
            else:
                shown.pop(number, None)
        before = edge
    return seen


def _append(seen: list[Box], box: Box, start_ns: int, end_ns: int) -> None:
    """Go on with the last box if this is the same, begin another one else."""
    if seen and seen[-1].end_ns == start_ns and (seen[-1].kind, seen[-1].texts) == (box.kind, box.texts):
        start_ns = seen.pop().start_ns
    seen.append(Box(box.kind, start_ns, end_ns, box.texts))


def merged(boxes: Sequence[Box], least_ns: float) -> list[Box]:
    """The same row without a box narrower than ``least_ns``.

    Those that are, and are near to each other, become one, of the kind that had most of the time; one that
    stays alone is widened. So a thousand short messages are seen as what they are together.
    """
    result: list[Box] = []
    run: list[Box] = []
    for box in boxes:
        narrow = box.end_ns - box.start_ns < least_ns
        if run and not (narrow and box.start_ns - run[-1].end_ns < least_ns):
            result.append(_one(run, least_ns))
            run = []
        if not narrow:
            result.append(box)
            continue
        run.append(box)
        if box.end_ns - run[0].start_ns >= least_ns:
            result.append(_one(run, least_ns))
            run = []
    return [*result, _one(run, least_ns)] if run else result


def _one(run: Sequence[Box], least_ns: float) -> Box:
    took: dict[str, int] = defaultdict(int)
    for box in run:
        took[box.kind] += box.end_ns - box.start_ns
    start_ns, end_ns = run[0].start_ns, run[-1].end_ns
    return Box(max(took, key=lambda kind: took[kind]), start_ns, max(end_ns, round(start_ns + least_ns)))


def draw(panels: Sequence[Panel], size: Size, title: str = "", subtitle: str = "") -> Figure:
    """The panels one under the other, below a head, above an axis of time and a legend."""
    titles = TITLE if any(one.name for one in panels) else 0.06
    layouts = [PanelLayout.of(one, size) for one in panels]
    seen = {kind for one in panels for kind in one.kinds}
    kinds = [kind for kind in KINDS if kind in seen]
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
class PanelLayout:
    """Where the rows of a panel are; from the top, in inches."""

    rows: dict[tuple[int, str], tuple[float, float]]  # by rank and lane: from where, and how high
    ranks: dict[int, tuple[float, float]]  # from where to where
    height: float

    @classmethod
    def of(cls, one: Panel, size: Size) -> PanelLayout:
        rows, ranks, y = {}, {}, BAND if one.phases_ns is not None else 0.0
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


def _panel(axes: Axes, one: Panel, layout: PanelLayout) -> None:
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
    if one.phases_ns is not None:
        _phases(axes, one, layout, per_ms)
    if one.name:
        _name(axes, one)


def _phases(axes: Axes, one: Panel, layout: PanelLayout, per_ms: float) -> None:
    """Name them in the band over the rows, with a line down from where one ends and the next begins."""
    assert one.phases_ns is not None
    at = [(time - one.start_ns) / 1e6 for time in one.phases_ns]
    line, under = BAND * 0.75, BAND * 0.6
    for (start, end), text in zip(pairwise(at), ("fill", "steady state", "drain"), strict=True):
        ends: dict[str, Any] = {"arrowstyle": "|-|,widthA=0.2,widthB=0.2", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (start, line), (end, line), arrowprops={**ends, "color": MUTED})
        fits = _inches(text, WORDS) < (end - start) * per_ms
        where, aligned = ((start + end) / 2, "center") if fits else (start, "left")
        axes.text(where, under, text, ha=aligned, va="bottom", fontsize=WORDS, color=MUTED)
    look: Any = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (4, 3)), "zorder": 3}
    axes.vlines(at[1:3], line, layout.height, **look)


def _name(axes: Axes, one: Panel) -> None:
    colour = COLOURS.get(one.name, INK)
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
        return {"facecolor": COLOURS[kind], "linewidth": 0}
    named = {SLOWER: SLOWER, **dict.fromkeys(PHASES, "waits for another stage")}
    colour = COLOURS[named.get(kind, "waits for messages")]
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
    if kind in PHASES:
        return f"bubble: {kind.removeprefix('pipeline ')}"
    return f"waits for {kind}" if kind in BUBBLES and kind != SLOWER else kind


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
