"""A breakdown, a slow rank and advice as lines to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from instep.timeline.breakdown import RankBreakdown
from instep.timeline.facts import Advice, in_ms, in_percent
from instep.timeline.parts import PARTS
from instep.timeline.straggler import Slow

WORTH_SAYING = 0.0005  # of a step


def lines(
    breakdowns: Sequence[RankBreakdown], slow: Slow | None, advice: Sequence[Advice]
) -> Iterator[tuple[str, str]]:
    """(label, text): where the time of a step went, on average over the ranks; who is slow; what to do."""
    if not breakdowns:
        return
    yield "time", _shares(breakdowns)
    hidden_s = fmean(row.hidden_s for row in breakdowns)
    slowdowns = [row.slowdown for row in breakdowns if row.slowdown is not None]
    if hidden_s >= 5e-5:
        slower = (
            f", which makes it {in_percent(fmean(slowdowns))} slower"
            if slowdowns and fmean(slowdowns) > 0
            else ""
        )
        yield "", f"{in_ms(hidden_s)} of communication hidden under compute{slower}{_gathers(breakdowns)}"
    if slow is not None:
        yield "slow", slowness(slow)
    for number, one in enumerate(advice):
        gain = f"about {in_percent(one.gain_share)} ({in_ms(one.gain_ms / 1e3)} a step)"
        try_ = f": {one.try_}" if one.try_ else ""
        yield "" if number else "advice", f"{one.text} Predicted gain: {gain}{try_}"


def slowness(slow: Slow) -> str:
    """Who, in what, since when, by how much."""
    return (
        f"rank {slow.rank} is slow in {slow.phase}: {in_ms(slow.excess_s)} a step more than the others "
        f"({in_percent(slow.share)}), since step {slow.since}"
    )


def _gathers(breakdowns: Sequence[RankBreakdown]) -> str:
    """How much of the gathers of weights is hidden, where there are some."""
    whole_s = fmean(row.gathers_s for row in breakdowns)
    if whole_s < WORTH_SAYING * fmean(row.wall_s for row in breakdowns):
        return ""
    share = fmean(row.gathers_hidden_s for row in breakdowns) / whole_s
    return f"; among it {in_percent(share)} of the gathers of weights ({in_ms(whole_s)})"


def _shares(breakdowns: Sequence[RankBreakdown]) -> str:
    wall = fmean(row.wall_s for row in breakdowns)
    means = {name: fmean(row.parts.get(name, 0.0) for row in breakdowns) for name in PARTS}
    said = [
        f"{name} {in_ms(seconds)} ({seconds / wall:.1%})"
        for name, seconds in means.items()
        if wall and seconds / wall >= WORTH_SAYING
    ]
    steps = max(row.steps for row in breakdowns)
    return f"{in_ms(wall)} a step on average over {steps} = {' + '.join(said)}"
