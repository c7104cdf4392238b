"""The placements of a model on a number of ranks that fit, from fast to slow, and why each is slower.

Every placement gets the step time of ``instep.plan.step_time``, in less time: without a pipeline the parts of
a step grow evenly with its micro-batches, so two and three of them are simulated; a pipeline's schedule takes
its closed form (``instep.pipeline.closed_forms``) with the largest stage.

Failures: J. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, and
J. Young, "A first order approximation to the optimum checkpoint interval", 1974: sqrt(2 C M) seconds between
checkpoints that take C, where a failure comes every M seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from instep.pipeline.closed_forms import cost_s
from instep.plan.cluster import all_reduce_s
from instep.plan.memory_estimate import RECIPES, Placement, largest, of_rank
from instep.plan.memory_table import GB, aligned
from instep.plan.model import block, embedding, head
from instep.plan.step_time import (
    TimePlan,
    compute_s,
    sent_on_s,
    shared_s,
    step,
    tokens_per_s,
    update_s,
    utilisation,
)
from instep.timeline.breakdown import BUBBLE, COMPUTE, EXPOSED, UPDATE, parts

MICRO_SIZES = (1, 2, 4, 8)
MOST_STAGES = 64
DAY = 86_400
YEAR = 365 * DAY


@dataclass(frozen=True, kw_only=True)
class SearchPlan(TimePlan):
    """A model, a cluster and a global batch; tp, pp, stages, micro-batches and recomputation are searched."""

    ranks: int = 8
    """Ranks of the cluster."""
    rows: int = 10
    """Placements to print."""
    tokens_to_train: float = 0
    """Tokens of the whole training, for its days and cost; 0: unknown."""
    price: float = 0
    """Price of one rank for an hour."""
    rank_mtbf_years: float = 0
    """Mean time between failures of one rank, in years, for the goodput; 0: no failures."""
    checkpoint_s: float = 60
    """Seconds in which training stands still for a checkpoint."""
    restart_s: float = 300
    """Seconds from a failure to the first new step."""

    def check(self) -> None:
        """As of a step, and a global batch is needed."""
        super().check()
        if self.ranks < 1 or self.rows < 1:
            raise ValueError(f"ranks, rows: expected 1 or more, got {self.ranks} and {self.rows}")
        if not self.batch.global_size:
            raise ValueError("batch.global_size: expected the windows of a step, got 0: pass 512, say")
        for name in ("tokens_to_train", "price", "rank_mtbf_years", "checkpoint_s", "restart_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")


class Candidate(NamedTuple):
    """A placement: bytes of its largest rank and, if that fits, the parts of its step."""

    plan: TimePlan
    num_bytes: int
    parts_s: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())


def candidates(plan: SearchPlan) -> Iterator[TimePlan]:
    """All placements that divide the ranks, the model and the batch."""
    ranks, model, batch, cluster = plan.ranks, plan.model, plan.batch, plan.cluster
    same = {name: getattr(plan, name) for name in ("device", "recipe", "moments", "cluster", "strategy")}
    for tp in _divisors(ranks, cluster.ranks_per_host):
        if model.d_ff % tp or (model.heads and (model.heads % tp or (model.kv_heads or tp) % tp)):
            continue
        for pp, micro in product(_divisors(ranks // tp, min(model.layers, MOST_STAGES)), MICRO_SIZES):
            data = ranks // tp // pp
            if batch.global_size % (micro * data):
                continue
            count = batch.global_size // (micro * data)
            for place, again in product(_placements(plan, tp, pp, data, count), (False, True)):
                shape, windows = replace(model, checkpoint=again), replace(batch, micro_size=micro)
                yield TimePlan(model=shape, batch=windows, parallel=place, **same)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _placements(plan: SearchPlan, tp: int, pp: int, data: int, count: int) -> Iterator[Placement]:
    """The ways in which ``data`` ranks share the state, and the schedules of a pipeline."""
    plain = replace(plan.parallel, ep=1, shard=1, stage=0, chunks=0, cuts=())
    common = replace(plain, tp=tp, pp=pp, sequence=tp > 1, dp=data)
    if pp > 1:
        ways = [replace(common, schedule="1f1b")]
        if plan.model.layers % (2 * pp) == 0 and count % pp == 0:
            ways.append(replace(common, schedule="interleaved", chunks=2))
    else:
        ways = [common]
    for way in ways:
        yield way
        if data > 1:
            yield replace(way, dp=1, shard=data, stage=1)
            if pp == 1:
                near = max(plan.cluster.ranks_per_host // tp, 1)
                for shard in {data, near if data % near == 0 and near > 1 else data}:
                    yield replace(way, dp=data // shard, shard=shard, stage=3)


def search(plan: SearchPlan) -> list[Candidate]:
    """All placements: those that fit, fastest first, then the others, smallest first."""
    found = []
    for one in candidates(plan):
        size = largest(one).total
        fits = size <= one.device.memory_gb * GB
        found.append(Candidate(one, size, step_parts(one) if fits else {}))
    return sorted(found, key=lambda one: (not one.parts_s, one.step_s or one.num_bytes))


def step_parts(plan: TimePlan) -> dict[str, float]:
    """Seconds of the parts of a step."""
    if plan.parallel.pp > 1:
        return _pipeline_parts(plan)
    count = plan.micro_batches
    few = [_simulated(plan, n) for n in (2, 3)] if count > 3 else [_simulated(plan, count)] * 2
    return {name: few[0][name] + (count - 2) * (few[1][name] - few[0][name]) for name in few[0]}


def _simulated(plan: TimePlan, count: int) -> dict[str, float]:
    whole = count * plan.batch.micro_size * plan.parallel.data_ranks
    found = parts(step(replace(plan, batch=replace(plan.batch, global_size=whole))).of(0, 0))
    assert found is not None
    return {name: found.totals()[name] for name in (COMPUTE, EXPOSED, BUBBLE, UPDATE)}


def _pipeline_parts(plan: TimePlan) -> dict[str, float]:
    """The closed form is of equal stages: each micro-batch waits for what the largest has beyond the mean."""
    parallel, cluster, model, recipe = plan.parallel, plan.cluster, plan.model, RECIPES[plan.recipe]
    chunks, count = parallel.chunks or 1, plan.micro_batches
    forward_s, output_s = compute_s(plan)
    each_s, again = forward_s + sum(shared_s(plan)), int(model.checkpoint)
    blocks, most = model.layers / parallel.pp, chunks * -(-model.layers // (parallel.pp * chunks))
    own_s, waits_s = blocks * forward_s + output_s / parallel.pp, blocks * sum(shared_s(plan))
    beyond_s = (most - blocks) * ((3 + again) * each_s) + 3 * output_s * (1 - 1 / parallel.pp)
    whole_s = count * beyond_s + cost_s(
        parallel.schedule, parallel.pp, count, chunks,
        forward_s=own_s + waits_s, input_gradient_s=own_s + waits_s + again * blocks * each_s,
        weight_gradient_s=own_s, message_s=sent_on_s(plan),
    )  # fmt: skip
    held = of_rank([*block(model) * most, *max(embedding(model), head(model), key=len)], parallel)
    group = cluster.group(parallel, "dp", "shard")
    sync_s = all_reduce_s(cluster, group, held * recipe.gradient)
    own_s, waits_s = count * (3 * own_s + again * blocks * forward_s), count * (2 + again) * waits_s
    bubble_s = whole_s - own_s - waits_s
    return {COMPUTE: own_s, EXPOSED: waits_s + sync_s, BUBBLE: bubble_s, UPDATE: update_s(plan, held)}


def checkpoint_every_s(plan: SearchPlan) -> float:
    """Seconds between two checkpoints that lose least time."""
    return math.sqrt(2 * plan.checkpoint_s * plan.rank_mtbf_years * YEAR / plan.ranks)


def goodput(plan: SearchPlan, step_s: float, *, in_memory: bool) -> float:
    """Share of the time in new steps; ``in_memory``: survivors have the state, half a step is lost."""
    if not plan.rank_mtbf_years:
        return 1.0
    mtbf_s = plan.rank_mtbf_years * YEAR / plan.ranks
    every_s = checkpoint_every_s(plan)
    lost_s = plan.restart_s + (step_s if in_memory else every_s) / 2
    return max((1 - lost_s / mtbf_s) * (1 if in_memory else every_s / (every_s + plan.checkpoint_s)), 0.0)


def text(plan: SearchPlan) -> Iterator[str]:
    """All lines that ``instep plan search`` prints.

    Raises:
        ValueError: no placement fits, with the smallest.
    """
    found = search(plan)
    fitting = [one for one in found if one.parts_s]
    if not fitting:
        raise ValueError(_none_fits(plan, found))
    best = fitting[0]
    yield f"{len(found)} placements on {plan.ranks:,} ranks, {len(fitting)} fit {plan.device.memory_gb:g} GB"
    head = "dp", "shard", "stage", "tp", "pp", "schedule", "micro", "accumulation", "recompute"
    table = [[*head, "step s", "MFU", "GB", "slower by", "because of more"]]
    for one in fitting[: plan.rows]:
        place = one.plan.parallel
        cells = [f"{getattr(place, name)}" for name in head[:5]] + [place.schedule if place.pp > 1 else ""]
        cells += [f"{one.plan.batch.micro_size}", f"{one.plan.micro_batches}"]
        cells += ["yes" if one.plan.model.checkpoint else "no", f"{one.step_s:.3f}"]
        cells += [f"{utilisation(one.plan, one.step_s):.1%}", f"{one.num_bytes / GB:.1f}"]
        table.append([*cells, f"{one.step_s / best.step_s - 1:.1%}", _cause(one, best)])
    yield from aligned(table, 0)
    too_large = [one for one in found if not one.parts_s]
    if too_large:
        yield f"{len(too_large)} do not fit; the smallest of them takes {too_large[0].num_bytes / GB:.1f} GB"
    yield from _training_text(plan, best)


def _none_fits(plan: SearchPlan, found: list[Candidate]) -> str:
    if not found:
        return (
            f"no placement divides {plan.ranks} ranks and a global batch of {plan.batch.global_size}: pass a "
            f"--batch.global-size that is a multiple of {plan.ranks}, or more ranks for the model's layers"
        )
    least = found[0]
    place, size = least.plan.parallel, least.num_bytes / GB
    return (
        f"none of {len(found)} placements fits {plan.device.memory_gb:g} GB: the smallest, tp={place.tp} "
        f"pp={place.pp} stage={place.stage}, takes {size:.1f} GB: pass more --ranks, or a --device.memory-gb "
        f"of {math.ceil(size)}"
    )


def _cause(one: Candidate, best: Candidate) -> str:
    """The part that makes ``one`` slower than ``best``."""
    more = {name: one.parts_s[name] - best.parts_s[name] for name in one.parts_s}
    name = max(more, key=more.__getitem__)
    recomputed = name == COMPUTE and one.plan.model.checkpoint > best.plan.model.checkpoint
    return "" if one is best else "recomputation" if recomputed else name


def _training_text(plan: SearchPlan, best: Candidate) -> Iterator[str]:
    """Days and cost of the whole training, and what failures take of it."""
    share = goodput(plan, best.step_s, in_memory=False)
    if plan.tokens_to_train:
        seconds = plan.tokens_to_train / tokens_per_s(best.plan, best.step_s) / max(share, 1e-9)
        cost = f", {seconds / 3600 * plan.ranks * plan.price:,.0f} at {plan.price:g} per rank and hour"
        yield f"{plan.tokens_to_train:.3g} tokens: {seconds / DAY:,.1f} days{cost if plan.price else ''}"
    if plan.rank_mtbf_years:
        from_memory = goodput(plan, best.step_s, in_memory=True)
        hours, minutes = plan.rank_mtbf_years * YEAR / plan.ranks / 3600, checkpoint_every_s(plan) / 60
        words = f"checkpoint every {minutes:.0f} minutes; goodput {share:.1%}"
        yield f"a failure every {hours:.1f} hours: {words}, with recovery from memory {from_memory:.1%}"


def as_json(plan: SearchPlan) -> dict[str, Any]:
    """All placements that fit, and how many do not."""
    found = search(plan)
    rows = [{"plan": asdict(one.plan), "bytes": one.num_bytes, "step_s": one.step_s, "parts_s": one.parts_s}
            for one in found if one.parts_s]  # fmt: skip
    return {"placements": rows, "too_large": len(found) - len(rows)}
