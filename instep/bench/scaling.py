"""``instep bench scaling``: throughput against the number of ranks, beside the ideal.

    strong   the work of a step stays the same, and each of W ranks does 1/W of it: ideally a step takes 1/W
    weak     the work of a rank stays the same, and a step has W times as much: ideally it takes as long

In both the ideal is W times the throughput of one rank, which is the plain loop, without any wrapper:

    efficiency = throughput of W ranks / (W x throughput of one)

What is missing has two causes, told apart by ``none``, as many ranks at once that send nothing. It loses what
the machine lacks (cores, memory bandwidth) and what does not get smaller with a batch (the optimizer's step,
the beginning of each product of matrices). Only what a strategy loses beyond that is for its exchange.

All numbers of ranks take turns in one run, as the variants of ``instep bench steps`` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.charts import Measure
from instep.bench.hosts import rate_text
from instep.bench.options import ScalingOptions, split_words
from instep.bench.steps import MS, PANELS, WEIGHTS_AND_GRADIENTS, StepResults
from instep.bench.steps_rank import measure_scaling
from instep.bench.tables import quantile
from instep.bench.variants import NONE, Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import on_ranks, over_link, require_memory
from instep.shm.segment import available

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "unordered", "DDP")
ONE_RANK = "one rank"
HIDDEN = ("low", "high")  # in files and in the chart only


@dataclass(frozen=True)
class Arm:
    """What the first ``ranks`` ranks do in their turn: a step of ``batch`` windows each."""

    ranks: int
    batch: int
    variant: Variant

    @property
    def name(self) -> str:
        return f"{self.variant.name} {self.ranks} x {self.batch}"


@dataclass(frozen=True)
class ScalingPlan:
    """What is compared: on each number of ranks, in each kind of work, nothing sent and every strategy."""

    workload: Workload
    ranks: tuple[int, ...]
    works: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def least(self) -> int:
        """The number of ranks that the others are held against."""
        return self.ranks[0]

    def arm(self, work: str, one: Variant, ranks: int) -> Arm:
        """One rank exchanges nothing, whatever the strategy."""
        batch = self.workload.batch if work == "weak" else self.workload.batch * self.least // ranks
        return Arm(ranks, batch, NONE if ranks == 1 else one)

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """All of them, by name, each once: work that is strong and weak at the same time is done once."""
        found = [
            self.arm(work, one, ranks)
            for ranks in self.ranks
            for work in self.works
            for one in (NONE, *self.variants)
        ]
        return {one.name: one for one in found}

    @property
    def copies(self) -> int:
        """How many times the bytes of the weights rank 0 has, which is in all arms."""
        loops = {(one.variant, one.ranks) for one in self.arms.values()}
        moments = self.workload.num_moments * len(loops)
        return WEIGHTS_AND_GRADIENTS + moments + sum(one.copies(ranks) for one, ranks in loops)


def run(options: ScalingOptions) -> None:
    """Measure as ``options`` say: a table on stdout, progress on stderr, files where they were asked for."""
    results = measure(options)
    tables.show(tables.short(results["rows"], HIDDEN), title_of(results), notes=notes(results))
    tables.write(options, results, results["rows"], lambda path: draw(results, path))


def measure(options: ScalingOptions) -> dict[str, Any]:
    """A row per kind of work, number of ranks and strategy; and every step of each, in ms."""
    options.check()
    backend = _backend(options)
    plan = plan_of(options, backend)
    require_memory(
        plan.workload.rank_bytes(plan.copies),
        ranks=max(plan.ranks),
        backend=backend,
        fix="pass fewer --strategies, or a smaller --preset, --params or --batch",
    )
    task = {
        "workload": asdict(plan.workload),
        "arms": {name: asdict(one) for name, one in plan.arms.items()},
        "samples": options.samples,
    }
    if options.link:
        by_rank = over_link(measure_scaling, task, hosts=max(plan.ranks), rate=options.rate)
    else:
        by_rank = on_ranks(measure_scaling, task, ranks=max(plan.ranks), backend=backend)
    steps = StepResults(by_rank)
    return {
        **task,
        "ranks": plan.ranks,
        "backend": backend,
        "link": options.rate if options.link else None,
        "cores": None if backend == "nccl" else tables.environment()["cores"],
        "rows": rows_of(plan, steps),
        "ms": {name: [MS * step for step in steps.steps(name)] for name in plan.arms},
    }


def plan_of(options: ScalingOptions, backend: str) -> ScalingPlan:
    """What ``options`` ask for.

    Raises:
        ValueError: an unknown strategy.
    """
    words = split_words(options.strategies)
    for word in words:
        if word not in STRATEGIES:
            raise ValueError(f"strategy {word!r}: expected one of {', '.join(STRATEGIES)}")
    works = ("strong", "weak") if options.work == "both" else (options.work,)
    variants = tuple(Variant(word, backend) for word in words)
    return ScalingPlan(options.workload("scaling"), tuple(sorted(set(options.ranks))), works, variants)


def _backend(options: ScalingOptions) -> str:
    """That of training, if nothing is said."""
    return options.backend or ("shm" if available() and not options.link else "gloo")


def rows_of(plan: ScalingPlan, results: StepResults) -> list[dict[str, Any]]:
    """Rates from the median step, and what they are of the least ranks', round by round."""
    rows = []
    for work in plan.works:
        for ranks in plan.ranks:
            for one in (NONE, *plan.variants)[: 1 if ranks == 1 else None]:
                arm, base = plan.arm(work, one, ranks), plan.arm(work, one, plan.least)
                label = ONE_RANK if ranks == 1 else one.label
                rows.append(
                    {"work": work, "ranks": ranks, "strategy": label, **_figures(arm, base, plan, results)}
                )
    return rows


def _figures(arm: Arm, base: Arm, plan: ScalingPlan, results: StepResults) -> dict[str, float | None]:
    steps = results.steps(arm.name)
    low, middle, high = (quantile(steps, share) for share in (0.25, 0.5, 0.75))
    tokens = arm.ranks * arm.batch * plan.workload.tokens
    more = arm.ranks * arm.batch / (base.ranks * base.batch)
    faster = results.against(base.name, arm.name)
    ideal = arm.ranks / base.ranks
    return {
        "batch": arm.batch,
        "step(ms)": MS * middle,
        "q25(ms)": MS * low,
        "q75(ms)": MS * high,
        "steps/s": 1 / middle,
        "tokens/s": tokens / middle,
        "low": tokens / high,
        "high": tokens / low,
        "speed-up": more * faster.median,
        "ideal": ideal,
        **tables.spread("efficiency", faster, "(%)", 100 * more / ideal),
    }


def title_of(results: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    return f"Scaling, {_place(results)}; {_model(results)}"


def _model(results: Mapping[str, Any]) -> str:
    chosen = Workload(**results["workload"])
    return f"{chosen.model_text}, {chosen.optimizer}, windows of {chosen.tokens} tokens"


def _place(results: Mapping[str, Any]) -> str:
    counts = ", ".join(map(str, results["ranks"]))
    if results["link"]:
        return f"{counts} hosts with {rate_text(results['link'])} between them"
    return f"{counts} ranks {PANELS[results['backend']]}"


def notes(results: Mapping[str, Any]) -> list[str]:
    """What has to be known to read the table."""
    least = results["ranks"][0]
    first = "one rank, in the plain loop" if least == 1 else f"{least} ranks"
    lines = [
        "strong: the work of a step stays the same; weak: that of each rank; batch: windows per rank.",
        f"efficiency: of W times the throughput of {first}; the median over {_num_samples(results)} rounds, "
        "and quartiles.",
        "none: as many ranks at once that send nothing; DDP: torch's, over the same backend.",
    ]
    return lines + crowded(results)


def crowded(results: Mapping[str, Any]) -> list[str]:
    """What the numbers of ranks beyond the cores cannot show; nothing, if there are none."""
    cores, least = results["cores"], results["ranks"][0]
    lines = []
    for ranks in results["ranks"]:
        if cores is not None and ranks > max(cores, least):
            most = 100 * max(cores, least) / ranks
            lines.append(
                f"{ranks} ranks on {cores} cores: ranks outnumber cores, so at most {most:.0f} % is "
                "possible, and the row shows how ranks share cores, not how the exchange scales."
            )
    return lines


def _num_samples(results: Mapping[str, Any]) -> int:
    return len(next(iter(results["ms"].values())))


def draw(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Throughput over the number of ranks, measured and ideal, a panel per kind of work."""
    rows = results["rows"]
    names = list(dict.fromkeys(row["strategy"] for row in rows if row["strategy"] != ONE_RANK))
    lines = [
        {**row, "strategy": name} for name in names for row in rows if row["strategy"] in (name, ONE_RANK)
    ]
    for work in dict.fromkeys(row["work"] for row in rows):
        mine = sorted((row["ranks"], row["tokens/s"]) for row in rows if row["work"] == work)
        (least, start), most = mine[0], mine[-1][0]
        lines += [
            {"work": work, "strategy": "ideal", "ranks": ranks, "tokens/s": start * ranks / least}
            for ranks in (least, most)
        ]
    cores = results["cores"]
    is_crowded = cores is not None and cores < max(results["ranks"])
    crowd = f"; beyond {cores} there are more ranks than cores" * is_crowded
    return charts.lines(
        lines,
        path,
        measures=[Measure("tokens/s", "tokens/s", None, "low", "high")],
        series="strategy",
        x="ranks",
        title="Throughput against the number of ranks",
        subtitle=f"{_model(results)}; {_place(results)}, on "
        f"{tables.machine(results['backend'])}; median of {_num_samples(results)} steps, band: quartiles; "
        f"none: nothing sent{crowd}",
        panel="work",
        panels={"strong": "strong: the same work in every step", "weak": "weak: the same work on every rank"},
    )
