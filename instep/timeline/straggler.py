"""The straggler: which rank holds the others up, since when, by how much, and in which phase."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median, quantiles

from instep.events import BOOKKEEPING
from instep.timeline.breakdown import Parts

PHASES = COMPUTE, DATA, HOST = "its own compute", "its data", "its host code"
LEAST_STEPS = 5
LEAST_SHARE = 0.1
OFTEN = 0.8
SURE = 4.5  # standard deviations: there are many ranks, phases and steps at which it may have begun


@dataclass(frozen=True)
class OwnTimes:
    """What one rank did of itself in one step, without waits, in seconds."""

    rank: int
    step: int
    micro_batches: int
    compute: float
    data: float
    host: float  # the script's host code, named or not; not the update, which a server makes for all
    wall: float
    stage: int = -1  # the first that it has of a pipeline's; -1: there is none

    @classmethod
    def of(cls, parts: Parts, after_s: float = 0.0, bookkeeping_s: float = 0.0) -> OwnTimes:
        """Of a step that went on for ``after_s`` after its ``parts`` were taken, with host code.

        ``bookkeeping_s``: of this code, the run's own.
        """
        named_s = sum(x for name, x in parts.host.items() if name not in BOOKKEEPING)
        return cls(
            parts.rank,
            parts.step,
            parts.micro_batches,
            parts.compute,
            parts.data,
            max(named_s + parts.unattributed + after_s - bookkeeping_s, 0.0),
            parts.wall + after_s,
            parts.stage,
        )

    def to_list(self) -> list[float]:
        """Eight figures, for a message."""
        counts = [self.rank, self.step, self.micro_batches]
        return [*counts, self.compute, self.data, self.host, self.wall, self.stage]

    @classmethod
    def from_list(cls, figures: list[float]) -> OwnTimes:
        """What ``to_list`` gave."""
        if len(figures) != 8:
            raise ValueError(f"expected 8 figures of a rank's step, got {len(figures)}")
        rank, step, micro_batches, compute, data, host, wall, stage = figures
        return cls(int(rank), int(step), int(micro_batches), compute, data, host, wall, int(stage))


@dataclass(frozen=True)
class SlowRank:
    """A rank that holds the others up."""

    rank: int
    phase: str  # one of ``PHASES``
    since: int  # the step
    excess_s: float  # per step, over the median of the other ranks (a median over steps)
    share: float  # of the others' median wall time
    steps: int  # looked at
    low_s: float  # the lower quartile of its excess over these


@dataclass(frozen=True)
class _Step:
    """How far one rank was behind the others in one phase of one step."""

    step: int
    excess_s: float  # over the median of the others
    share: float  # of the others' median wall time
    slowest: bool


def find_slow_rank(rows: Iterable[OwnTimes]) -> SlowRank | None:
    """The rank that is slower than the others, step after step until the last; None if no one is.

    Compute and data are compared per micro-batch, so that 3, 3, 2 of 8 is fair, and of a pipeline's ranks
    those are compared that have the same stage; stages, in ``stages.py``. A rank may become slow in
    the middle of a run, so of all last steps those are looked at that speak most against it: at least 5,
    and at least a twentieth of all. It is named if in these
    - its median excess is more than 10 % of the others' step, and
    - it is slowest in at least 80 %, by more than a quarter of that excess: outliers are rarer, and
    - that is far more than what the noise of the steps gives to one rank or another by chance.
    """
    steps: dict[int, dict[int, OwnTimes]] = {}
    for row in rows:
        steps.setdefault(row.step, {})[row.rank] = row
    found = []
    for phase in PHASES:
        for alike in _alike(phase, [steps[step] for step in sorted(steps)]):
            behind = _behind(phase, alike)
            noise = _noise(behind.values())
            found += [slow for rank in behind if (slow := _judge(rank, phase, behind[rank], noise))]
    return max(found, key=lambda slow: slow.excess_s, default=None)


def _alike(phase: str, steps: Sequence[Mapping[int, OwnTimes]]) -> Iterator[Sequence[Mapping[int, OwnTimes]]]:
    """The ranks that are to take equally long in ``phase``: all, or those with the same stage."""
    stages = {own.stage for owns in steps for own in owns.values()} if phase != HOST else {-1}
    for stage in sorted(stages):
        if len(stages) == 1:
            yield steps
        else:
            yield [{own.rank: own for own in owns.values() if own.stage == stage} for owns in steps]


def _behind(phase: str, steps: Sequence[Mapping[int, OwnTimes]]) -> dict[int, list[_Step]]:
    """By rank: how far it was behind, step by step."""
    behind: dict[int, list[_Step]] = {}
    for owns in steps:
        known = [own for own in owns.values() if own.micro_batches or phase == HOST] or list(owns.values())
        parts = {own.rank: 1 if phase == HOST else max(own.micro_batches, 1) for own in known}
        took = {own.rank: _took(phase, own) / parts[own.rank] for own in known}
        in_order, walls = sorted(took.values()), sorted(own.wall for own in known)
        for own in known if len(known) > 1 else ():
            mine = took[own.rank]
            excess_s = (mine - _median_without(in_order, mine)) * parts[own.rank]
            wall = _median_without(walls, own.wall)
            slowest = mine == in_order[-1] > in_order[-2] or excess_s > LEAST_SHARE * wall
            step = _Step(own.step, excess_s, excess_s / wall if wall > 0 else 0.0, slowest)
            behind.setdefault(own.rank, []).append(step)
    return behind


def _median_without(in_order: Sequence[float], figure: float) -> float:
    """The median of at least two figures but for one of them."""
    at, num = bisect_left(in_order, figure), len(in_order) - 1
    low, high = (num - 1) // 2, num // 2
    return (in_order[low + (low >= at)] + in_order[high + (high >= at)]) / 2


def _took(phase: str, own: OwnTimes) -> float:
    return {COMPUTE: own.compute, DATA: own.data, HOST: own.host}[phase]


def _noise(behind: Iterable[Sequence[_Step]]) -> float:
    """The standard deviation of a step's share, from how much steps differ from the next.

    It is hardly moved by a rank that becomes slow, nor by single outliers. Few steps tell little of it, so it
    is then taken as greater.
    """
    changes = [abs(after.share - before.share) for steps in behind for before, after in pairwise(steps)]
    return median(changes) / (0.6745 * sqrt(2)) * (1 + 6 / len(changes)) if changes else 0.0


def _judge(rank: int, phase: str, steps: Sequence[_Step], noise: float) -> SlowRank | None:
    least = max(LEAST_STEPS, len(steps) // 20)
    last = steps[_began(steps) :]
    if len(last) < least:
        return None
    share = median(step.share for step in last)
    by_chance = 1.2533 * noise / sqrt(len(last))  # the standard deviation of a median
    often = sum(step.slowest and step.share > share / 4 for step in last) >= OFTEN * len(last)
    if not often or share <= LEAST_SHARE or share < SURE * by_chance:
        return None
    low_s, excess_s, _ = quantiles([step.excess_s for step in last], n=4, method="inclusive")
    return SlowRank(rank, phase, last[0].step, excess_s, share, len(last), low_s)


def _began(steps: Sequence[_Step]) -> int:
    """Where the last steps begin that speak most for a slow rank; ``len(steps)``: none do.

    A step speaks for it by its share less half of what is named. No step counts for more than that half,
    so an outlier moves the begin by one step.
    """
    best, score, began = 0.0, 0.0, len(steps)
    for at in range(len(steps) - 1, -1, -1):
        score += min(max(steps[at].share, 0.0), LEAST_SHARE) - LEAST_SHARE / 2
        if score > best:
            best, began = score, at
    return began
