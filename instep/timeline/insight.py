"""What the ranks' files tell of a run: where its time went, who is slow, and what would make it faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from statistics import median
from typing import Any

from instep.events import Event
from instep.timeline.advice import advise
from instep.timeline.breakdown import RankBreakdown, breakdown, slowdown
from instep.timeline.buckets import BucketRow, bucket_rows
from instep.timeline.facts import Advice, Setting
from instep.timeline.parts import Parts, parts
from instep.timeline.straggler import Own, Slow, find_slow
from instep.timeline.tape import Tapes
from instep.timeline.window import BACKWARD

SAMPLED = 60  # steps, for what needs all events of all ranks at once
WARM_UP = 2  # steps in which the order of the buckets is learned
MOST = 1 << 40  # of anything that a setting counts


@dataclass(frozen=True)
class Insight:
    """What was found; ``rows`` are the parts of every step looked at, by rank."""

    rows: Mapping[int, Sequence[Parts]]
    breakdowns: Sequence[RankBreakdown]
    buckets: Sequence[BucketRow]
    slow: Slow | None
    advice: Sequence[Advice]

    def figures(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return {
            "breakdown": [row.to_json() for row in self.breakdowns],
            "slow_rank": None if self.slow is None else asdict(self.slow),
            "advice": [asdict(advice) for advice in self.advice],
        }


def look(
    tapes: Tapes,
    steps: Sequence[int] | None = None,
    *,
    breakdowns: Sequence[RankBreakdown] | None = None,
    slow: Slow | None = None,
) -> Insight:
    """What ``tapes`` tell of ``steps``, by default all that have ended.

    ``breakdowns`` and ``slow`` are taken where they are known already, from ranks whose files are elsewhere.
    A rank that the run went on without is among the rows only.
    """
    steps = tapes.steps if steps is None else steps
    rows: dict[int, list[Parts]] = {rank: [] for rank in tapes.tapes}
    for step in steps:
        for rank in tapes.ranks(step):
            if (found := parts(tapes.tapes[rank].events(step))) is not None:
                rows[rank].append(found)
    rows = {rank: found for rank, found in rows.items() if found}
    sampled = _sample(steps[WARM_UP:] or steps)
    if breakdowns is None:
        present = {rank: found for rank, found in rows.items() if rank not in tapes.gone}
        breakdowns = [breakdown(found, _slowdown(tapes, rank, sampled)) for rank, found in present.items()]
        slow = find_slow(Own.of(found) for each in present.values() for found in each)
    breakdowns = [row for row in breakdowns if row.steps]
    buckets = bucket_rows(tapes.timeline(step) for step in sampled)
    advice = _advice(tapes, breakdowns, buckets, slow, sampled) if breakdowns else []
    return Insight(rows, breakdowns, buckets, slow, advice)


def _advice(
    tapes: Tapes,
    breakdowns: Sequence[RankBreakdown],
    buckets: Sequence[BucketRow],
    slow: Slow | None,
    steps: Sequence[int],
) -> list[Advice]:
    tape = tapes.first
    setting = None if tape is None else setting_of(tape.head.get("setting"))
    if tape is None or setting is None:
        return []
    lasts = [
        last
        for step in steps
        for rank in tapes.ranks(step)
        if (last := _last_backward(tapes.tapes[rank].events(step))) is not None
    ]
    slowdowns = [row.slowdown for row in breakdowns if row.slowdown is not None]
    return advise(
        breakdowns,
        buckets,
        slow,
        setting,
        backward_s=median(lasts) if lasts else 0.0,
        optimizer=str(tape.head.get("optimizer")),
        num_parameters=tape.figure("num_parameters", MOST),
        slowdown=median(slowdowns) if slowdowns else None,
    )


def setting_of(found: Any) -> Setting | None:
    """The ``Setting`` in the head of a file; None if it is not whole, or cannot be."""
    if not isinstance(found, Mapping):
        return None
    known = {field.name: found[field.name] for field in fields(Setting) if field.name in found}
    needed = {field.name for field in fields(Setting) if field.default is MISSING}
    if needed - known.keys() or not all(_can_be(name, value) for name, value in known.items()):
        return None
    return Setting(**known)


def _can_be(name: str, value: object) -> bool:
    if name in ("strategy", "backend"):
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float if name == "bucket_mb" else int):
        return False
    least = 0 if name in ("bucket_mb", "num_leaves", "micro_size") else 1
    return least <= value <= MOST


def _sample(steps: Sequence[int]) -> list[int]:
    """At most ``SAMPLED`` of them, the last one included, at even distances."""
    count = min(len(steps), SAMPLED)
    return [steps[len(steps) - 1 - i * len(steps) // count] for i in range(count)][::-1]


def _slowdown(tapes: Tapes, rank: int, steps: Sequence[int]) -> float | None:
    return slowdown(tapes.tapes[rank].events(step) for step in steps if rank in tapes.ranks(step))


def _last_backward(events: Sequence[Event]) -> float | None:
    found = [event for event in events if event.name == BACKWARD]
    return max(found, key=lambda event: event.end_ns).duration_s if found else None
