"""A step as boxes in rows, for a picture: per rank what its threads did, and where it waited. Pure.

Per rank there is a row of the thread that trains, and under it one of the thread of exchanges. Events nest,
boxes do not: of what covers each other, only what is on top is there.

    events   |---- step -----------------------------|        boxes   |forward|backward|///////|update|
             |forward|backward|-- gradient sync --|update|
                                                  bubbles: what of a wait nothing else covers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from instep.events import STEP, WAITS, Event, Timeline
from instep.timeline.bubbles import bubbles

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
SLOWER = "waits for a slower rank"
QUEUED, LATE, HEADERS, EXCHANGE = (
    "ready, queued",
    "ready, waits for another rank",
    "headers",
    "exchange",
)
OF_EXCHANGES = {"queued": QUEUED, "wait": LATE, "agree": HEADERS}  # and all else is EXCHANGE
BUBBLES = (SLOWER, *sorted(WAITS))
# In the order in which a reader meets them.
KINDS = (DATA, FORWARD, BACKWARD, OTHER, UPDATE, HOST, EXCHANGE, HEADERS, LATE, QUEUED, *BUBBLES)
# What covers what: the later one. Bubbles lie on the backward that they are in, but not on each other.
_COVERS = (HOST, DATA, UPDATE, OTHER, FORWARD, BACKWARD, QUEUED, LATE, EXCHANGE, HEADERS)
_LAYERS = {kind: _COVERS.index(kind) if kind in _COVERS else len(_COVERS) for kind in KINDS}


@dataclass(frozen=True)
class Box:
    """A stretch of one of ``KINDS`` in a row; ``texts`` are what may be written into it, best first."""

    kind: str
    start_ns: int
    end_ns: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One step of some ranks; times count from ``start_ns``, when the first of them began."""

    name: str
    note: str
    rows: dict[int, dict[str, list[Box]]]  # by rank, and by lane from the top
    ends_ns: dict[int, int]
    start_ns: int

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
    )


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
            Box(bubble.cause, *times, (bubble.cause,))
            if bubble.peer < 0
            else Box(SLOWER, *times, (f"waits for {peer}", peer))
        )
    order = sorted(found, key=lambda lane: (lane != TRAINS, lane == SENDS, lane))
    return {lane: on_top(found[lane], window.start_ns, window.end_ns) for lane in order}


def _box(event: Event) -> Box:
    times = event.start_ns, event.end_ns
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
