"""A better cut, from what the ranks of a running pipeline have taken: what it is, and what it is worth. Pure.

The timeline says what a rank takes for the layers that it has; measured layer costs say what these take where
they were measured. The quotient is the rank's *pace*, so that both causes of a slow stage are told apart:

    stage 0, rank 0   layers cost  20 ms   takes 22 ms   pace 1.1
    stage 1, rank 1   layers cost  20 ms   takes 66 ms   pace 3.3     its rank is slow: give it fewer layers
    stage 2, rank 2   layers cost  60 ms   takes 66 ms   pace 1.1     its layers are costly: likewise

With paces, costs and what messages took the simulator knows what any other cut would take, with the ties that
it makes. What it does not know, the optimizer, what Python does between two actions, is taken to stay as it
is: the difference between the measured step and the simulated one of the cut that there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from instep.events import Event, Timeline
from instep.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Schedule
from instep.pipeline.cuts import LayerCost, Pace, fastest, simulated_s, stage_times
from instep.pipeline.recorded import steps_of

LEAST_GAIN = 0.02  # of a step: below, measurements differ by as much
SLOW = 1.25  # times as slow as the others is a cause


class RankTimes(NamedTuple):
    """What a rank has taken, ``place`` along pp: for one micro-batch in all its stages, and for a step.

    ``weight_s`` is the part of ``backward_s`` that was for gradients of weights alone; 0 where backwards are
    in one piece. ``message_s`` is what a message took that the rank has waited for; 0 where there was none.
    """

    rank: int
    place: int
    num_micro_batches: int
    forward_s: float
    backward_s: float
    weight_s: float
    step_s: float
    message_s: float = 0.0


def rank_times(events: Iterable[Event], rank: int, place: int) -> RankTimes:
    """The medians of one rank's steps among its ``events``, without the first if there are others.

    Raises:
        ValueError: there is no whole step with forwards and backwards.
    """
    timeline = Timeline(events)
    steps = [(number, found) for number in timeline.steps for found in steps_of(timeline, number)]
    steps = steps[1:] or steps
    if not steps:
        raise ValueError(
            "expected steps of this pipeline to propose cuts by, but none has ended: train a few, each with "
            "its optimizer.step(), and ask then"
        )

    def of(*kinds: str) -> float:
        return median(
            sum(one.computed_s for one in step.actions if one.action.kind in kinds) / len(step.leaves)
            for _, step in steps
        )

    windows = [timeline.window(rank, number) for number, _ in steps]
    return RankTimes(
        rank,
        place,
        max(len(step.leaves) for _, step in steps),
        of(FORWARD),
        of(BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT),
        of(WEIGHT_GRADIENT),
        median(window.duration_s for window in windows if window is not None),
        median([x.duration_s for _, step in steps for one in step.actions for x in one.messages] or [0.0]),
    )


@dataclass(frozen=True)
class CutProposal:
    """Where a pipeline is cut, where it would better be, and what that is worth; ``str`` says so in words.

    Attributes:
        cuts: the first layer of each stage but the first, as it is.
        proposed: the same as it should be; ``cuts`` where none is faster by 2 % of a step.
        step_s: what a step takes, measured: the median.
        simulated_s: the same by the simulator, which knows computation and messages, and no optimizer.
        expected_s: what a step would take with ``proposed``: what is simulated of it, and the difference
            between the measured and the simulated step, which stays.
        ranks: the global rank of each stage; with several replicas of it, the slowest.
        stage_s: what each stage takes for one micro-batch, forward and backward.
        slowness: of each stage's rank, by how many times it is slower than the fastest one, per layer.

    Example:
        >>> layers = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
        >>> model = instep.Pipeline(layers, instep.init(), example=x[:4])  # one rank, and nowhere to cut
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> losses = model.step(lambda output, one: output.mean(), lambda one: x[:4], data=2)
        >>> optimizer.step()
        >>> proposal = model.propose_cuts()
        >>> proposal.cuts, proposal.proposed, proposal.is_better, proposal.gain
        ((), (), False, 0.0)
        >>> print(proposal)
        no cut is expected to be faster than cuts=[]: there is one stage
    """

    cuts: tuple[int, ...]
    proposed: tuple[int, ...]
    step_s: float
    simulated_s: float
    expected_s: float
    ranks: tuple[int, ...]
    stage_s: tuple[float, ...]
    slowness: tuple[float, ...]

    @property
    def is_better(self) -> bool:
        """Whether another cut is proposed."""
        return self.proposed != self.cuts

    @property
    def gain(self) -> float:
        """The share of a step that the proposed cut is expected to save."""
        return 1 - self.expected_s / self.step_s

    def __str__(self) -> str:
        if not self.is_better:
            return f"no cut is expected to be faster than cuts={list(self.cuts)}: {self._slowest()}"
        times = f"{self.step_s * 1e3:.1f} -> {self.expected_s * 1e3:.1f} ms a step predicted"
        return f"{self._slowest()}: cuts={list(self.proposed)} instead of {list(self.cuts)}: {times}"

    def _slowest(self) -> str:
        stage = max(range(len(self.stage_s)), key=self.stage_s.__getitem__)
        others = [i for i in range(len(self.stage_s)) if i != stage]
        if not others:
            return "there is one stage"
        ratio = self.stage_s[stage] / max(mean(self.stage_s[i] for i in others), 1e-12)
        slower = self.slowness[stage] / mean(self.slowness[i] for i in others)
        why = (
            f", as rank {self.ranks[stage]} is {slower:.1f} times slower"
            if min(slower, ratio) >= SLOW
            else ""
        )
        return f"stage {stage} takes {ratio:.1f} times as long as the others{why}"


def propose(
    costs: Sequence[LayerCost], edges: Sequence[int], schedule: Schedule, told: Sequence[RankTimes]
) -> CutProposal:
    """What is better than ``edges`` for layers of these ``costs``, on ranks that ``told`` what they took.

    Of several ranks at one place along pp, the slowest counts: the others wait for it.
    """
    slowest = [
        max((one for one in told if one.place == place), key=lambda one: one.forward_s + one.backward_s)
        for place in range(schedule.num_ranks)
    ]
    paces = [_pace(costs, edges, schedule, one) for one in slowest]
    message_s = median([one.message_s for one in told if one.message_s] or [0.0])
    now_s = simulated_s(costs, edges, schedule, paces, message_s)
    step_s = max(one.step_s for one in slowest)
    found = fastest(costs, schedule, paces, message_s)
    expected_s = step_s - now_s + simulated_s(costs, found, schedule, paces, message_s)
    if expected_s > (1 - LEAST_GAIN) * step_s:
        found, expected_s = list(edges), step_s
    times = stage_times(costs, edges, schedule, paces)
    slowness = [pace.slowness(costs) for pace in paces]
    return CutProposal(
        cuts=tuple(edges[1:-1]),
        proposed=tuple(found[1:-1]),
        step_s=step_s,
        simulated_s=now_s,
        expected_s=expected_s,
        ranks=tuple(slowest[place].rank for place in schedule.stage_ranks),
        stage_s=tuple(
            sum(times.of(Action(stage, kind, 0)) for kind in (FORWARD, BACKWARD))
            for stage in range(schedule.num_stages)
        ),
        slowness=tuple(slowness[place] / min(slowness) for place in schedule.stage_ranks),
    )


def _pace(costs: Sequence[LayerCost], edges: Sequence[int], schedule: Schedule, taken: RankTimes) -> Pace:
    """That of a rank which has ``taken`` so much for its layers."""
    own = [
        cost
        for (a, b), place in zip(pairwise(edges), schedule.stage_ranks, strict=True)
        if place == taken.place
        for cost in costs[a:b]
    ]
    forward_s, backward_s = sum(x.forward_s for x in own), sum(x.backward_s for x in own)
    return Pace(
        taken.forward_s / forward_s if forward_s else 1.0,
        taken.backward_s / backward_s if backward_s else 1.0,
        taken.weight_s / taken.backward_s if taken.weight_s else 0.5,
    )
