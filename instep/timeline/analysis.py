"""What the ranks' trace files tell of a run: where its time went, who is slow, what would make it faster.

``analyse`` brings together what the other files here compute: the breakdown, the table of buckets, the
straggler and the advice. ``summary_lines`` says it in lines to read; ``Analysis.figures`` are for
``summary.json``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from instep.events import Event
from instep.timeline.advice import Advice, RunExchanges, RunMeasurements, advise, in_ms, in_percent
from instep.timeline.breakdown import EXPOSED, PARTS, Parts, RankBreakdown, breakdown, parts, slowdown
from instep.timeline.bubbles import BACKWARD
from instep.timeline.bucket_times import BucketRow, bucket_rows
from instep.timeline.run_setting import MOST, RunSetting, setting_of
from instep.timeline.stages import FORMULAS, PipelineFigures, RankBubble, SlowStage, pipeline_figures
from instep.timeline.straggler import OwnTimes, SlowRank, find_slow_rank

if TYPE_CHECKING:  # it needs numpy
    from instep.timeline.trace_files import RunTraces

SAMPLED = 60  # steps, for what needs all events of all ranks at once
WARM_UP = 2  # steps in which the order of the buckets is learned
WORTH_SAYING = 0.0005  # of a step
WORTH_HIDING = 0.01  # of a step
ARGUMENTS = {  # of what a script calls, for flags of instep train
    "--batch.global-size": "batch_size",
    "--parallel.backend": "backend",
    "--parallel.bucket-mb": "bucket_cap_mb",
    "--parallel.cuts": "cuts",
    "--parallel.strategy": "strategy",
    "--parallel.threads": "threads",
}


@dataclass(frozen=True)
class Analysis:
    """What was found; ``rows`` are the parts of every step looked at, by rank."""

    rows: Mapping[int, Sequence[Parts]]
    breakdowns: Sequence[RankBreakdown]
    buckets: Sequence[BucketRow]
    slow: SlowRank | None
    advice: Sequence[Advice]
    pipeline: PipelineFigures | None = None
    setting: RunSetting | None = None
    backward_s: float = 0.0  # median backward of a last micro-batch

    def lines(self) -> Iterator[tuple[str, str]]:
        """``summary_lines`` of what was found."""
        return summary_lines(self.breakdowns, self.slow, self.advice, self.pipeline)

    def figures(self) -> dict[str, Any]:
        """For ``summary.json``."""
        found: dict[str, Any] = {
            "breakdown": [row.to_json() for row in self.breakdowns],
            "buckets": [asdict(row) for row in self.buckets],
            "slow_rank": None if self.slow is None else asdict(self.slow),
            "advice": [asdict(advice) for advice in self.advice],
        }
        if self.setting is not None:
            found |= {"setting": asdict(self.setting), "backward_s": self.backward_s}
        return found | ({} if self.pipeline is None else {"pipeline": self.pipeline.to_json()})


def analyse(
    traces: RunTraces,
    steps: Sequence[int] | None = None,
    *,
    breakdowns: Sequence[RankBreakdown] | None = None,
    slow: SlowRank | None = None,
    each: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Analysis:
    """What ``traces`` tell of ``steps``, by default all that have ended; ``each`` may show progress.

    ``breakdowns`` and ``slow`` are taken where they are known already, from ranks whose files are elsewhere.
    A rank that the run went on without is among the rows only.
    """
    steps = traces.steps if steps is None else steps
    rows: dict[int, list[Parts]] = {rank: [] for rank in traces.traces}
    for step in each(steps):
        for rank in traces.ranks(step):
            if (found := parts(traces.traces[rank].events(step))) is not None:
                rows[rank].append(found)
    rows = {rank: found for rank, found in rows.items() if found}
    sampled = _sample(steps[WARM_UP:] or steps)
    if breakdowns is None:
        present = {rank: found for rank, found in rows.items() if rank not in traces.gone}
        breakdowns = [breakdown(found, _slowdown(traces, rank, sampled)) for rank, found in present.items()]
        slow = find_slow_rank(OwnTimes.of(found) for each in present.values() for found in each)
    breakdowns = [row for row in breakdowns if row.steps]
    buckets = bucket_rows(traces.timeline(step) for step in sampled)
    setting = None if traces.first is None else setting_of(traces.first.head.get("setting"))
    schedule = "" if setting is None else setting.schedule
    pipeline = pipeline_figures((traces.timeline(step) for step in sampled), schedule)
    backward_s = _last_backward_s(traces, sampled)
    advice = (
        advise(
            breakdowns,
            buckets,
            slow,
            setting,
            backward_s=backward_s,
            optimizer=str(traces.first.head.get("optimizer")),
            num_parameters=traces.first.figure("num_parameters", MOST),
            slow_stage=None if pipeline is None else pipeline.slow,
        )
        if breakdowns and traces.first is not None and setting is not None
        else []
    )
    if traces.first is not None and traces.first.head.get("script"):
        advice = [replace(one, try_=_as_arguments(one.try_)) for one in advice]
    return Analysis(rows, breakdowns, buckets, slow, advice, pipeline, setting, backward_s)


def _as_arguments(flags: str) -> str:
    """Flags of ``instep train`` as arguments of what a script calls: ``strategy="bucketed"``."""
    words = flags.split()
    pairs = [(ARGUMENTS[name], value) for name, value in pairwise(words) if name in ARGUMENTS]
    return ", ".join(
        f"{name}={value}" if value.replace(".", "").isdigit() else f'{name}="{value}"'
        for name, value in pairs
    )


UNNAMED, UNNAMED_S = 0.1, 0.001  # of a step, from which on it is worth a name


def summary_lines(
    breakdowns: Sequence[RankBreakdown],
    slow: SlowRank | None,
    advice: Sequence[Advice],
    pipeline: PipelineFigures | None = None,
) -> Iterator[tuple[str, str]]:
    """(label, text): where the time of a step went, on average over the ranks; who is slow; what to do."""
    if not breakdowns:
        return
    yield "time", _shares(breakdowns)
    hidden_s = fmean(row.hidden_s for row in breakdowns)
    if hidden_s >= WORTH_HIDING * fmean(row.wall_s for row in breakdowns):
        share = hidden_s / (hidden_s + fmean(row.parts[EXPOSED] for row in breakdowns))
        hidden = f"{in_percent(share)} of the communication ({in_ms(hidden_s)}) ran while ranks computed"
        yield "", f"{hidden}{_gathers(breakdowns)}"
    if pipeline is not None and pipeline.num_ranks > 1:
        yield from _pipeline_lines(pipeline)
    if slow is not None:
        yield "slow", slowness(slow)
    for number, one in enumerate(advice):
        gain_s = one.gain_ms / 1e3
        steps = f"{in_ms(gain_s)} a step, at least {in_ms(gain_s * one.confidence)} in three of four steps"
        gain = f"about {in_percent(one.gain_share)} ({steps})"
        try_ = f": {one.try_}" if one.try_ else ""
        yield "" if number else "advice", f"{one.text} Predicted gain: {gain}{try_}"
    share = fmean(row.unattributed_share for row in breakdowns)
    left_s = share * fmean(row.median_s for row in breakdowns)
    if share > UNNAMED and left_s > UNNAMED_S:
        yield (
            "" if advice else "advice",
            f"{in_ms(left_s)} a step ({in_percent(share)}) are unattributed: to see where they go, put parts "
            'of your loop into `with step.span("a name"):`, under instep.trace `with trace.span("a name"):`',
        )


def slowness(slow: SlowRank) -> str:
    """Which rank is slow, in what, since when, by how much."""
    return (
        f"rank {slow.rank} is slow in {slow.phase}: {in_ms(slow.excess_s)} a step more than the others "
        f"({in_percent(slow.share)}), since step {slow.since}"
    )


def _pipeline_lines(pipeline: PipelineFigures) -> Iterator[tuple[str, str]]:
    """The bubble beside its closed form, each stage's part in it, and the stage that is slow."""
    yield "bubble", f"{bubble_of(pipeline)}; {formula_of(pipeline)}"
    stages = {stage.stage: stage for stage in pipeline.stages}
    for its in dict.fromkeys(row.stages for row in pipeline.ranks):
        rows = [row for row in pipeline.ranks if row.stages == its]
        forward_s = sum(stages[number].forward_s for number in its)
        backward_s = sum(stages[number].backward_s for number in its)
        ranks = _counted("rank", [row.rank for row in rows])
        yield (
            "",
            (
                f"{_counted('stage', its)} ({ranks}): {_phases(rows)}; per micro-batch "
                f"forward {in_ms(forward_s)}, backward {in_ms(backward_s)}"
            ),
        )
    if pipeline.slow is not None:
        yield "slow", stage_slowness(pipeline.slow)


def bubble_of(pipeline: PipelineFigures) -> str:
    """The measured bubble in words and numbers."""
    return (
        f"{pipeline.bubble:.1%} of the {in_ms(pipeline.span_s)} from the first forward to the last backward: "
        f"{_phases(pipeline.ranks)} on average over {len(pipeline.ranks)} ranks"
    )


def formula_of(pipeline: PipelineFigures) -> str:
    """The closed form of its schedule."""
    p, m, v = pipeline.num_ranks, pipeline.micro_batches, pipeline.chunks
    sizes = f"p = {p} ranks" + (f", v = {v} stages each" if v > 1 else "") + f", m = {m} micro-batches"
    if pipeline.formula is None:
        return f"{sizes}, and no formula for this schedule"
    formula = FORMULAS.get(pipeline.schedule, "the formula")
    return f"with equal stages {pipeline.schedule} has {formula} = {pipeline.formula:.1%}, {sizes}"


def stage_slowness(slow: SlowStage) -> str:
    """Which stage is slow, by how much, what the bubble becomes by it, and what to do."""
    return (
        f"stage {slow.stage} ({_counted('rank', slow.ranks)}) takes {slow.times:.1f} times as long per "
        f"micro-batch as the others: forward {in_ms(slow.forward_s)}, theirs {in_ms(slow.others_forward_s)}; "
        f"backward {in_ms(slow.backward_s)}, theirs {in_ms(slow.others_backward_s)}. Simulated, the bubble "
        f"is {slow.bubble:.1%}, and {slow.even_bubble:.1%} with equal stages: move layers to another stage"
    )


def _phases(rows: Sequence[RankBubble]) -> str:
    fill_s, steady_s, drain_s = (
        fmean(figures) for figures in zip(*((x.fill_s, x.steady_s, x.drain_s) for x in rows), strict=True)
    )
    return f"fill {in_ms(fill_s)} + steady state {in_ms(steady_s)} + drain {in_ms(drain_s)}"


def exchanges_of(figures: Mapping[str, Any]) -> RunExchanges | None:
    """The exchanges of a run, from ``Analysis.figures``; None: it has no buckets, or its version wrote less.

    Raises:
        ValueError: the figures are not those of a run.
    """
    setting = setting_of(figures.get("setting"))
    if setting is None:
        return None
    try:
        rows = [RankBreakdown.from_json(row) for row in figures["breakdown"]]
        buckets = [BucketRow(**row) for row in figures["buckets"]]
        slow = SlowRank(**figures["slow_rank"]) if figures["slow_rank"] else None
        run = RunMeasurements(rows, buckets, slow, setting, float(figures["backward_s"]))
        return RunExchanges.of(run) if rows else None
    except (KeyError, TypeError) as error:
        raise ValueError(f"the figures are not those of a run: {error!r}") from None


def _counted(what: str, numbers: Sequence[int]) -> str:
    """ "rank 0", "ranks 0, 2"."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _gathers(breakdowns: Sequence[RankBreakdown]) -> str:
    """How much of the gathers of weights is hidden, where there are some."""
    whole_s = fmean(row.gathers_s for row in breakdowns)
    if whole_s < WORTH_SAYING * fmean(row.wall_s for row in breakdowns):
        return ""
    share = fmean(row.gathers_hidden_s for row in breakdowns) / whole_s
    return f", among it {in_percent(share)} of the gathers of weights ({in_ms(whole_s)})"


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


def _last_backward_s(traces: RunTraces, steps: Sequence[int]) -> float:
    lasts = [
        last
        for step in steps
        for rank in traces.ranks(step)
        if (last := _last_backward(traces.traces[rank].events(step))) is not None
    ]
    return median(lasts) if lasts else 0.0


def _sample(steps: Sequence[int]) -> list[int]:
    """At most ``SAMPLED`` of them, the last one included, at even distances."""
    count = min(len(steps), SAMPLED)
    return [steps[len(steps) - 1 - i * len(steps) // count] for i in range(count)][::-1]


def _slowdown(traces: RunTraces, rank: int, steps: Sequence[int]) -> float | None:
    return slowdown(traces.traces[rank].events(step) for step in steps if rank in traces.ranks(step))


def _last_backward(events: Sequence[Event]) -> float | None:
    found = [event for event in events if event.name == BACKWARD]
    return max(found, key=lambda event: event.end_ns).duration_s if found else None
