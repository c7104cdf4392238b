"""A pipeline's steps, stage by stage: the bubble in fill, steady state and drain; a stage that is slow. Pure.

    rank 0   |F|F|F|F|  |B|F|B|F|B| |B|    a rank's time, from the first computation of any rank to the last:
    rank 1   ~|F|B|F|B|F|B|F|B|  |B|~~~    fill, then its own first computation to its last, then drain

A bubble is all of that in which a rank does not compute. What it comes to without noise is known twice over:
by the closed form of the schedule, for stages that take equally long, and by the simulator, for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from instep.events import Event, Timeline
from instep.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    SPANS,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
)
from instep.pipeline.closed_forms import cost_s
from instep.pipeline.simulate import StageTimes, bubble_rate, makespan_s, simulate

KINDS = {SPANS[kind]: kind for kind in COMPUTE}
SLOW = 1.25  # times as long as the others: then a stage is named
OFTEN = 0.8  # of the steps
FORMULAS = {
    "naive": "(p-1)/p",
    "gpipe": "(p-1)/(m+p-1)",
    "1f1b": "(p-1)/(m+p-1)",
    "interleaved": "(p-1)/(vm+p-1)",
}


@dataclass(frozen=True)
class StageCost:
    """What ``ranks`` compute for ``stage`` and one micro-batch, in seconds: medians.

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


class PipelineStep:
    """What the ranks of one pipeline compute in one step."""

    def __init__(self, rows: Mapping[int, Sequence[Event]]) -> None:
        self.rows = rows
        self.first = {rank: min(e.start_ns for e in row) for rank, row in rows.items()}
        self.last = {rank: max(e.end_ns for e in row) for rank, row in rows.items()}
        self.work = {rank: sum(e.end_ns - e.start_ns for e in row) for rank, row in rows.items()}
        self.begin, self.end = min(self.first.values()), max(self.last.values())

    @property
    def leaves(self) -> list[int]:
        return sorted({event.leaf for row in self.rows.values() for event in row})

    @property
    def rate(self) -> float:
        """As ``simulate.bubble_rate``."""
        cost = max(self.last[rank] - self.first[rank] for rank in self.rows)
        return (cost - fmean(self.work.values())) / cost

    def times(self) -> dict[tuple[int, str], list[float]]:
        """Seconds of each computation, by stage and kind."""
        found: dict[tuple[int, str], list[float]] = {}
        for row in self.rows.values():
            for event in row:
                found.setdefault((event.stage, KINDS[event.name]), []).append(event.duration_s)
        return found

    def schedule(self) -> Schedule:
        """The one that was executed.

        Raises:
            ValueError: it is not whole.
        """
        number = {leaf: k for k, leaf in enumerate(self.leaves)}
        rows = []
        for row in self.rows.values():
            apart = {(event.stage, event.leaf) for event in row if KINDS[event.name] == INPUT_GRADIENT}
            actions = []
            for event in sorted(row, key=lambda event: event.start_ns):
                kind = KINDS[event.name]
                if kind == WEIGHT_GRADIENT and (event.stage, event.leaf) not in apart:
                    kind = BACKWARD  # of the first stage, which has no inputs to train
                actions.append(Action(event.stage, kind, number[event.leaf]))
            rows.append(actions)
        return Schedule.of(rows)


def pipeline_figures(timelines: Iterable[Timeline], schedule: str = "") -> PipelineFigures | None:
    """What the steps in ``timelines``, measured or simulated, tell of a pipeline; None if there is none.

    Ranks with the same micro-batches are one pipeline. ``schedule`` names the closed form.
    """
    steps = [
        found for timeline in timelines for number in timeline.steps for found in _steps_of(timeline, number)
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
        span_s=fmean(step.end - step.begin for step in steps) / 1e9,
        bubble=fmean(step.rate for step in steps),
        formula=_formula(schedule, size, num_micro_batches, chunks, stages),
        ranks=ranks,
        stages=stages,
        slow=_slow_stage(steps, stages),
    )


def _steps_of(timeline: Timeline, step: int) -> list[PipelineStep]:
    """Each pipeline's part of ``step``, as far as ranks have ended it."""
    pipelines: dict[tuple[int, ...], dict[int, list[Event]]] = {}
    for rank in timeline.ranks:
        window = timeline.window(rank, step)
        row = [
            event
            for event in timeline.of(rank, step)
            if event.stage >= 0 and event.lane == "compute" and event.name in KINDS
            and window is not None and window.start_ns <= event.start_ns < window.end_ns
        ]  # fmt: skip
        if row:
            leaves = tuple(sorted({event.leaf for event in row}))
            pipelines.setdefault(leaves, {})[rank] = row
    return [PipelineStep(rows) for rows in pipelines.values()]


def _ranks(steps: Sequence[PipelineStep]) -> list[RankBubble]:
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    stages: dict[int, tuple[int, ...]] = {}
    for step in steps:
        for rank, row in step.rows.items():
            stages[rank] = tuple(sorted({event.stage for event in row}))
            fill, drain = step.first[rank] - step.begin, step.end - step.last[rank]
            steady = step.last[rank] - step.first[rank] - step.work[rank]
            found.setdefault(rank, []).append((step.work[rank], fill, steady, drain))
    return [
        RankBubble(rank, stages[rank], *(fmean(figures) / 1e9 for figures in zip(*found[rank], strict=True)))
        for rank in sorted(found)
    ]


def _costs(steps: Sequence[PipelineStep]) -> list[StageCost]:
    times: dict[tuple[int, str], list[float]] = {}
    ranks: dict[int, set[int]] = {}
    for step in steps:
        for key, taken in step.times().items():
            times.setdefault(key, []).extend(taken)
        for rank, row in step.rows.items():
            for event in row:
                ranks.setdefault(event.stage, set()).add(rank)

    def typical(stage: int, kind: str) -> float:
        return median(times.get((stage, kind), [0.0]))

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
    for (stage, _), times in step.times().items():
        took[stage] = took.get(stage, 0.0) + median(times)
    others = [seconds for stage, seconds in took.items() if stage != slow]
    return took.get(slow, 0.0) / max(median(others), 1e-9) if others else 0.0
