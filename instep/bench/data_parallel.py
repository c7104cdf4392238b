"""``instep bench data-parallel``: one step by threads and by processes, and what Python's lock costs.

A step has as many micro-batches as there are workers: one process makes them one after the other, threads and
processes at once. Every worker computes on one thread of torch's, the one process too. Else its operators
would use all cores, and what is compared would be two ways to use them, not workers with one.

The time of a thread that computes has three parts, and the kernel says how long two of them were: it is on a
core, or waits for one. The rest it is blocked; and since a replica neither sends nor reads anything while it
computes, it is blocked by the one thing that replicas share, Python's lock. The same figure of one process,
and of processes that send nothing, says what else there is: it should be next to nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.options import DataParallelOptions
from instep.bench.steps import StepResults, require_room
from instep.bench.steps_rank import measure_steps
from instep.bench.thread_clock import ThreadTimes
from instep.bench.variants import DDP, DECLARED_THREADS, NONE, ONE, THREADS, WORKER_VARIANTS, Variant
from instep.bench.workloads import WORKLOADS, Workload
from instep.bench.worlds import on_ranks

MS = 1e3
SETTINGS = ("python", "matrices")
LABELS = {
    ONE: "one process",
    THREADS: "threads, split batch",
    DECLARED_THREADS: "threads, declared",
    NONE: "processes, nothing sent",
    DDP: "processes, torch's DDP",
    Variant("bucketed", "gloo"): "processes, gloo",
    Variant("bucketed", "shm"): "processes, shm",
}


@dataclass(frozen=True)
class WorkerResults(StepResults):
    """What a step gains by workers, and for what their threads waited.

        speed-up     (step of one process) / step, of the same round
        lock         share of the time of threads that compute in which they were blocked
        core         share in which they waited for a core: the machine had other things to do

    The last two where nothing is sent, since a thread that sends is blocked by that too.
    """

    def waited(self, name: str) -> tuple[list[float], list[float]]:
        """Shares of the time of all threads that computed: blocked, and without a core; by round."""
        rounds = zip(*(rank[name]["threads"] for rank in self.by_rank), strict=True)
        sums = [ThreadTimes(*map(sum, zip(*ranks, strict=True))) for ranks in rounds]
        return [x.blocked / x.computing for x in sums], [x.for_core / x.computing for x in sums]

    def worker_row(self, one: Variant, setting: str) -> dict[str, Any]:
        """All figures of one way to divide a step; times in ms."""
        steps, ratio = self.steps(one.name), self.against(ONE.name, one.name)
        blocked, queued = self.waited(one.name)
        shown = not one.backend
        return {
            "model": setting,
            "workers": LABELS[one],
            "step(ms)": statistics.median(steps) * MS,
            "q25(ms)": tables.quantile(steps, 0.25) * MS,
            "q75(ms)": tables.quantile(steps, 0.75) * MS,
            **tables.spread("speed-up", ratio),
            "lock(%)": 100 * statistics.median(blocked) if shown else None,
            "core(%)": 100 * statistics.median(queued) if shown else None,
        }


def run(options: DataParallelOptions) -> None:
    """Measure, print the table, write the files."""
    results = measure(options)
    tables.show(tables.short(results["rows"]), title_of(results), notes=notes(results))
    tables.write(options, results, results["rows"], lambda path: draw(results, path))


def measure(options: DataParallelOptions) -> dict[str, Any]:
    """A row per model and way to divide a step, with the steps that it is made of."""
    options.check()
    rows, samples = [], {}
    names = SETTINGS if options.setting == "both" else (options.setting,)
    for number, chosen in enumerate(WORKLOADS[name] for name in names):
        require_room(chosen, WORKER_VARIANTS, options.ranks)
        task = {
            "workload": asdict(chosen),
            "variants": [asdict(one) for one in WORKER_VARIANTS],
            "samples": options.samples,
        }
        part = number / len(names), (number + 1) / len(names)
        found = WorkerResults(on_ranks(measure_steps, task, ranks=options.ranks, part=part))
        there = [one for one in WORKER_VARIANTS if one.name in found.names]
        rows += [found.worker_row(one, chosen.what) for one in there]
        samples[chosen.name] = {name: [step * MS for step in found.steps(name)] for name in found.names}
    num = min(len(steps) for found in samples.values() for steps in found.values())
    return {"ranks": options.ranks, "samples": num, "rows": rows, "ms": samples}


def text_of(chosen: Workload) -> str:
    """The model and a worker's batch in words."""
    config = chosen.config
    return (
        f"{config.layers} layers of width {config.width}, {chosen.batch} x {chosen.tokens} tokens per worker"
    )


def title_of(results: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    return f"A step of {results['ranks']} micro-batches by one process, threads and processes"


def notes(results: Mapping[str, Any]) -> list[str]:
    """What has to be known to read the table."""
    models = "; ".join(f"{WORKLOADS[name].what}: GPT of {text_of(WORKLOADS[name])}" for name in results["ms"])
    return [
        f"{models}.",
        f"speed-up: over one process, which runs the {results['ranks']} micro-batches one after the other; "
        f"median and quartiles of {results['samples']} pairs. At most {results['ranks']}.",
        "lock: share of time in which computing threads were blocked, nearly always by Python's lock; core: "
        "in which they waited for a core.",
    ]


def draw(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Bars of the speed-up with their quartiles, a panel per model."""
    found = tables.environment()
    known = [WORKLOADS[name] for name in SETTINGS]
    panels = {one.what: f"{one.what}: {text_of(one)}" for one in known}
    parts = [
        {**row, "panel": panels[row["model"]]} for row in results["rows"] if row["workers"] != LABELS[ONE]
    ]
    return charts.bars(
        parts, path,
        title=f"What {results['ranks']} threads gain, and what {results['ranks']} processes",
        subtitle=f"steps per second over those of one process, on {found['cores']} cores ({found['cpu']}); "
        f"median and quartiles of {results['samples']} pairs",
        label="workers", value="speed-up", low="speed-up q25", high="speed-up q75", unit="x", group="panel",
        reference=1.0, reference_text="one process",
    )  # fmt: skip
