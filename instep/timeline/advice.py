"""What to do about a run: sentences with a predicted gain, from what the run measured. Pure.

Every piece can be checked by following it. What would gain less than 1 % of a step is not said; a healthy
run gets no advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from instep.timeline.breakdown import RankBreakdown
from instep.timeline.buckets import BucketRow
from instep.timeline.facts import Advice, Facts, Setting
from instep.timeline.habits import loader, slow_rank, threads, uneven
from instep.timeline.sending import advise_sending
from instep.timeline.straggler import Slow

__all__ = ["WORTH_IT", "Advice", "Setting", "advise"]

WORTH_IT = 0.01  # of the median step


def advise(
    breakdowns: Sequence[RankBreakdown],
    buckets: Sequence[BucketRow],
    slow: Slow | None,
    setting: Setting,
    *,
    backward_s: float,
    optimizer: str = "adamw",
    num_parameters: int = 0,
    slowdown: float | None = None,
) -> list[Advice]:
    """What is worth doing, the largest gain first; what changes the training, after all that does not.

    Args:
        breakdowns: one per rank.
        buckets: in plan order.
        slow: the rank that holds the others up.
        setting: what the run was told.
        backward_s: median backward of a rank's last micro-batch, under which buckets can be sent.
        optimizer: "adamw" shows by its update how fast the memory is.
        num_parameters: elements, of all parameters that the update changes; 0: as the buckets have.
        slowdown: as ``RankBreakdown.slowdown``; None: theirs, where they know it.
    """
    known = [row.slowdown for row in breakdowns if row.slowdown is not None]
    if slowdown is None and known:
        slowdown = median(known)
    facts = Facts(breakdowns, buckets, slow, setting, backward_s, optimizer, num_parameters, slowdown)
    if not breakdowns or facts.step_s <= 0:
        return []
    found = [slow_rank(facts), loader(facts), threads(facts), uneven(facts), *advise_sending(facts)]
    worth_it = [advice for advice in found if advice and advice.gain_share >= WORTH_IT]
    return sorted(worth_it, key=lambda advice: (advice.changes_training, -advice.gain_ms))
