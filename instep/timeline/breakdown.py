"""The breakdown: where the time of a rank's steps went, step by step and on average over a run.

    events    |forward|backward|gradient sync           |update|ledger|..|
    parts     |   compute      |wait: rank 2|  exposed  |update| host |? |    disjoint, and sum to the wall

``parts`` takes one step apart, ``breakdown`` has the means over the steps of a run, and travels as JSON.
Hidden communication, which runs under something else, is told besides, with the ``slowdown`` of compute that
it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from instep.events import GRADIENT_SYNC, Event
from instep.timeline.bubbles import BACKWARD, PHASES, StepWindow, find_bubbles, idle_intervals
from instep.timeline.intervals import Interval, difference, intersection, total_ns, union

PARTS = COMPUTE, EXPOSED, WAITING, BUBBLE, DATA, UPDATE, HOST, UNATTRIBUTED = (
    "compute",
    "exposed communication",
    "waiting for a slower rank",
    "pipeline bubble",
    "waiting for data",
    "update",
    "host",
    "unattributed",
)
IDLE = "idle"  # waits of either kind: for messages, and for a slower rank
FEWEST = 4  # steps that have quartiles
LEAST_UNDER = 0.05  # of a backward: with less communication under it, it says nothing


@dataclass(frozen=True)
class Parts:
    """One rank's step, in seconds; the parts are disjoint and sum to ``wall``."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    compute: float
    exposed: dict[str, float]  # by cause: waited while messages travelled
    waiting: dict[int, float]  # by peer: waited because that rank was not ready
    bubble: dict[str, float]  # by phase of a pipeline: waited for other stages, and their messages
    data: float
    update: float
    host: dict[str, float]  # by name
    unattributed: float
    hidden: float  # communication that ran while this rank did something else: an "of which", not a part
    micro_batches: int  # micro-batches; 0: unknown
    stage: int = -1  # the first one that the rank has; -1: there is no pipeline
    gathers: float = 0.0  # weights were gathered, hidden or exposed
    gathers_hidden: float = 0.0

    @property
    def wall(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def exposed_s(self) -> float:
        return sum(self.exposed.values())

    @property
    def waiting_s(self) -> float:
        return sum(self.waiting.values())

    @property
    def bubble_s(self) -> float:
        return sum(self.bubble.values())

    @property
    def host_s(self) -> float:
        return sum(self.host.values())

    def losses(self) -> dict[str, float]:
        """What advice is about: seconds that this step would be shorter without."""
        return {
            COMPUTE: self.compute,
            UPDATE: self.update,
            DATA: self.data,
            EXPOSED: self.exposed_s,
            GRADIENT_SYNC: self.exposed.get(GRADIENT_SYNC, 0.0),
            IDLE: self.exposed_s + self.waiting_s,
            BUBBLE: self.bubble_s,
        }

    def totals(self) -> dict[str, float]:
        """Seconds by the names ``PARTS``."""
        figures = (
            self.compute,
            self.exposed_s,
            self.waiting_s,
            self.bubble_s,
            self.data,
            self.update,
            self.host_s,
            self.unattributed,
        )
        return dict(zip(PARTS, figures, strict=True))


def parts(events: Sequence[Event]) -> Parts | None:
    """The parts of one rank's step, from its events; None if the step has not ended.

    Where events overlap, bubbles come first (``instep.timeline.bubbles``), then compute, update and data,
    then host code, of which the innermost span counts.
    """
    window = StepWindow.of(events)
    if window is None:
        return None
    waited = find_bubbles(window)
    exposed: dict[str, int] = {}
    waiting: dict[int, int] = {}
    bubble: dict[str, int] = {}
    for start, end, cause, peer in waited:
        if cause in PHASES:
            bubble[cause] = bubble.get(cause, 0) + end - start
        elif peer < 0:
            exposed[cause] = exposed.get(cause, 0) + end - start
        else:
            waiting[peer] = waiting.get(peer, 0) + end - start
    known = idle = union([(start, end) for start, end, _, _ in waited])
    own = []
    for kind in (window.compute, window.update, window.data):
        found = difference(union(kind), known)
        own.append(total_ns(found))
        known = union(known + found)
    host = _host(window, known)
    known = union(known + [(start, end) for start, end, _ in window.host])

    def hidden_of(messages: list[Interval]) -> float:
        whole = union(messages)
        return _seconds(total_ns(intersection(whole, known)) - total_ns(intersection(whole, idle)))

    compute, update, data = (_seconds(figure) for figure in own)
    return Parts(
        rank=window.rank,
        step=window.step,
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        compute=compute,
        exposed={cause: _seconds(figure) for cause, figure in exposed.items()},
        waiting={peer: _seconds(figure) for peer, figure in waiting.items()},
        bubble={phase: _seconds(figure) for phase, figure in bubble.items()},
        data=data,
        update=update,
        host={name: _seconds(figure) for name, figure in host.items()},
        unattributed=_seconds(window.end_ns - window.start_ns - total_ns(known)),
        hidden=hidden_of(window.travel),
        micro_batches=window.micro_batches,
        stage=min(window.stages, default=-1),
        gathers=_seconds(total_ns(union(window.gathers))),
        gathers_hidden=hidden_of(window.gathers),
    )


def _host(window: StepWindow, known: list[Interval]) -> dict[str, int]:
    """Nanoseconds of host code by name, without what is ``known`` to be something else."""
    intervals: dict[str, list[Interval]] = {}
    for start, end, name in _innermost(window.host):
        intervals.setdefault(name, []).append((start, end))
    figures = {name: total_ns(difference(found, known)) for name, found in intervals.items()}
    return {name: figure for name, figure in figures.items() if figure}


def _innermost(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The same spans without those parts in which another, that began later, is going on."""
    found = []
    going: list[tuple[int, str]] = []  # end and name, the innermost last
    at = min((start for start, _, _ in spans), default=0)
    last = (1 << 63, 1 << 63, "")
    for start, end, name in [*sorted(spans, key=_outermost_first), last]:
        while going and going[-1][0] <= start:
            stop, inner = going.pop()
            if at < stop:
                found.append((at, stop, inner))
                at = stop
        if going and at < start:
            found.append((at, start, going[-1][1]))
        at = max(at, start)
        going.append((end, name))
    return found


def _outermost_first(span: tuple[int, int, str]) -> tuple[int, int, str]:
    return span[0], -span[1], span[2]


def _seconds(figure_ns: int) -> float:
    return figure_ns / 1e9


class Waited(NamedTuple):
    """Seconds that a step loses to something: the lower quartile over the steps, and the median."""

    low_s: float
    median_s: float

    @property
    def confidence(self) -> float:
        """The one by the other: 1 where every step loses as much, 0 where a quarter of them lose nothing."""
        return min(max(self.low_s / self.median_s, 0.0), 1.0) if self.median_s > 0 else 0.0


@dataclass(frozen=True)
class RankBreakdown:
    """One rank's steps; seconds per step."""

    rank: int
    steps: int
    wall_s: float  # mean
    median_s: float  # median wall time
    parts: dict[str, float]  # mean, by the names ``PARTS``; they sum to ``wall_s``
    causes: dict[str, float]  # mean exposed communication, by cause
    hosts: dict[str, float]  # mean host time, by name
    hidden_s: float  # mean hidden communication
    unattributed_share: float  # of the median step
    slowdown: float | None = None  # 0.2: compute takes 20 % longer while communication runs; None: unknown
    gathers_s: float = 0.0  # mean time in which weights are gathered
    gathers_hidden_s: float = 0.0  # of that, under something else
    losses: dict[str, Waited] = field(default_factory=dict)  # by the names of ``Parts.losses``

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> RankBreakdown:
        """What ``to_json`` gave.

        Raises:
            ValueError: it is something else.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(found, dict) or set(found) != set(names):
            raise ValueError(
                f"expected a rank's breakdown with fields {', '.join(names)}, got {found!r:.200}"
            )
        for name, value in found.items():
            if not _is_right(name, value):
                raise ValueError(
                    f"{name} in a rank's breakdown: expected another kind of value than {value!r:.200}"
                )
        return cls(**{**found, "losses": {name: Waited(*pair) for name, pair in found["losses"].items()}})


def _is_right(name: str, value: object) -> bool:
    if name == "losses":
        return isinstance(value, dict) and all(
            isinstance(key, str)
            and isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(map(_is_figure, pair))
            for key, pair in value.items()
        )
    if name in ("parts", "causes", "hosts"):
        return isinstance(value, dict) and all(
            isinstance(key, str) and _is_figure(figure) for key, figure in value.items()
        )
    if name in ("rank", "steps"):
        return isinstance(value, int) and not isinstance(value, bool)
    return _is_figure(value) or (name == "slowdown" and value is None)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def breakdown(rows: Iterable[Parts], slowdown: float | None = None) -> RankBreakdown:
    """The breakdown of one rank, from its steps; of more than four, the first two (warm-up) are left out.

    Raises:
        ValueError: there are no steps, or they are of several ranks.
    """
    steps = sorted(rows, key=lambda row: row.step)
    ranks = sorted({row.rank for row in steps})
    if len(ranks) != 1:
        raise ValueError(f"expected steps of one rank, got {len(steps)} steps of ranks {ranks}")
    steps = steps[2:] if len(steps) > 4 else steps
    return RankBreakdown(
        rank=ranks[0],
        steps=len(steps),
        wall_s=fmean(row.wall for row in steps),
        median_s=median(row.wall for row in steps),
        parts=_means([row.totals() for row in steps]),
        causes=_means([row.exposed for row in steps]),
        hosts=_means([row.host for row in steps]),
        hidden_s=fmean(row.hidden for row in steps),
        unattributed_share=median(row.unattributed / row.wall for row in steps),
        slowdown=slowdown,
        gathers_s=fmean(row.gathers for row in steps),
        gathers_hidden_s=fmean(row.gathers_hidden for row in steps),
        losses=_lower_halves([row.losses() for row in steps]),
    )


def _lower_halves(tables: Sequence[Mapping[str, float]]) -> dict[str, Waited]:
    """Lower quartile and median by name; of fewer than four steps there is no quartile."""
    if len(tables) < FEWEST:
        return {}
    cuts = {name: quantiles([table[name] for table in tables], n=4, method="inclusive") for name in tables[0]}
    return {name: Waited(low, middle) for name, (low, middle, _) in cuts.items()}


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean by name; a name that a table does not have counts as 0."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: fmean(table.get(name, 0.0) for table in tables) for name in names}


def slowdown(steps: Iterable[Sequence[Event]]) -> float | None:
    """How much longer compute takes while communication runs, from one rank's steps: 0.2 = 20 %.

    In a step, backwards without communication say how long one takes. One that took ``extra`` longer, with
    communication under ``under`` of it, did in that time what takes ``under - extra`` alone:

        alone  |--------------|
        under  |------|~~~~~~~~~~~~~|     slowdown = extra / (under - extra)
                      |under        |
                              |extra|

    None if no step has both kinds of backwards (a single micro-batch, or nothing overlaps), or if compute
    seems to take more than twice as long, which is noise; so is a negative figure, which counts as 0.
    """
    unders, extras = [], []
    for events in steps:
        times = _backwards(events)
        alone = [took for took, under in times if not under]
        beside = [(took, under) for took, under in times if under >= took * LEAST_UNDER]
        if alone and beside:
            usual = median(alone)
            unders.append(fmean(under for _, under in beside))
            extras.append(fmean(took - usual for took, _ in beside))
    if not unders:
        return None
    under, extra = median(unders), median(extras)
    return max(extra, 0.0) / (under - extra) if 2 * extra <= under else None


def _backwards(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Of each backward: nanoseconds without waits, and those of them with communication under it."""
    window = StepWindow.of(events)
    if window is None:
        return []
    idle = idle_intervals(window)
    travel = union(window.travel)
    found = []
    for event in events:
        if event.name == BACKWARD and event.lane == "compute":
            own = difference([(event.start_ns, event.end_ns)], idle)
            found.append((total_ns(own), total_ns(intersection(own, travel))))
    return found
