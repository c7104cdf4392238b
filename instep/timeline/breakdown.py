"""The breakdown of a run: where the time of each rank's steps went, on average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from statistics import fmean, median
from typing import Any

from instep.events import Event
from instep.timeline.bubbles import find
from instep.timeline.intervals import common, length, minus, union
from instep.timeline.parts import Parts
from instep.timeline.window import BACKWARD, Window

LEAST_UNDER = 0.05  # of a backward: with less communication under it, it says nothing


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
                raise ValueError(f"{name} in a rank's breakdown: expected other than {value!r:.200}")
        return cls(**found)


_TABLES = ("parts", "causes", "hosts")


def _is_right(name: str, value: object) -> bool:
    if name in _TABLES:
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
    )


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

    None if no step has both kinds of backwards (a single micro-batch, or nothing overlaps).
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
    return extra / (under - extra) if extra < under else None


def _backwards(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Of each backward: nanoseconds without waits, and those of them with communication under it."""
    window = Window.of(events)
    if window is None:
        return []
    idle = union([(start, end) for start, end, _, _ in find(window)])
    travel = union(window.travel)
    found = []
    for event in events:
        if event.name == BACKWARD and event.lane == "compute":
            own = minus([(event.start_ns, event.end_ns)], idle)
            found.append((length(own), length(common(own, travel))))
    return found
