"""``instep bench pipeline``: a step of a pipeline by each schedule, measured, simulated and by closed form.

    measured     what ranks have recorded of their forwards and backwards, the median over steps
    simulated    the same schedule in virtual time (``instep.pipeline.simulate``), of which every action takes
                 what it has taken on average, and every message what those took that a rank waited for
    by formula   ``instep.pipeline.closed_forms`` with equal stages, F = I = W, and messages that take
                 nothing: of gpipe and 1f1b that is (p-1) / (m+p-1)

The bubble is the same share of all three, ``simulate.bubble_rate``: of the longest time of a rank from its
first computation to its last, what it does not compute. With one micro-batch each rank waits for (p-1) / p
of the step. All micro-batches are equally large, so that a step of more of them is a longer one.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from instep.bench.charts import StepPanel, against_micro_batches, pipeline_steps
from instep.bench.options import PipelineOptions
from instep.bench.pipeline_rank import measure_pipelines, variant
from instep.bench.tables import Row, machine, quantile, show, write
from instep.bench.workloads import FLOAT_BYTES
from instep.bench.worlds import on_ranks, require_memory
from instep.events import Event, Timeline
from instep.models.config import num_parameters
from instep.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SPANS,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
)
from instep.pipeline.check import peak_activations
from instep.pipeline.closed_forms import cost_s, is_exact
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import NS, StageTimes, bubble_rate, makespan_s, simulate
from instep.recipes.memory_estimate import activation_bytes

MS, MEGABYTE = 1e3, 1e6
KINDS = {span: kind for kind, span in SPANS.items()}
WEIGHTS_AND_GRADIENTS = 2
DRAWN = ("gpipe", "1f1b")  # whose steps are drawn; all others if neither was measured
MOST_DRAWN = 8  # micro-batches: numbers of more have no room in their boxes
# What the table on stdout leaves to the files.
FILES_ONLY = (
    *("q25(ms)", "q75(ms)", "bubble q25", "bubble q75"),
    *("forward(ms)", "backward(ms)", "input gradient(ms)", "weight gradient(ms)"),
)
SHARES = ("bubble", "simulated bubble", "by formula")
# What is no bubble where ranks wait for cores.
OF_BUBBLES = (
    *SHARES,
    "simulated(ms)",
    "bubble q25",
    "bubble q75",
    "x simulated",
    "message(ms)",
    "between(ms)",
)


class Gaps(NamedTuple):
    """Seconds between two computations, of which the second began as soon as it could.

    ``messages``: the first was on another rank, and the second waited for it: a message, and all that its
    two ends do. ``between``: both were on one rank, and the second needed no message.
    """

    messages: list[float]
    between: list[float]


@dataclass(frozen=True)
class PipelineSteps:
    """The steps of one schedule and number of micro-batches, as all ranks have recorded them."""

    schedule: Schedule
    steps_s: Sequence[float]  # of the slowest rank
    timelines: Sequence[Timeline]
    kept: Sequence[Mapping[str, float]]  # by rank

    @classmethod
    def of(cls, schedule: Schedule, by_rank: Sequence[Mapping[str, Any]]) -> PipelineSteps:
        """Those among what ranks have measured."""
        name = variant(schedule.name, schedule.num_micro_batches)
        turns = list(zip(*(rank["steps"][name] for rank in by_rank), strict=True))
        return cls(
            schedule,
            [max(of_rank["step_s"] for of_rank in turn) for turn in turns],
            [Timeline(Event(*fields) for of_rank in turn for fields in of_rank["events"]) for turn in turns],
            [rank["kept"][name] for rank in by_rank],
        )

    @property
    def name(self) -> str:
        """What ranks call it."""
        return variant(self.schedule.name, self.schedule.num_micro_batches)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @cached_property
    def times(self) -> StageTimes:
        """What the simulator is fed with: of every stage and kind the median over steps of the mean over
        micro-batches, and the median of all messages that a rank has waited for."""
        took: dict[tuple[int, str], list[float]] = defaultdict(list)
        for timeline in self.timelines:
            of_step: dict[tuple[int, str], list[float]] = defaultdict(list)
            for event in timeline.events:
                of_step[event.stage, KINDS[event.name]].append(event.duration_s)
            for of, found in of_step.items():
                took[of].append(statistics.fmean(found))

        def by_stage(kind: str) -> list[float]:
            return [statistics.median(took.get((k, kind), [0.0])) for k in range(self.schedule.num_stages)]

        # A backward in one part takes I + W: it does not matter which of them is all of it.
        whole, first = by_stage(BACKWARD), by_stage(INPUT_GRADIENT)
        return StageTimes(
            by_stage(FORWARD),
            [sum(parts) for parts in zip(whole, first, strict=True)],
            by_stage(WEIGHT_GRADIENT),
            statistics.median(self.gaps.messages or [0.0]),
        )

    @cached_property
    def gaps(self) -> Gaps:
        """Of all steps."""
        found = Gaps([], [])
        for timeline in self.timelines:
            for event, came_ns, before_ns in self._in_turn(timeline):
                if came_ns is None and before_ns is not None:
                    found.between.append((event.start_ns - before_ns) / NS)
                elif came_ns is not None and (before_ns is None or before_ns <= came_ns):
                    found.messages.append((event.start_ns - came_ns) / NS)
        return found

    def _in_turn(self, timeline: Timeline) -> Iterator[tuple[Event, int | None, int | None]]:
        """Every computation; when the last that it needs of other ranks ended; when the one before it did."""
        ranks = self.schedule.stage_ranks
        done = {Action(event.stage, KINDS[event.name], event.leaf).result: event for event in timeline.events}
        for rank, row in enumerate(self.schedule.rows):
            before_ns: int | None = None
            came: list[int] = []
            for action in row:
                needed = [one for one in self.schedule.needs(action) if ranks[one.stage] != rank]
                came += [done[one].end_ns for one in needed]
                if (event := done.get(action.result)) is not None:
                    yield event, max(came, default=None), before_ns
                    before_ns, came = event.end_ns, []
                # Else an input gradient of the first stage, which has no inputs: what it waits for, the next
                # action does.

    @cached_property
    def simulated(self) -> Timeline:
        """A step of which every action takes what it has taken on average."""
        return simulate(self.schedule, self.times)

    def by_formula(self) -> float | None:
        """The bubble by the closed form; None where that is not exact."""
        p, m = self.schedule.num_ranks, self.schedule.num_micro_batches
        if not is_exact(self.schedule.name, p, m):
            return None
        third = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}
        return 1 - m * sum(third.values()) / cost_s(self.schedule.name, p, m, self.chunks, **third)

    @property
    def activations(self) -> list[tuple[float, float]]:
        """By rank, the most that autograd keeps and the schedule says, in micro-batches of the whole rank."""
        said = peak_activations(self.schedule)
        return [(of["micro_batches"], x / self.chunks) for of, x in zip(self.kept, said, strict=True)]

    def middle(self) -> Timeline:
        """The step that took as long as most."""
        middle = statistics.median(map(makespan_s, self.timelines))
        return min(self.timelines, key=lambda timeline: abs(makespan_s(timeline) - middle))

    def row(self) -> dict[str, Any]:
        """All figures of it."""
        rates = [bubble_rate(timeline) for timeline in self.timelines]
        rate, simulated = statistics.median(rates), bubble_rate(self.simulated)
        took = [
            statistics.fmean(found)
            for found in (self.times.forward_s, self.times.input_gradient_s, self.times.weight_gradient_s)
            if not isinstance(found, float)
        ]
        return {
            "schedule": self.schedule.name,
            "micro-batches": self.schedule.num_micro_batches,
            "step(ms)": MS * statistics.median(self.steps_s),
            "q25(ms)": MS * quantile(self.steps_s, 0.25),
            "q75(ms)": MS * quantile(self.steps_s, 0.75),
            "simulated(ms)": MS * makespan_s(self.simulated),
            "bubble": rate,
            "bubble q25": quantile(rates, 0.25),
            "bubble q75": quantile(rates, 0.75),
            "simulated bubble": simulated,
            "by formula": self.by_formula(),
            "x simulated": rate / simulated if simulated else None,
            "forward(ms)": MS * took[0],
            "backward(ms)": MS * (took[1] + took[2]),
            "weight gradient(ms)": MS * took[2] or None,
            "message(ms)": MS * statistics.median(self.gaps.messages or [0.0]),
            "between(ms)": MS * statistics.median(self.gaps.between or [0.0]),
            "kept": ", ".join(f"{kept:.3g}" for kept, _ in self.activations),
            "kept by schedule": ", ".join(f"{said:.3g}" for _, said in self.activations),
            "kept(MB)": max(of_rank["bytes"] for of_rank in self.kept) / MEGABYTE,
        }


@dataclass(frozen=True)
class PipelineResults:
    """All schedules and numbers of micro-batches, from one micro-batch on."""

    options: PipelineOptions
    steps: Sequence[PipelineSteps]

    @property
    def is_crowded(self) -> bool:
        """Whether ranks wait for cores: then what they wait for is no bubble."""
        return is_crowded(self.options)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Where there are more ranks than cores, without what only ranks that compute at once can show."""
        hidden = OF_BUBBLES if self.is_crowded else ()
        return [{name: x for name, x in one.row().items() if name not in hidden} for one in self.steps]

    @property
    def text(self) -> str:
        """What was measured, in words."""
        asked, model = self.options, self.options.model
        return (
            f"GPT of {model.layers} blocks of width {model.width}, {num_parameters(model) / 1e6:.3g} M "
            f"parameters, micro-batches of {asked.micro_size} x {asked.context} tokens, {asked.ranks} ranks "
            f"over {asked.backend}"
        )

    @property
    def notes(self) -> list[str]:
        """What has to be known to read the table."""
        kept = (
            "kept: the most that autograd keeps, by rank, in micro-batches of all of a rank's layers; "
            "kept(MB): of the rank that keeps most."
        )
        if self.is_crowded:
            return [
                kept,
                f"{self.options.ranks} ranks take turns on {_num_cores()} cores, so what they wait for is a "
                "core: bubbles are measured with a core for each rank.",
            ]
        return [
            f"step: forward and backward of the slowest rank, median of {self.options.samples}, all in "
            "turns; simulated: from the first computation to the last.",
            "bubble: of the longest time from a rank's first computation to its last, what ranks do not "
            "compute. simulated: with the times of this row. by formula: F = I = W, messages that take "
            "nothing.",
            "message: from the end of a computation to the begin of one on another rank that waits for it; "
            "between: from one to the next on a rank that waits for nothing, which the simulator leaves out.",
            kept,
        ]

    def as_json(self) -> dict[str, Any]:
        asked = asdict(self.options)
        said = ("ranks", "layers", "width", "micro_size", "context", "backend", "samples")
        return {
            **{name: asked[name] for name in said},
            "text": self.text,
            "rows": self.rows,
            "times": {one.name: asdict(one.times) for one in self.steps},
        }


def run(options: PipelineOptions) -> None:
    """Measure, print the table, write the files.

    Raises:
        ValueError: there is not enough memory, or a chart is asked for with more ranks than cores.
        RankFailed: a rank failed.
    """
    if options.chart is not None and is_crowded(options):
        raise ValueError(
            f"--chart draws bubbles, which {options.ranks} ranks on {_num_cores()} cores do not show: pass "
            f"-n {_num_cores()}, or leave the chart out"
        )
    results = measure(options)
    show([short(row) for row in results.rows], f"A step by schedule: {results.text}", notes=results.notes)
    write(options, results.as_json(), results.rows, lambda path: draw(results, path))


def measure(options: PipelineOptions) -> PipelineResults:
    """Every schedule with every number of micro-batches, in turns."""
    options.check()
    model = options.model
    require_memory(
        WEIGHTS_AND_GRADIENTS * len(options.names) * FLOAT_BYTES * num_parameters(model)
        + activation_bytes(model, options.micro_size * options.counts[-1]),
        ranks=options.ranks,
        fix="pass fewer --schedules, or a smaller --width, --layers or --micro-size",
    )
    task = {
        "model": asdict(model),
        "micro_size": options.micro_size,
        "schedules": options.names,
        "micro_batches": options.counts,
        "backend": options.backend,
        "samples": options.samples,
    }
    by_rank = on_ranks(measure_pipelines, task, ranks=options.ranks)
    asked = [generate(name, options.ranks, m) for m in options.counts for name in options.names]
    return PipelineResults(options, [PipelineSteps.of(schedule, by_rank) for schedule in asked])


def is_crowded(options: PipelineOptions) -> bool:
    """Whether there are more ranks than cores."""
    return options.ranks > _num_cores()


def short(row: Row) -> dict[str, Any]:
    """A row for people: shares as percentages, the spread and the times of stages in the files."""
    return {
        name: f"{value:.1%}" if name in SHARES and value is not None else value
        for name, value in row.items()
        if name not in FILES_ONLY
    }


def draw(results: PipelineResults, path: Path) -> list[Path]:
    """Bubbles over the number of micro-batches; and, in files named "-steps", steps as boxes in time."""
    place = f"{results.text}, on {machine()}"
    bubbles = against_micro_batches(
        results.rows,
        path,
        title=f"More micro-batches, smaller bubbles: {results.options.ranks} stages",
        subtitle=f"{place}; median and quartiles of {results.options.samples} steps, all in turns. "
        "Simulated: with the forwards, backwards and messages that were measured",
    )
    most = max((m for m in results.options.counts if m <= MOST_DRAWN), default=results.options.counts[0])
    found = [one for one in results.steps if one.schedule.num_micro_batches == most]
    found = [one for one in found if one.schedule.name in DRAWN] or found
    steps = pipeline_steps(
        [panel for one in found for panel in panels_of(one)],
        path.with_stem(f"{path.stem}-steps"),
        title="A pipeline's step, measured and simulated",
        subtitle=f"{place}; {most} micro-batches. Above the step that took as long as most, below the "
        "simulator with the median forward, backward and message; grey is a rank that waits",
        label="ms since the first forward began",
    )
    return [*bubbles, *steps]


def panels_of(one: PipelineSteps) -> list[StepPanel]:
    """The step that took as long as most, and the simulated one."""
    measured, name = one.middle(), one.schedule.name
    return [
        StepPanel(f"{name}, {how}", f"{bubble_rate(timeline):.1%} bubble", timeline)
        for how, timeline in (("measured", measured), ("simulated", one.simulated))
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
