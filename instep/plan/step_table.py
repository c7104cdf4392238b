"""A predicted step as text and as JSON: its time, where it goes on each kind of rank, and how it scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from instep.plan.memory_estimate import largest
from instep.plan.memory_table import GB, aligned, verdict
from instep.plan.step_time import TimePlan, step, step_s, tokens_per_s, utilisation, with_ranks
from instep.timeline.advice import BucketPlan
from instep.timeline.breakdown import Parts, parts
from instep.timeline.predict import CAPS_MB

MOST_ROWS = 16  # of a table of ranks
COLUMNS = ("compute", "exposed communication", "waiting for a slower rank", "pipeline bubble", "update")


@dataclass(frozen=True, kw_only=True)
class ScalePlan(TimePlan):
    """A step on several numbers of ranks."""

    ranks: tuple[int, ...] = (1, 8, 64, 512, 4096)
    """World sizes to compare; dp grows, or shard where there is no dp."""
    weak: bool = False
    """Whether the global batch grows with the ranks."""

    def check(self) -> None:
        """Every number of ranks has to fit the other axes."""
        super().check()
        if not self.ranks:
            raise ValueError("ranks: expected one number or more, got none")
        for count in self.ranks:
            one = with_ranks(self, count, weak=self.weak)
            one.batch.accumulation(one.parallel)


@dataclass(frozen=True, kw_only=True)
class BucketsPlan(TimePlan):
    """A step with each strategy and bucket size."""

    def check(self) -> None:
        """Ranks have to exchange buckets."""
        super().check()
        if self.parallel.stage > 1 or self.parallel.pp > 1 or self.parallel.data_ranks == 1:
            raise ValueError("no buckets to choose: pass --parallel.dp 2 or more, stage 0 or 1, pp 1")

    def plans(self) -> Iterator[BucketPlan]:
        """Caps up to the first one that holds all gradients."""
        once: list[tuple[Any, int]] = [("naive", 0), ("flat", 0), ("overlap", 0)]
        for strategy, cap_mb in once + [("bucketed", cap) for cap in CAPS_MB]:
            cut = replace(self.parallel, bucket_mb=cap_mb or self.parallel.bucket_mb)
            timeline = step(replace(self, strategy=strategy, parallel=cut))
            exposed_s = max(row.exposed_s for rank in timeline.ranks if (row := parts(timeline.of(rank, 0))))
            count = sum(event.name == "exchange" for event in timeline.of(0, 0))
            yield BucketPlan(strategy, cap_mb, count, exposed_s, step_s(timeline))
            if strategy == "bucketed" and count == 1:
                return


def figures(plan: TimePlan) -> dict[str, Any]:
    """The step in numbers, and its parts on each kind of rank."""
    timeline = step(plan)
    seconds, memory = step_s(timeline), largest(plan)
    rows = [parts(timeline.of(rank, 0)) for rank in timeline.ranks]
    return {
        "ranks": plan.parallel.world_size,
        "step_s": seconds,
        "tokens_per_s": tokens_per_s(plan, seconds),
        "model_flops_utilisation": utilisation(plan, seconds),
        "memory_bytes": memory.total,
        "fits": memory.total <= plan.device.memory_gb * GB,
        "parts": [row for row in rows if row is not None],
    }


def text(plan: TimePlan) -> Iterator[str]:
    """All lines that ``instep plan step`` or ``instep plan scale`` prints."""
    if isinstance(plan, ScalePlan | BucketsPlan):
        yield from scale_text(plan) if isinstance(plan, ScalePlan) else bucket_text(list(plan.plans()))
        return
    found, cluster = figures(plan), plan.cluster
    ranks, windows = found["ranks"], plan.micro_batches * plan.batch.micro_size * plan.parallel.data_ranks
    took = f"{found['step_s']:.3f} s" if found["step_s"] >= 1 else f"{found['step_s'] * 1e3:.2f} ms"
    yield f"step of {ranks:,} ranks: {took}, for {windows:,} windows of {plan.model.context:,} tokens"
    yield (
        f"{found['tokens_per_s']:,.0f} tokens/s, {found['tokens_per_s'] / ranks:,.0f} per rank; model FLOPs "
        f"utilisation {found['model_flops_utilisation']:.1%} of {cluster.tflops:g} TFLOP/s"
    )
    yield (
        f"assumed: products reach {cluster.efficiency:.0%} of the peak; a message takes {cluster.local_us:g} "
        f"us + bytes / {cluster.local_gb_per_s:g} GB/s in a host of {cluster.ranks_per_host}, "
        f"{cluster.remote_us:g} us + bytes / {cluster.remote_gb_per_s:g} GB/s between hosts"
    )
    yield from parts_text(found["parts"])
    yield f"memory: {largest(plan).total / GB:,.2f} GB, {verdict(plan, largest(plan))}"


def parts_text(rows: Sequence[Parts]) -> Iterator[str]:
    """Milliseconds of each part of the step, by kind of rank."""
    table = [["rank", *(f"{name}" for name in COLUMNS), "step ms", "hidden communication"]]
    for row in rows[:MOST_ROWS]:
        cells = [row.totals()[name] for name in COLUMNS]
        table.append([f"{row.rank}", *(f"{1e3 * cell:,.2f}" for cell in (*cells, row.wall, row.hidden))])
    yield from aligned(table, 1)
    if len(rows) > MOST_ROWS:
        yield f"  and {len(rows) - MOST_ROWS} more kinds of rank"


def bucket_text(plans: Sequence[BucketPlan], measured: BucketPlan | None = None) -> Iterator[str]:
    """A line per plan; the shortest step is marked, of equal ones the last."""
    table = [["strategy", "MB", "buckets", "exposed ms", "step ms", ""]]
    best = min(reversed(plans), key=lambda one: one.step_s)
    for one in plans:
        cells = [f"{one.cap_mb:.3g}" if one.cap_mb else "", f"{one.num_buckets:,}"]
        cells += [f"{1e3 * seconds:,.2f}" for seconds in (one.exposed_s, one.step_s)]
        marks = ["this run"] * (one is measured) + ["best"] * (one is best)
        table.append([one.strategy, *cells, ", ".join(marks)])
    yield from aligned(table, 1)


def scale_text(plan: ScalePlan) -> Iterator[str]:
    """A line per number of ranks; efficiency beside the first one."""
    kind = "work per rank" if plan.weak else "work per step"
    yield f"the same {kind}; efficiency: tokens per second and rank, over those of {plan.ranks[0]:,} ranks"
    head = "ranks", "dp", "shard", "accumulation", "step ms", "tokens/s", "efficiency", "MFU", "GB", "fits"
    table = [[*head]]
    for row in scale(plan):
        cells = [f"{row[name]:,}" for name in ("ranks", "dp", "shard", "accumulation")]
        cells += [f"{1e3 * row['step_s']:,.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['efficiency']:.1%}"]
        cells += [f"{row['model_flops_utilisation']:.1%}", f"{row['memory_bytes'] / GB:,.2f}"]
        table.append([*cells, "yes" if row["fits"] else "no"])
    yield from aligned(table, 0)


def scale(plan: ScalePlan) -> list[dict[str, Any]]:
    """The figures of every number of ranks."""
    rows = []
    for count in plan.ranks:
        one = with_ranks(plan, count, weak=plan.weak)
        row = {**figures(one), "dp": one.parallel.dp, "shard": one.parallel.shard}
        rows.append({**row, "accumulation": one.micro_batches})
    each = rows[0]["tokens_per_s"] / rows[0]["ranks"]
    return [{**row, "efficiency": row["tokens_per_s"] / row["ranks"] / each} for row in rows]


def as_json(plan: TimePlan) -> dict[str, Any]:
    """The same numbers."""
    if isinstance(plan, BucketsPlan):
        return {"plan": asdict(plan), "buckets": [one._asdict() for one in plan.plans()]}
    rows = scale(plan) if isinstance(plan, ScalePlan) else [figures(plan)]
    for row in rows:
        row["parts"] = [asdict(part) for part in row["parts"]]
    return {"plan": asdict(plan), "steps": rows}
