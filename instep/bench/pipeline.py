"""``instep bench pipeline``: a step of a pipeline by each schedule, measured, simulated and by closed form.

    measured     what ranks have recorded of their forwards and backwards
    simulated    the same schedule in virtual time (``instep.pipeline.simulate``), fed with each step's own
                 times: every action takes what it has taken there on average, every message what those took
                 that a rank waited for
    by formula   ``instep.pipeline.closed_forms`` with equal stages, F = I = W, and messages that take
                 nothing: of gpipe and 1f1b that is (p-1) / (m+p-1)

The bubble is the same share of all three, ``simulate.bubble_rate``: of the longest time of a rank from its
first computation to its last, what it does not compute. With one micro-batch each rank waits for (p-1) / p
of the step. All micro-batches are equally large, so that a step of more of them is a longer one. Figures are
medians over steps; what disturbs a step is in its simulation, too, as far as it makes a stage slow.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from instep.bench.charts import bars
from instep.bench.options import PipelineOptions
from instep.bench.pipeline_rank import measure_pipelines, variant
from instep.bench.tables import Row, machine, paired_ratio, quantile, short, show, spread, write
from instep.bench.workloads import FLOAT_BYTES
from instep.bench.worlds import on_ranks, require_memory
from instep.events import Event, Timeline
from instep.models.config import num_parameters
from instep.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Schedule,
)
from instep.pipeline.check import peak_activations
from instep.pipeline.closed_forms import cost_s, is_exact
from instep.pipeline.recorded import PipelineStep, recorded_actions
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import NS, StageTimes, bubble_rate, makespan_s, simulate
from instep.plan.memory_estimate import for_gpt, largest
from instep.timeline.step_chart import side_by_side

MS, MEGABYTE = 1e3, 1e6
WEIGHTS_AND_GRADIENTS = 2
DRAWN = ("gpipe", "1f1b")  # whose steps are drawn; all others if neither was measured
MOST_DRAWN = 8  # micro-batches: numbers of more have no room in their boxes
# What the table on stdout leaves to the files.
HIDDEN = ("forward(ms)", "backward(ms)", "input gradient(ms)", "weight gradient(ms)")
SHARES = ("bubble", "simulated bubble", "by formula")
# What is no bubble where ranks wait for cores.
OF_BUBBLES = (
    *SHARES,
    "simulated(ms)",
    "bubble q25",
    "bubble q75",
    "x simulated",
    "x replayed",
    "message(ms)",
    "around(ms)",
)


@dataclass(frozen=True)
class MeasuredStep:
    """One step as all ranks have ``recorded`` it, and what the simulator makes of its times.

    ``step_s`` is that of the slowest rank.
    """

    schedule: Schedule
    step_s: float
    recorded: PipelineStep
    events: Timeline

    @classmethod
    def of(cls, schedule: Schedule, by_rank: Sequence[Mapping[str, Any]]) -> MeasuredStep:
        """What each rank has measured of it: "step_s" and "events"."""
        events = [[Event(*fields) for fields in its["events"]] for its in by_rank]
        recorded = PipelineStep(dict(enumerate(map(recorded_actions, events))))
        return cls(schedule, max(its["step_s"] for its in by_rank), recorded, Timeline(chain(*events)))

    @property
    def timeline(self) -> Timeline:
        return self.recorded.timeline

    @property
    def around_s(self) -> float:
        """The most that a rank did beside computing and waiting."""
        rows = self.recorded.rows.values()
        return max(sum(one.took_s - one.computed_s for one in row) for row in rows)

    @cached_property
    def took(self) -> Mapping[str, list[float]]:
        """Seconds of an action of each kind by stage, the mean over micro-batches; 0 where there is none."""
        stages, times = range(self.schedule.num_stages), self.recorded.times
        return {kind: [times.get((k, kind), 0.0) for k in stages] for kind in COMPUTE}

    @property
    def times(self) -> StageTimes:
        """What the simulator is fed with; for messages, the median of those that a rank has waited for."""
        # A backward in one part takes I + W: it does not matter which of them is all of it.
        whole_or_first = zip(self.took[BACKWARD], self.took[INPUT_GRADIENT], strict=True)
        return StageTimes(
            self.took[FORWARD], list(map(sum, whole_or_first)), self.took[WEIGHT_GRADIENT], self.message_s
        )

    @cached_property
    def message_s(self) -> float:
        """From the end of an action to when a rank that has waited for it turns to its own, in the median."""
        ranks, found = self.schedule.stage_ranks, []
        done = {one.action.result: one for one in self.recorded.actions}
        for rank, row in enumerate(self.schedule.rows):
            free_ns = -1
            came: list[int] = []
            for action in row:
                needed = [one for one in self.schedule.needs(action) if ranks[one.stage] != rank]
                came += [done[one].event.end_ns for one in needed]
                if (one := done.get(action.result)) is None:
                    continue  # an input gradient of the first stage, which has no inputs: the next one waits
                if came and free_ns <= max(came):
                    found.append((one.turned_ns - max(came)) / NS)
                free_ns, came = one.event.end_ns, []
        return statistics.median(found or [0.0])

    @cached_property
    def simulated(self) -> Timeline:
        """The step, if every action took what it takes on average."""
        return simulate(self.schedule, self.times)

    @cached_property
    def replayed(self) -> Timeline:
        """The step, if every action took what it has taken itself."""
        single = {one.action: one.took_s for one in self.recorded.actions}
        return simulate(self.schedule, replace(self.times, single=single))


@dataclass(frozen=True)
class PipelineSteps:
    """The steps of one schedule and number of micro-batches."""

    schedule: Schedule
    steps: Sequence[MeasuredStep]
    kept: Sequence[Mapping[str, float]]  # by rank

    @classmethod
    def of(cls, schedule: Schedule, by_rank: Sequence[Mapping[str, Any]]) -> PipelineSteps:
        """Those among what ranks have measured."""
        name = variant(schedule.name, schedule.num_micro_batches)
        turns = zip(*(rank["steps"][name] for rank in by_rank), strict=True)
        steps = [MeasuredStep.of(schedule, turn) for turn in turns]
        return cls(schedule, steps, [rank["kept"][name] for rank in by_rank])

    @property
    def name(self) -> str:
        """What ranks call it."""
        return variant(self.schedule.name, self.schedule.num_micro_batches)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def activations(self) -> list[tuple[float, float]]:
        """By rank, the most that autograd keeps and the schedule says, in micro-batches of the whole rank."""
        said = peak_activations(self.schedule)
        return [(of["micro_batches"], x / self.chunks) for of, x in zip(self.kept, said, strict=True)]

    def by_formula(self) -> float | None:
        """The bubble by the closed form; None where that is not exact."""
        p, m = self.schedule.num_ranks, self.schedule.num_micro_batches
        if not is_exact(self.schedule.name, p, m):
            return None
        third = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}
        return 1 - m * sum(third.values()) / cost_s(self.schedule.name, p, m, self.chunks, **third)

    def middle(self) -> MeasuredStep:
        """The step that took as long as most."""
        middle = statistics.median(makespan_s(step.timeline) for step in self.steps)
        return min(self.steps, key=lambda step: abs(makespan_s(step.timeline) - middle))

    def row(self) -> dict[str, Any]:
        """All figures of it, medians over steps; ``x simulated`` compares each step with its own
        simulation."""
        steps_s = [step.step_s for step in self.steps]
        rates = [bubble_rate(step.timeline) for step in self.steps]
        simulated = [bubble_rate(step.simulated) for step in self.steps]
        against = paired_ratio(rates, simulated) if all(simulated) else None
        replayed = [bubble_rate(step.replayed) for step in self.steps]
        against_own = paired_ratio(rates, replayed) if all(replayed) else None
        return {
            "schedule": self.schedule.name,
            "micro-batches": self.schedule.num_micro_batches,
            "step(ms)": MS * statistics.median(steps_s),
            "q25(ms)": MS * quantile(steps_s, 0.25),
            "q75(ms)": MS * quantile(steps_s, 0.75),
            "simulated(ms)": MS * statistics.median(makespan_s(step.simulated) for step in self.steps),
            "bubble": statistics.median(rates),
            "bubble q25": quantile(rates, 0.25),
            "bubble q75": quantile(rates, 0.75),
            "simulated bubble": statistics.median(simulated),
            "by formula": self.by_formula(),
            **spread("x simulated", against),
            **spread("x replayed", against_own),
            **self._taken(),
            "kept": ", ".join(f"{kept:.3g}" for kept, _ in self.activations),
            "kept by schedule": ", ".join(f"{said:.3g}" for _, said in self.activations),
            "kept(MB)": max(of_rank["bytes"] for of_rank in self.kept) / MEGABYTE,
        }

    def _taken(self) -> dict[str, float | None]:
        """Milliseconds of a stage's action, of a message and of all that is around actions, in the median."""
        both = (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)

        def ms(*kinds: str) -> float:
            of_steps = (sum(statistics.fmean(step.took[kind]) for kind in kinds) for step in self.steps)
            return MS * statistics.median(of_steps)

        return {
            "forward(ms)": ms(FORWARD),
            "backward(ms)": ms(*both),
            "weight gradient(ms)": ms(WEIGHT_GRADIENT) or None,
            "message(ms)": MS * statistics.median(step.message_s for step in self.steps),
            "around(ms)": MS * statistics.median(step.around_s for step in self.steps),
        }


@dataclass(frozen=True)
class PipelineResults:
    """All schedules and numbers of micro-batches, from one micro-batch on."""

    options: PipelineOptions
    steps: Sequence[PipelineSteps]

    @property
    def num_samples(self) -> int:
        return len(self.steps[0].steps)

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
            "kept: peak of autograd's saved tensors, by rank, in micro-batches of all of a rank's layers; "
            "kept(MB): of the rank with the most."
        )
        if self.is_crowded:
            return [
                kept,
                f"{self.options.ranks} ranks take turns on {_num_cores()} cores, so they wait for a core: "
                "bubbles are measured with a core for each rank.",
            ]
        return [
            f"step: forward and backward of the slowest rank, median of {self.num_samples}, all in "
            "turns; simulated: each step with its own times, from the first computation to the last.",
            "bubble: idle share of the longest time from a rank's first computation to its last. x "
            "simulated: the measured bubble over that step's simulated one, with quartiles, where all "
            "actions of a kind take their mean time; x replayed: where each takes its own measured time. "
            "by formula: F = I = W, messages take no time.",
            "message: from the end of an action until the rank that waits for it continues; around: a rank's "
            "time in a step outside of computing and waiting, part of its forwards and backwards.",
            kept,
        ]

    def as_json(self) -> dict[str, Any]:
        asked = asdict(self.options)
        said = ("ranks", "layers", "width", "micro_size", "context", "backend")
        return {
            **{name: asked[name] for name in said},
            "samples": self.num_samples,
            "text": self.text,
            "rows": self.rows,
            "times": {one.name: [asdict(step.times) for step in one.steps] for one in self.steps},
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
    show([short_row(row) for row in results.rows], f"A step by schedule: {results.text}", notes=results.notes)
    write(options, results.as_json(), results.rows, lambda path: draw(results, path))


def measure(options: PipelineOptions) -> PipelineResults:
    """Every schedule with every number of micro-batches, in turns."""
    options.check()
    model = options.model
    require_memory(
        WEIGHTS_AND_GRADIENTS * len(options.names) * FLOAT_BYTES * num_parameters(model)
        + largest(for_gpt(model, options.micro_size * options.counts[-1])).of("activations"),
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


def short_row(row: Row) -> dict[str, Any]:
    """A row for people: shares as percentages, the times of stages in the files."""
    shares = {name: f"{row[name]:.1%}" for name in SHARES if row.get(name) is not None}
    return {name: shares.get(name, value) for name, value in short([row], HIDDEN)[0].items()}


def draw(results: PipelineResults, path: Path) -> list[Path]:
    """Bubbles of all schedules; and, in files named "-steps", steps as boxes in time."""
    place = f"{results.text}, on {machine()}"
    most = max((m for m in results.options.counts if m <= MOST_DRAWN), default=results.options.counts[0])
    bubbles = bars(
        [bar for row in results.rows if row["micro-batches"] == most for bar in _bars_of(row)], path,
        title=f"Bubbles of {results.options.ranks} stages, {most} micro-batches",
        subtitle=f"{place}; median and quartiles of {results.num_samples} steps, all in turns. "
        "Simulated: with the forwards, backwards and messages that were measured",
        label="how", value="bubble", low="low", high="high", unit="%", group="schedule",
    )  # fmt: skip
    found = [one for one in results.steps if one.schedule.num_micro_batches == most]
    steps: dict[str, tuple[Timeline, int]] = {}
    notes = {}
    for one in [one for one in found if one.schedule.name in DRAWN] or found:
        middle = one.middle()
        for how, timeline, counted in (
            ("measured", middle.events, middle.timeline),
            ("simulated", middle.simulated, middle.simulated),
        ):
            name = f"{one.schedule.name}, {how}"
            steps[name], notes[name] = (timeline, 0), f"{bubble_rate(counted):.1%} bubble"
    drawn = side_by_side(
        steps,
        path.with_stem(f"{path.stem}-steps"),
        title="A pipeline's step, measured and simulated",
        subtitle=f"{place}; {most} micro-batches. Above the step that took as long as most, below the "
        "simulator with its average forward and backward and its median message",
        notes=notes,
        ranks=range(results.options.ranks),
    )
    return [*bubbles, *drawn]


def _bars_of(row: Row) -> list[dict[str, Any]]:
    """The bubble of a schedule in percent: measured, simulated, by formula."""
    found: list[dict[str, Any]] = []
    for how, column in (("measured", "bubble"), ("simulated", "simulated bubble"), ("by formula",) * 2):
        if row[column] is not None:
            found.append({"schedule": row["schedule"], "how": how, "bubble": 100 * row[column]})
    found[0] |= {"low": 100 * row["bubble q25"], "high": 100 * row["bubble q75"]}
    return found


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
