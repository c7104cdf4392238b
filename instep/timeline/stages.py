"""A pipeline's steps, stage by stage: the bubble in fill, steady state and drain; a stage that is slow. Pure.

    rank 0   |F|F|F|F|  |B|F|B|F|B| |B|    a rank's time, from the first computation of any rank to the last:
    rank 1   ~|F|B|F|B|F|B|F|B|  |B|~~~    fill, then its own first computation to its last, then drain

A bubble is all of that in which a rank is at no action (``instep.pipeline.recorded``: what it does around a
computation is a part of it). What it comes to without noise is known twice over: by the closed form of the
schedule, for stages that take equally long, and by the simulator, for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from instep.events import Timeline
from instep.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from instep.pipeline.closed_forms import cost_s
from instep.pipeline.recorded import PipelineStep, steps_of
from instep.pipeline.simulate import NS, StageTimes, bubble_rate, makespan_s, rank_spans, simulate

SLOW = 1.25  # times as long as the others
OFTEN = 0.8  # of the steps
FORMULAS = {
    "naive": "(p-1)/p",
    "gpipe": "(p-1)/(m+p-1)",
    "1f1b": "(p-1)/(m+p-1)",
    "interleaved": "(p-1)/(vm+p-1)",
}


@dataclass(frozen=True)
class StageCost:
    """What an action of ``stage`` takes on its ``ranks``, in seconds: the mean of a step, median of steps.

    Where a backward is not taken apart, its gradients of inputs and of weights are told as half of it each.
    """

    stage: int
    ranks: tuple[int, ...]
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    @property
    def backward_s(self) -> float:
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class RankBubble:
    """A rank's time in a pipeline's step, in seconds; the four together are the pipeline's."""

    rank: int
    stages: tuple[int, ...]
    computes_s: float
    fill_s: float  # before its first computation
    steady_s: float  # between its first and its last
    drain_s: float  # after its last


@dataclass(frozen=True)
class SlowStage:
    """A stage that takes ``times`` as long per micro-batch as the median of the others; what it costs."""

    stage: int
    ranks: tuple[int, ...]
    times: float
    forward_s: float
    others_forward_s: float
    backward_s: float
    others_backward_s: float
    bubble: float  # the rate, simulated with what stages take
    even_bubble: float  # with stages that take equally long, and as long together
    gain_s: float  # of a step, by the same simulations


@dataclass(frozen=True)
class PipelineFigures:
    """What a pipeline's steps come to, on average over steps, and over pipelines if there are several."""

    num_ranks: int  # of a pipeline
    micro_batches: int  # of a pipeline
    chunks: int  # stages per rank
    schedule: str  # its name; "": unknown
    span_s: float  # from the first computation of any rank to the last
    bubble: float  # the rate: of the longest time of a rank from its first computation to its last
    formula: float | None  # the same by the closed form, for equal stages; None: the schedule has none
    ranks: Sequence[RankBubble]
    stages: Sequence[StageCost]
    slow: SlowStage | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pipeline_figures(timelines: Iterable[Timeline], schedule: str = "") -> PipelineFigures | None:
    """What the steps in ``timelines``, measured or simulated, tell of a pipeline; None if there is none.

    Ranks with the same micro-batches are one pipeline. ``schedule`` names the closed form.
    """
    steps = [
        found for timeline in timelines for number in timeline.steps for found in steps_of(timeline, number)
    ]
    if not steps:
        return None
    size = len(steps[-1].rows)
    steps = [step for step in steps if len(step.rows) == size]  # whole ones, of the last layout
    ranks = _ranks(steps)
    stages = _costs(steps)
    num_micro_batches, chunks = len(steps[-1].leaves), len(stages) // size
    return PipelineFigures(
        num_ranks=size,
        micro_batches=num_micro_batches,
        chunks=chunks,
        schedule=schedule,
        span_s=fmean(makespan_s(step.timeline) for step in steps),
        bubble=fmean(bubble_rate(step.timeline) for step in steps),
        formula=_formula(schedule, size, num_micro_batches, chunks, stages),
        ranks=ranks,
        stages=stages,
        slow=_slow_stage(steps, stages),
    )


def _ranks(steps: Sequence[PipelineStep]) -> list[RankBubble]:
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    stages: dict[int, tuple[int, ...]] = {}
    for step in steps:
        spans = rank_spans(step.timeline)
        begin, end = min(its[0] for its in spans.values()), max(its[1] for its in spans.values())
        for rank, (first, last, work) in spans.items():
            stages[rank] = tuple(sorted({one.action.stage for one in step.rows[rank]}))
            found.setdefault(rank, []).append((work, first - begin, last - first - work, end - last))
    return [
        RankBubble(rank, stages[rank], *(fmean(figures) / NS for figures in zip(*found[rank], strict=True)))
        for rank in sorted(found)
    ]


def _costs(steps: Sequence[PipelineStep]) -> list[StageCost]:
    ranks: dict[int, set[int]] = {}
    for step in steps:
        for one in step.actions:
            ranks.setdefault(one.action.stage, set()).add(one.event.rank)

    def typical(stage: int, kind: str) -> float:
        found = [step.times[stage, kind] for step in steps if (stage, kind) in step.times]
        return median(found or [0.0])

    return [
        StageCost(
            stage,
            tuple(sorted(its)),
            typical(stage, FORWARD),
            typical(stage, INPUT_GRADIENT) + typical(stage, BACKWARD) / 2,
            typical(stage, WEIGHT_GRADIENT) + typical(stage, BACKWARD) / 2,
        )
        for stage, its in sorted(ranks.items())
    ]


def _formula(
    schedule: str, size: int, num_micro_batches: int, chunks: int, stages: Sequence[StageCost]
) -> float | None:
    """The bubble rate of equal stages, which take together as long as these, without messages."""
    forward_s, input_s, weight_s = (sum(figures) / size for figures in zip(*map(_times, stages), strict=True))
    try:
        cost = cost_s(
            schedule,
            size,
            num_micro_batches,
            chunks,
            forward_s=forward_s,
            input_gradient_s=input_s,
            weight_gradient_s=weight_s,
        )
    except ValueError:
        return None
    # Where the parts take other times than the formula supposes it would promise less than no waiting.
    return max(0.0, cost - num_micro_batches * (forward_s + input_s + weight_s)) / cost if cost else None


def _times(stage: StageCost) -> tuple[float, float, float]:
    return stage.forward_s, stage.input_gradient_s, stage.weight_gradient_s


def _slow_stage(steps: Sequence[PipelineStep], stages: Sequence[StageCost]) -> SlowStage | None:
    """The one that is slower than the others by far, in most of the steps."""
    if len(stages) < 2:
        return None
    slow = max(stages, key=lambda stage: stage.total_s)
    others = [stage for stage in stages if stage is not slow]
    times = slow.total_s / max(median(stage.total_s for stage in others), 1e-9)
    ratios = [_ratio(step, slow.stage) for step in steps]
    often = sum(ratio > 1 + (times - 1) / 2 for ratio in ratios) >= OFTEN * len(ratios)
    if times < SLOW or not often:
        return None
    try:
        schedule = steps[-1].schedule()
        now = simulate(schedule, StageTimes(*zip(*map(_times, stages), strict=True)))
        even = simulate(schedule, StageTimes(*map(fmean, zip(*map(_times, stages), strict=True))))
    except ValueError:  # a step that is not whole
        return None
    return SlowStage(
        stage=slow.stage,
        ranks=slow.ranks,
        times=times,
        forward_s=slow.forward_s,
        others_forward_s=median(stage.forward_s for stage in others),
        backward_s=slow.backward_s,
        others_backward_s=median(stage.backward_s for stage in others),
        bubble=bubble_rate(now),
        even_bubble=bubble_rate(even),
        gain_s=makespan_s(now) - makespan_s(even),
    )


def _ratio(step: PipelineStep, slow: int) -> float:
    """What stage ``slow`` takes in one step by the median of the others."""
    took: dict[int, float] = {}
    for (stage, _), seconds in step.times.items():
        took[stage] = took.get(stage, 0.0) + seconds
    others = [seconds for stage, seconds in took.items() if stage != slow]
    return took.get(slow, 0.0) / max(median(others), 1e-9) if others else 0.0
