"""A step before it is run: a discrete-event simulation of every kind of rank, as a ``Timeline``.

Ranks that do the same at the same time are simulated once, so the number of ranks costs nothing: along the
data axes there is one kind of rank, and a second one if a rank is slower; along ``pp`` each stage is one.

    compute        |forward|backward|forward|backward    |update|
    communication  |gather 0|gather 1|...   |b0|wait |b1|         a collective begins when the last rank is
    host                                             |sync|       ready and the one before it has ended

Compute and messages each have a lane, first in, first out. Strategies differ in when buckets leave (naive,
flat: after backward) and in what they hold; stages 2 and 3 scatter each unit's gradients in every
micro-batch, stage 3 gathers each unit before its forward and its backward, one ahead. A slow rank takes
``slow_by`` times as long to compute. What the model leaves out: Python, data loading, and links that
collectives of several axes share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Literal

from instep.events import (
    EXPERT_DISPATCH,
    GRADIENT_SYNC,
    PARAMETER_GATHER,
    PARAMETER_UPDATE,
    PIPELINE,
    STEP,
    TENSOR_PARALLEL,
    Event,
    Timeline,
)
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, simulate
from instep.plan.cluster import (
    Cluster,
    all_gather_s,
    all_reduce_s,
    block_flops,
    message_s,
    output_flops,
    reduce_scatter_s,
    step_flops,
)
from instep.plan.memory_estimate import MIB, RECIPES, MemoryPlan, of_rank, stage_sizes
from instep.plan.model import Weights, block, embedding, head
from instep.timeline.bubbles import QUEUED, UPDATE, WAIT
from instep.timeline.predict import OVERLAPPING, pack

NS = 1e9
NODE_SHARE = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25}  # of the bytes of a bucket that travel


@dataclass(frozen=True, kw_only=True)
class TimePlan(MemoryPlan):
    """All that the time of a step depends on."""

    cluster: Cluster = field(default_factory=Cluster)
    strategy: Literal["naive", "flat", "overlap", "bucketed", "server"] = "bucketed"
    """When and in which pieces gradients are reduced, in stages 0 and 1."""
    slow_by: float = 1.0
    """How many times as long one rank takes to compute."""
    expert_load: float = 1.0
    """Tokens of the fullest expert, over the mean."""

    def check(self) -> None:
        """As of memory, and of the cluster."""
        super().check()
        self.cluster.check()
        if self.slow_by < 1 or self.expert_load < 1:
            raise ValueError(
                f"expected slow_by and expert_load of 1 or more, got {self.slow_by} and {self.expert_load}"
            )

    @property
    def micro_batches(self) -> int:
        """Of each rank."""
        return self.batch.accumulation(self.parallel)

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.micro_batches * self.parallel.data_ranks


def step(plan: TimePlan) -> Timeline:
    """The timeline of one step of each kind of rank, by the global rank of the first one of its kind."""
    return _pipeline_step(plan) if plan.parallel.pp > 1 else _DataStep(plan).run()


def step_s(timeline: Timeline) -> float:
    """Seconds of the step."""
    return max(event.duration_s for event in timeline.events if event.name == STEP)


def tokens_per_s(plan: TimePlan, seconds: float) -> float:
    """Of all ranks, if a step takes ``seconds``."""
    return plan.tokens_per_step / seconds


def utilisation(plan: TimePlan, seconds: float) -> float:
    """Model FLOPs utilisation: operations of forward and backward, over what the peak would do."""
    operations = step_flops(plan.model, plan.tokens_per_step)
    return operations / (seconds * plan.parallel.world_size * plan.cluster.tflops * 1e12)


def shared_s(plan: TimePlan) -> tuple[float, float]:
    """Seconds that one block's forward waits for the ranks along tp, and for those along ep."""
    parallel, cluster, recipe = plan.parallel, plan.cluster, RECIPES[plan.recipe]
    size = plan.tokens * plan.model.width * recipe.compute
    tp_s = ep_s = 0.0
    if parallel.tp > 1:  # after attention and after the feed-forward part
        tp_s = (1 + (plan.model.heads > 0)) * all_reduce_s(cluster, cluster.group(parallel, "tp"), size)
    if parallel.ep > 1:  # results to the rank of their token, then sums to all
        group, spread = cluster.group(parallel, "ep"), plan.model.top_k * size / parallel.ep
        ep_s = reduce_scatter_s(cluster, group, spread) + all_gather_s(cluster, group, size)
    return tp_s, ep_s


def sent_on_s(plan: TimePlan) -> float:
    """Seconds in which a rank sends a micro-batch to the next stage; of a sequence in slices, its own."""
    size = plan.tokens * plan.model.width * RECIPES[plan.recipe].compute
    slices = plan.parallel.tp if plan.parallel.sequence else 1
    return message_s(plan.cluster, plan.cluster.group(plan.parallel, "pp"), size / slices)


def compute_s(plan: TimePlan) -> tuple[float, float]:
    """Seconds of the forward of a block, and of the output layer."""
    rate = plan.cluster.flops_per_s * plan.parallel.tp
    operations = block_flops(plan.model, plan.tokens, expert_load=plan.expert_load)
    if plan.model.experts:
        rows = plan.tokens * plan.model.top_k * plan.expert_load / plan.model.experts
        experts = sum(2 * rows * one.size for one in block(plan.model) if one.cut == "ep")
        operations += experts / plan.parallel.ep * plan.parallel.tp - experts
    return operations / rate, output_flops(plan.model, plan.tokens) / rate


def update_s(plan: TimePlan, size: int) -> float:
    """Seconds in which the optimizer steps ``size`` parameters of a rank."""
    return update_bytes(plan, size) / (plan.cluster.memory_gb_per_s * 1e9)


def update_bytes(plan: TimePlan, size: int) -> float:
    """Bytes through memory: the gradient is read, weights and moments are read and written."""
    recipe, parallel = RECIPES[plan.recipe], plan.parallel
    moved = recipe.gradient + 2 * ((recipe.master or recipe.weight) + plan.moments * recipe.moment)
    return moved * size / (parallel.shard if parallel.stage else 1)


def _pieces(plan: TimePlan, lines: Sequence[Weights]) -> list[int]:
    """Bytes of the gradient of each parameter of a rank, in the order of backward."""
    item, found = RECIPES[plan.recipe].gradient, []
    for line in reversed(lines):
        parts = (4 if plan.model.norm == "layer" else 2) if line.name == "norms" else 1
        found += [of_rank([line], plan.parallel) * item // parts] * parts
    return found


class _DataStep:
    """One step without a pipeline. Kind 0 is the usual rank, kind 1 the slow one if there is one."""

    def __init__(self, plan: TimePlan) -> None:
        self.plan, parallel, cluster = plan, plan.parallel, plan.cluster
        self.slow = [1.0, plan.slow_by] if plan.slow_by > 1 and parallel.data_ranks > 1 else [plan.slow_by]
        self.ranks = [0, parallel.tp * parallel.ep][: len(self.slow)]
        self.now = [0.0] * len(self.slow)
        self.net = 0.0  # when the lane of messages is free
        self.events: list[Event] = []
        model = plan.model
        self.units = [embedding(model), *[block(model)] * model.layers, head(model)]
        forward_s, output_s = compute_s(plan)
        self.forward_s = [0.0, *[forward_s] * model.layers, output_s]
        self.waits_s = shared_s(plan)
        self.shard = cluster.group(parallel, "shard")
        self.replicas = cluster.group(parallel, "dp")
        self.all = cluster.group(parallel, "dp", "shard")
        self.overlaps = plan.strategy in OVERLAPPING
        # By unit: the buckets that its backward completes, as (share of it that is done, bytes, number).
        self.buckets: dict[int, list[tuple[float, int, int]]] = {unit: [] for unit in range(len(self.units))}
        if parallel.stage < 2 and self.all.size > 1:
            pieces = []
            for unit in reversed(self.buckets):
                own = _pieces(plan, self.units[unit])
                shares = [done / max(sum(own), 1) for done in accumulate(own)]
                pieces += [(size, unit, share) for size, share in zip(own, shares, strict=True)]
            for number, (last, size) in enumerate(_buckets([piece[0] for piece in pieces], plan)):
                _, unit, share = pieces[last]
                self.buckets[unit].append((share, size, number))

    def put(self, kind: int, lane: str, name: str, start: float, end: float, **more: int) -> None:
        if end > start or name in (STEP, QUEUED):
            span = round(start * NS), round(end * NS)
            self.events.append(Event(self.ranks[kind], lane, name, *span, step=0, **more))

    def collective(
        self, name: str, ready: Sequence[float], seconds: float, num_bytes: int, bucket: int
    ) -> float:
        """All ranks take part once the last one is ready; when it has ended."""
        begin = max(self.net, *ready)
        last = max(range(len(ready)), key=lambda kind: ready[kind])
        for kind, its in enumerate(ready):
            if kind != last:
                wait = max(its, self.net), max(ready)
                self.put(kind, "communication", WAIT, *wait, bucket=bucket, peer=self.ranks[last])
            more = {"bytes": num_bytes, "bucket": bucket}
            if name == "exchange":
                self.put(kind, "communication", QUEUED, its, max(its, self.net), **more)
            self.put(kind, "communication", name, begin, begin + seconds, **more)
        self.net = begin + seconds
        return self.net

    def unit_bytes(self, unit: int, item: int) -> int:
        return of_rank(self.units[unit], self.plan.parallel) * item

    def gather_s(self, unit: int) -> tuple[float, int]:
        recipe = RECIPES[self.plan.recipe]
        size = self.unit_bytes(unit, recipe.compute if recipe.compute_copy else recipe.weight)
        return all_gather_s(self.plan.cluster, self.shard, size), size

    def compute(self, name: str, order: Sequence[int], times: float, leaf: int) -> None:
        """Forward or backward of a micro-batch."""
        gathers = self.plan.parallel.stage == 3 and self.plan.parallel.shard > 1
        begun = list(self.now)
        there = self.collective(PARAMETER_GATHER, self.now, *self.gather_s(order[0]), -1) if gathers else 0.0
        for place, unit in enumerate(order):
            starts = [max(now, there) for now in self.now]
            for kind, start in enumerate(starts):
                self.put(kind, "host", PARAMETER_GATHER, self.now[kind], start)
            if gathers and place + 1 < len(order):
                there = self.collective(PARAMETER_GATHER, starts, *self.gather_s(order[place + 1]), -1)
            sends = name == "backward" and leaf == self.plan.micro_batches - 1 and self.overlaps
            self.now, before = list(starts), 0.0
            for done, size, number in [*(self.buckets[unit] if sends else ()), (1.0, 0, -1)]:
                alone_s = (done - before) * times * self.forward_s[unit]
                before = done
                for kind, at in enumerate(self.now):
                    self.now[kind] = at + self.stretched(alone_s * self.slow[kind], self.net - at)
                if number >= 0:
                    self.collective("exchange", self.now, self.cost_s(size), size, number)
            for kind, at in enumerate(self.now):
                for cause, seconds in zip((TENSOR_PARALLEL, EXPERT_DISPATCH), self.waits_s, strict=True):
                    if 0 < unit < len(self.units) - 1:
                        seconds *= times if name == "forward" else max(times - 1, 1)
                        self.put(kind, "host", cause, at, at + seconds)
                        at += seconds
                self.now[kind] = at
            if name == "backward" and self.plan.parallel.stage >= 2 and self.plan.parallel.shard > 1:
                self.scatter(unit)
        for kind, now in enumerate(self.now):
            self.put(kind, "compute", name, begun[kind], now, leaf=leaf)

    def stretched(self, alone_s: float, sent_s: float) -> float:
        """Seconds for ``alone_s`` of compute, while messages are sent in the first ``sent_s``."""
        busy = self.plan.cluster.busy
        longest = alone_s / (1 - busy) if busy < 1 else math.inf
        return min(alone_s + busy * max(sent_s, 0.0), longest)

    def scatter(self, unit: int) -> None:
        """A unit's gradients go to their owners, in every micro-batch."""
        size = self.unit_bytes(unit, RECIPES[self.plan.recipe].gradient)
        seconds = reduce_scatter_s(self.plan.cluster, self.shard, size)
        self.collective("exchange", self.now, seconds, size, unit)

    def run(self) -> Timeline:
        plan, parallel = self.plan, self.plan.parallel
        forwards = list(range(len(self.units)))
        for leaf in range(plan.micro_batches):
            self.compute("forward", forwards, 1.0, leaf)
            self.compute("backward", forwards[::-1], 3.0 if plan.model.checkpoint else 2.0, leaf)
        backward = list(self.now)
        whole = sum(of_rank(unit, parallel) for unit in self.units)
        if not self.overlaps:
            for _, size, number in chain.from_iterable(reversed(self.buckets.values())):
                self.collective("exchange", backward, self.cost_s(size), size, number)
        if parallel.stage >= 2 and parallel.dp > 1:
            size = whole * RECIPES[plan.recipe].gradient // parallel.shard
            self.collective("exchange", backward, all_reduce_s(plan.cluster, self.replicas, size), size, 0)
        for kind, now in enumerate(backward):
            end = max(now, self.net)
            self.put(kind, "host", GRADIENT_SYNC, now, end)
            self.now[kind] = end + update_s(plan, whole)
            self.put(kind, "compute", UPDATE, end, self.now[kind])
        if parallel.stage in (1, 2) and parallel.shard > 1:
            self.spread(whole)
        for kind in range(len(self.now)):
            self.put(kind, "host", STEP, 0.0, max(self.now))
        return Timeline(self.events)

    def spread(self, whole: int) -> None:
        """The owners' new weights go to all: in stage 1 after the update, in 2 before the next forward."""
        size, before = whole * RECIPES[self.plan.recipe].weight, list(self.now)
        end = self.collective(
            PARAMETER_GATHER, before, all_gather_s(self.plan.cluster, self.shard, size), size, -1
        )
        for kind, now in enumerate(before):
            self.put(kind, "host", PARAMETER_UPDATE, now, end)
            self.now[kind] = end

    def cost_s(self, num_bytes: float) -> float:
        """Seconds of one bucket; a server receives all gradients and sends all weights over its own link."""
        num_bytes *= NODE_SHARE[self.plan.parallel.nodes]
        if self.plan.strategy != "server":
            return all_reduce_s(self.plan.cluster, self.all, num_bytes)
        return 2 * (self.all.size - 1) * message_s(self.plan.cluster, self.all, num_bytes)


def _buckets(pieces: Sequence[int], plan: TimePlan) -> Iterator[tuple[int, int]]:
    """(the last piece, bytes) of every bucket, in the order of backward."""
    if plan.strategy in ("naive", "overlap"):
        yield from enumerate(pieces)
        return
    cap = plan.parallel.bucket_mb * MIB if plan.strategy == "bucketed" else float("inf")
    last, sent = -1, 0
    for size in pack(pieces, cap):
        sent += size
        while last + 1 < len(pieces) and sum(pieces[: last + 1]) < sent:
            last += 1
        yield last, size


def _pipeline_step(plan: TimePlan) -> Timeline:
    """One step of a pipeline's ranks; each then reduces its gradients with those of other pipelines."""
    parallel, cluster, model = plan.parallel, plan.cluster, plan.model
    schedule = generate(parallel.schedule, parallel.pp, plan.micro_batches, parallel.chunks or None)
    sizes = stage_sizes(model.layers, parallel.cuts, schedule.num_stages)
    forward_s, output_s = compute_s(plan)
    waits_s = sum(shared_s(plan))
    slow = [plan.slow_by if rank == 0 else 1.0 for rank in schedule.stage_ranks]
    each = [blocks * forward_s * by + blocks * waits_s for blocks, by in zip(sizes, slow, strict=True)]
    each[-1] += output_s * slow[-1]
    again = [blocks * (forward_s + waits_s) * model.checkpoint for blocks in sizes]
    sent_s = sent_on_s(plan)
    times = StageTimes(each, [a + b for a, b in zip(each, again, strict=True)], each, sent_s)
    simulated = simulate(schedule, times)
    free = dict.fromkeys(range(parallel.pp), 0)
    for event in simulated.events:
        if event.lane == "compute":
            free[event.rank] = max(free[event.rank], event.end_ns)
    events = [
        e
        for e in simulated.events
        if e.name != STEP and not (e.name == PIPELINE and e.start_ns >= free[e.rank])
    ]
    ends = {}
    for rank, now in free.items():
        own = [stage for stage, place in enumerate(schedule.stage_ranks) if place == rank]
        lines = [*block(model) * sum(sizes[stage] for stage in own)]
        lines += [
            *(embedding(model) if 0 in own else []),
            *(head(model) if schedule.num_stages - 1 in own else []),
        ]
        whole = of_rank(lines, parallel)
        sync = all_reduce_s(
            cluster, cluster.group(parallel, "dp", "shard"), whole * RECIPES[plan.recipe].gradient
        )
        synced = now + round(sync * NS)
        ends[rank] = synced + round(update_s(plan, whole) * NS)
        if synced > now:
            events.append(Event(rank, "communication", "exchange", now, synced, step=0, bucket=0))
            events.append(Event(rank, "host", GRADIENT_SYNC, now, synced, step=0))
        events.append(Event(rank, "compute", UPDATE, synced, ends[rank], step=0))
    last = max(ends, key=ends.__getitem__)
    for rank, end in ends.items():
        if end < ends[last]:
            events.append(Event(rank, "host", PIPELINE, end, ends[last], step=0, peer=last))
        events.append(Event(rank, "host", STEP, 0, ends[last], step=0))
    stride = parallel.world_size // parallel.pp
    return Timeline(replace_rank(event, stride) for event in events)


def replace_rank(event: Event, stride: int) -> Event:
    """``event`` of the first rank of a stage, by its global rank."""
    return event._replace(
        rank=event.rank * stride, peer=event.peer * stride if event.peer > 0 else event.peer
    )


def with_ranks(plan: TimePlan, ranks: int, *, weak: bool) -> TimePlan:
    """The plan on ``ranks`` ranks: with the same global batch or, ``weak``, the same work per rank.

    Raises:
        ValueError: the other axes do not divide ``ranks``.
    """
    parallel = plan.parallel
    rest = parallel.tp * parallel.ep * parallel.pp
    own = rest * (parallel.shard if parallel.dp > 1 or parallel.shard == 1 else 1)
    if ranks % own or ranks < 1:
        raise ValueError(
            f"ranks: expected a positive multiple of {own}, the ranks of the other axes, got {ranks}"
        )
    grown = "dp" if own != rest or parallel.shard == 1 else "shard"
    count = ranks // own
    changed = replace(parallel, dp=count) if grown == "dp" else replace(parallel, shard=count)
    batch = plan.batch
    if weak and batch.global_size:
        batch = replace(batch, global_size=batch.global_size // parallel.data_ranks * changed.data_ranks)
    return replace(plan, parallel=changed, batch=batch)
