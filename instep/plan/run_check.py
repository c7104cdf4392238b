"""A run beside its plan: step time and memory as planned, as measured, and the error.

    own time    forward and backward, update, Python: as fast as in the run that calibrates the plan
    exchange    a latency and a time per byte, fitted to that run's buckets
    step        own time and exchange, simulated in the placement of the run that is checked
    memory      by formula, with a process that trains, and snapshots

A run that calibrates its own plan checks the simulation alone: how compute and exchange overlap. Another
run as ``base``, of another strategy, number of ranks or model, makes it a prediction.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from instep.comm.cost import AlphaBeta, busy_share, standard_errors
from instep.events import GRADIENT_SYNC, PARAMETER_GATHER, PARAMETER_UPDATE
from instep.models.config import GPTConfig
from instep.plan.cluster import Cluster, step_flops
from instep.plan.memory_estimate import Batch, Device, Placement, largest
from instep.plan.memory_table import GB, aligned
from instep.plan.model import gpt
from instep.plan.step_time import TimePlan, step, step_s, update_bytes
from instep.timeline.breakdown import COMPUTE, UPDATE, RankBreakdown
from instep.timeline.bucket_times import BucketRow
from instep.timeline.predict import OVERLAPPING, exposed_s, fit_buckets

RUN_MB = 335  # of a process of ``instep train`` whose model is next to nothing; measured, torch 2.13 for CPUs
MODELLED = (GRADIENT_SYNC, PARAMETER_UPDATE, PARAMETER_GATHER)
BETWEEN_STEPS = ("evaluate", "save")
RANKS = 1 << 20
CONFIDENT = 1.96  # standard errors on either side of 95 %
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 0.6745  # of normal figures, in quartile distances, times sqrt(n)


@dataclass(frozen=True)
class RunFigures:
    """What a run directory tells of a run that has ended."""

    plan: TimePlan | None  # None: a script's model is not known
    breakdowns: Sequence[RankBreakdown]
    buckets: Sequence[BucketRow]
    overlaps: bool
    memory_bytes: int | None  # of the rank that took most
    hosts: int = 1

    @property
    def step_s(self) -> float:
        """Of the mean step, on average over the ranks, without evaluations and checkpoints."""
        return fmean(
            row.wall_s - sum(row.hosts.get(name, 0.0) for name in BETWEEN_STEPS) for row in self.breakdowns
        )

    @property
    def sent(self) -> list[BucketRow]:
        """The buckets that took time: none on one rank."""
        return [row for row in self.buckets if row.flight_ms > 0]

    def waited_s(self, *causes: str) -> float:
        """Exposed communication of these causes."""
        return fmean(sum(row.causes.get(name, 0.0) for name in causes) for row in self.breakdowns)

    def busy(self, ranks: int) -> float:
        """Share of hidden communication by which compute gets longer, where ``ranks`` share this host."""
        slowdowns = [row.slowdown for row in self.breakdowns if row.slowdown is not None]
        if slowdowns and self.overlaps:
            return fmean(slowdowns) / (1 + fmean(slowdowns))
        return busy_share(ranks // self.hosts, 1, os.cpu_count() or 1)

    @property
    def simulated(self) -> bool:
        """Whether all that the ranks exchange is in buckets, whose cost is fitted: over one kind of link."""
        if self.plan is None:
            return False
        size, data_ranks = self.plan.parallel.world_size, self.plan.parallel.data_ranks
        return size == data_ranks and self.hosts in (1, size)


@dataclass(frozen=True)
class PlanCheck:
    """Seconds and bytes, planned and measured; None: not known."""

    planned_s: float
    measured_s: float
    planned_bytes: int | None
    measured_bytes: int | None

    def words(self) -> str:
        """One line."""
        text = f"step {self.planned_s * 1e3:,.1f} ms planned, {self.measured_s * 1e3:,.1f} ms measured"
        text += f" ({_error(self.planned_s, self.measured_s)})"
        if self.planned_bytes and self.measured_bytes:
            planned, measured = self.planned_bytes / 1e6, self.measured_bytes / 1e6
            text += f"; memory of a rank {planned:,.0f} MB planned, {measured:,.0f} MB measured"
            text += f" ({_error(planned, measured)})"
        return text


def _error(planned: float, measured: float) -> str:
    return f"{planned / measured - 1:+.1%}"


def run_figures(config: Mapping[str, Any], summary: Mapping[str, Any]) -> RunFigures | None:
    """From the tables of ``config.toml`` and ``summary.json``; None where no step was looked at.

    Raises:
        ValueError: the figures are not those of a run.
    """
    try:
        breakdowns = [RankBreakdown.from_json(row) for row in summary.get("breakdown") or ()]
        ranks = summary["memory"]["ranks"] if "memory" in summary else []
        on_gpu = any(row["gpu_peak"] for row in ranks)
        taken = [row["gpu_peak" if on_gpu else "resident_peak"] for row in ranks]
        buckets = [BucketRow(**row) for row in summary.get("buckets") or ()]
        plan = _plan(config, summary) if "model" in config else None
        if plan is not None and on_gpu:  # what torch has allocated: neither the context nor communicators
            plan = replace(plan, device=Device(context_mb=0, communicator_mb=0))
        overlaps = summary["strategy"] in OVERLAPPING
        hosts = len(summary.get("memory", {}).get("hosts", ())) or 1
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the summary is not that of a run: {error!r}") from None
    breakdowns = [row for row in breakdowns if row.steps]
    memory = max(taken) if taken and None not in taken else None
    return RunFigures(plan, breakdowns, buckets, overlaps, memory, hosts) if breakdowns else None


def _plan(config: Mapping[str, Any], summary: Mapping[str, Any]) -> TimePlan:
    """The plan of a run of ``instep train``, on hardware that is not known yet."""
    names = {item.name for item in fields(GPTConfig)}
    model = GPTConfig(**{name: value for name, value in config["model"].items() if name in names})
    where, batch, optim = summary["parallel"], config["batch"], config["optim"]
    known = {name: where[name] for name in ("shard", "tp", "ep", "pp", "bucket_mb")}
    known |= {"stage": where["shard_stage"], "schedule": where["schedule"] or "1f1b"}
    data_ranks = summary["world_size"] // (where["tp"] * where["ep"] * where["pp"])
    if known["stage"] and known["shard"] == 1:  # the stage divides among all data-parallel ranks
        known["shard"] = data_ranks
    known["dp"] = data_ranks // known["shard"]
    known["nodes"] = config["parallel"].get("nodes", "float32")
    known["sequence"] = bool(config["parallel"].get("sequence"))
    micro, whole = batch["micro_size"], batch["global_size"]
    each = micro * data_ranks
    moments = 2 if optim["name"] == "adamw" else int(optim.get("momentum", 0) > 0)
    return TimePlan(
        model=gpt(model),
        # Ranks that do not divide the batch: the one with most micro-batches decides.
        batch=Batch(global_size=-(-whole // each) * each, micro_size=micro),
        parallel=Placement(**known),
        device=Device(kind="cpu", context_mb=RUN_MB, snapshots=True),
        recipe="autocast" if config.get("autocast") == "bf16" else "float32",
        moments=moments,
        strategy=summary["strategy"],
    )


def check(run: RunFigures, base: RunFigures | None = None) -> PlanCheck:
    """The plan of ``run``, calibrated by ``base`` or by itself, beside what it measured.

    Raises:
        ValueError: one of the two is no run of ``instep train``, or ranks exchange more than buckets.
    """
    planned = None if run.plan is None else largest(run.plan).total
    measured = (run.step_s, planned, run.memory_bytes)
    if base is None and not run.simulated:
        return PlanCheck(run.step_s - run.waited_s(GRADIENT_SYNC) + _exchange_s(run), *measured)
    base = base or run
    if run.plan is None or not base.simulated:
        raise ValueError(
            "expected runs of instep train, and a base without tp, ep and pp, on one host or with one rank "
            "per host: the model of a script is not known, and only the cost of buckets is fitted"
        )
    plan, other_s = calibrated(run.plan, base)
    return PlanCheck(step_s(step(plan)) + other_s, *measured)


def _exchange_s(run: RunFigures) -> float:
    """What a run's step waits for its own buckets, by their fitted cost."""
    rows = run.sent
    if not rows:
        return run.waited_s(GRADIENT_SYNC)
    cost, ready = fit_buckets(rows), [max(row.ready_ms.values(), default=0.0) / 1e3 for row in rows]
    ready = ready if run.overlaps else [max(ready)] * len(ready)
    return exposed_s(ready, [cost.time_s(row.bytes) for row in rows], max(ready))


def fitted(run: RunFigures) -> Cluster:
    """The hardware of a run: compute and memory rates, and a link between any two of its ranks.

    Raises:
        ValueError: ranks exchanged more than buckets, or the model is a script's.
    """
    if run.plan is None or not run.simulated:
        raise ValueError(
            "expected a run of instep train without tp, ep and pp, on one host or with one rank per host"
        )
    return calibrated(run.plan, run)[0].cluster


def intervals(run: RunFigures) -> dict[str, tuple[float, float]]:
    """95 % confidence intervals of the figures of ``fitted``, by name, for which the run has enough data.

    Rates: from the quartiles over the steps, with the standard error of a normal sample's median. Link: from
    the residuals of the fit to its buckets.
    """
    cluster, found = fitted(run), {}
    for name, part in (("tflops", COMPUTE), ("memory_gb_per_s", UPDATE)):
        seen = [(row.losses[part], row.steps) for row in run.breakdowns if part in row.losses]
        if seen:
            relative = fmean((x.median_s - x.low_s) / max(x.median_s, 1e-12) for x, _ in seen)
            found[name] = CONFIDENT * MEDIAN_ERROR * relative / math.sqrt(sum(steps for _, steps in seen))
    rows = run.sent
    sizes, times_s = [row.bytes for row in rows], [row.flight_ms / 1e3 for row in rows]
    if len(set(sizes)) > 1 and len(rows) > 2:
        cost, error = fit_buckets(rows), standard_errors(sizes, times_s)
        if cost.latency_s and cost.s_per_byte:
            found["local_us"] = CONFIDENT * error.latency_s / cost.latency_s
            found["local_gb_per_s"] = CONFIDENT * error.s_per_byte / cost.s_per_byte
    found |= {name.replace("local", "remote"): width for name, width in found.items() if "local" in name}
    values = {name: getattr(cluster, name) for name in found}
    return {name: (values[name] / (1 + width), values[name] * (1 + width)) for name, width in found.items()}


def calibrated(plan: TimePlan, base: RunFigures) -> tuple[TimePlan, float]:
    """``plan`` on hardware as fast as that of ``base``, and the seconds per step that it does not simulate.

    The latter are Python and checks: a part per micro-batch of a rank, and a part per step.
    """
    assert base.plan is not None
    seen, rows = base.plan, base.breakdowns
    compute_s, update_s = (fmean(row.parts[part] for row in rows) for part in (COMPUTE, UPDATE))
    per_micro_batch_s = fmean(row.hosts.get("micro-batch", 0.0) for row in rows)
    other_s = base.step_s - compute_s - update_s - base.waited_s(*MODELLED) - per_micro_batch_s
    busy = base.busy(base.plan.parallel.world_size)
    if base.overlaps:  # what was hidden took time from compute
        compute_s -= busy * fmean(row.hidden_s for row in rows)
    recomputed = seen.model.checkpoint
    operations = step_flops(seen.model, seen.tokens * seen.micro_batches, recomputed=recomputed)
    link = _link(base)  # a run measures one kind of link: within a host, or between hosts
    link_us, gb_per_s = link.latency_s * 1e6, 1e-9 / max(link.s_per_byte, 1e-15)
    cluster = Cluster(
        tflops=operations / compute_s / 1e12,
        efficiency=1.0,
        memory_gb_per_s=update_bytes(seen, seen.model.num_parameters) / max(update_s, 1e-9) / GB,
        ranks_per_host=RANKS if base.hosts == 1 else 1,
        local_us=link_us,
        local_gb_per_s=gb_per_s,
        remote_us=link_us,
        remote_gb_per_s=gb_per_s,
        busy=base.busy(plan.parallel.world_size),
    )
    more_s = per_micro_batch_s * plan.micro_batches / seen.micro_batches
    return replace(plan, cluster=cluster), max(other_s, 0.0) + more_s


def _link(base: RunFigures) -> AlphaBeta:
    """A message between two ranks, from the cost of whole buckets; nothing on one rank."""
    rows = base.sent
    assert base.plan is not None
    size = base.plan.parallel.data_ranks
    if not rows or size == 1:
        return AlphaBeta(0.0, 0.0)
    cost = fit_buckets(rows)  # of 2 (W-1) + 1 messages and 2 (W-1)/W S bytes
    return AlphaBeta(cost.latency_s / (2 * size - 1), cost.s_per_byte * size / (2 * (size - 1)))


def table(checks: Mapping[Path, PlanCheck]) -> Iterator[str]:
    """A line per run, and the errors of all of them."""
    rows = [["run", "planned ms", "measured ms", "error", "planned MB", "measured MB", "error"]]
    for path, one in checks.items():
        cells = [f"{one.planned_s * 1e3:,.1f}", f"{one.measured_s * 1e3:,.1f}"]
        cells.append(_error(one.planned_s, one.measured_s))
        if one.planned_bytes and one.measured_bytes:
            cells += [f"{one.planned_bytes / 1e6:,.0f}", f"{one.measured_bytes / 1e6:,.0f}"]
            cells.append(_error(one.planned_bytes, one.measured_bytes))
        rows.append([str(path), *cells, *[""] * (6 - len(cells))])
    yield from aligned(rows, 1)
    if len(checks) > 1:
        errors = [abs(one.planned_s / one.measured_s - 1) for one in checks.values()]
        yield f"error of the step time: median {median(errors):.1%}, worst {max(errors):.1%}"
