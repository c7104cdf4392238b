"""``instep bench buckets``: step time against bucket size, and the best size by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.buckets_rank import COPIES, WARM_UP, measure_buckets
from instep.bench.charts import Measure
from instep.bench.exchange_cost import ExchangeCost, medians
from instep.bench.hosts import rate_text
from instep.bench.options import BucketsOptions
from instep.bench.workloads import Workload
from instep.bench.worlds import on_ranks, over_link, require_memory, slowest_rank
from instep.comm.cost import best_bucket

MIB = 1 << 20
HIDDEN = ("low(ms)", "high(ms)")  # in files and in the chart only


def run(options: BucketsOptions) -> None:
    """Measure as ``options`` say: a table on stdout, progress on stderr, files where they were asked for."""
    results = measure(options)
    tables.show(tables.short(results["rows"], HIDDEN), title_of(results), notes=results["notes"])
    tables.write(options, results, results["rows"], lambda path: draw(results, path))


def measure(options: BucketsOptions) -> dict[str, Any]:
    """A row per bucket size, and the model: its link, its inputs, its choice."""
    options.check()
    chosen = options.workload("link" if options.link else "buckets")
    require_memory(
        chosen.rank_bytes(COPIES),
        ranks=options.ranks,
        backend=options.backend,
        fix="pass a smaller --preset, --params or --batch",
    )
    task = {
        "workload": asdict(chosen),
        "sizes": options.sizes,
        "ordered": options.ordered,
        "backend": options.backend,
        "samples": options.samples,
        "rounds": options.rounds,
    }
    if options.link:
        by_rank = over_link(measure_buckets, task, hosts=options.ranks, rate=options.rate)
    else:
        by_rank = on_ranks(measure_buckets, task, ranks=options.ranks, backend=options.backend)
    results = {
        **task,
        "ranks": options.ranks,
        "link": options.rate if options.link else None,
        "warm_up": WARM_UP,
        **summarise(by_rank, options.sizes, on_gpu=options.backend == "nccl"),
    }
    return {**results, "notes": notes(results)}


def summarise(
    by_rank: Sequence[Mapping[str, Any]], sizes: Sequence[float], *, on_gpu: bool = False
) -> dict[str, Any]:
    """The rows and the model, of what every rank has measured."""

    def slowest(size: float, *phases: str) -> list[float]:
        return slowest_rank(
            [[sum(s[p] for p in phases) for s in rank["turns"][str(size)]] for rank in by_rank]
        )

    def median(samples: Sequence[float]) -> float:
        return tables.quantiles(samples).median

    forward_s, backward_s = median(slowest(0, "forward")), median(slowest(0, "backward"))
    exchanges = [rank["exchanges"] for rank in by_rank]
    cost = ExchangeCost.of(exchanges, on_gpu=on_gpu)
    total = by_rank[0]["gradient_bytes"]
    rows = []
    for size in sizes:
        steps = [1e3 * s for s in slowest(size, "forward", "backward")]
        of_steps = tables.quantiles(steps)
        buckets = by_rank[0]["turns"][str(size)][0]["sizes"]
        model_s = cost.step_s("bucketed", buckets, forward_s, backward_s)
        rows.append(
            {
                "bucket(MiB)": size,
                "calls": len(buckets),
                "call(ms)": 1e3 * median(slowest(size, "busy")) / len(buckets),
                "step(ms)": of_steps.median,
                "min(ms)": of_steps.min,
                "p99(ms)": of_steps.p99,
                "low(ms)": tables.quantile(steps, 0.25),
                "high(ms)": tables.quantile(steps, 0.75),
                "exposed(ms)": of_steps.median - 1e3 * (forward_s + backward_s),
                "model(ms)": 1e3 * model_s,
                "error(%)": 100 * (1e3 * model_s / of_steps.median - 1),
            }
        )
    best = min(rows, key=lambda row: row["step(ms)"])
    chosen = min(rows, key=lambda row: row["model(ms)"])
    return {
        "gradient_bytes": total,
        "forward_ms": 1e3 * forward_s,
        "backward_ms": 1e3 * backward_s,
        "cost": asdict(cost),
        "exchanges": cost.words(medians(exchanges, 0)),
        "best_measured_mib": best["bucket(MiB)"],
        "best_of_these_by_model_mib": chosen["bucket(MiB)"],
        "regret": chosen["step(ms)"] / best["step(ms)"] - 1,
        "best_predicted_mib": best_bucket(total, backward_s, cost.flight) / MIB,
        "rows": rows,
    }


def title_of(results: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    return f"Bucket size, {place_of(results)}; {Workload(**results['workload']).text}"


def place_of(results: Mapping[str, Any]) -> str:
    """Where the ranks were, and what they talked through."""
    if results["link"]:
        return f"{results['ranks']} hosts with {rate_text(results['link'])} between them"
    return f"{results['ranks']} ranks, {results['backend']}"


def notes(results: Mapping[str, Any]) -> list[str]:
    """What has to be known to read the table."""
    total_ms = 1e3 * results["cost"]["flight"]["s_per_byte"] * results["gradient_bytes"]
    bound = "communication-bound" if total_ms > results["backward_ms"] else "compute-bound"
    way = "in the fixed order" if results["ordered"] else "by the backend's all-reduce"
    return [
        f"step: forward, backward and exchange, the slowest rank's; median of {results['samples']} after "
        f"{results['warm_up']} of warm-up, sizes in turns.",
        f"call: one bucket's exchange on the lane, {way}, including waits for the other ranks.",
        f"without exchange: forward {results['forward_ms']:.0f} ms, backward {results['backward_ms']:.0f} "
        "ms.",
        f"{results['exchanges']}.",
        f"by beta {total_ms:.0f} ms for all {results['gradient_bytes'] / 1e6:.0f} MB of gradients: {bound}.",
        f"best measured: {results['best_measured_mib']:g} MiB; best of these by the model: "
        f"{results['best_of_these_by_model_mib']:g} MiB, whose step takes {results['regret']:.1%} longer; of "
        f"any, by the closed form: {results['best_predicted_mib']:.3g} MiB.",
    ]


def draw(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Step time over bucket size, measured and by the model."""
    rows = [{**row, "of": "bucketed"} for row in results["rows"]]
    rows += [{**row, "of": "model", "step(ms)": row["model(ms)"]} for row in results["rows"]]
    return charts.lines(
        rows,
        path,
        measures=[Measure("step(ms)", "step time, ms", None, "low(ms)", "high(ms)")],
        series="of",
        x="bucket(MiB)",
        x_label="bucket size, MiB",
        x_text=lambda size: f"{size:g}",
        title="Step time against bucket size",
        subtitle=f"{Workload(**results['workload']).text}; {place_of(results)}, on "
        f"{tables.machine(results['backend'])}; median of {results['samples']} steps, band: quartiles; "
        "model: alpha-beta, fitted in the same run. Best measured: "
        f"{results['best_measured_mib']:g} MiB; by the model: {results['best_of_these_by_model_mib']:g} MiB",
    )
