"""A rank's part of ``instep bench buckets``: steps with every bucket size in turn.

The inputs of the alpha-beta model come from the same run: how long forward and backward take without any
exchange, and how long an all-reduce takes, of several sizes, over the same kind of group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed import ProcessGroup

from instep.bench.variants import SharedModel
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.events import Recorder
from instep.net.device import synchronize
from instep.net.host_group import group_class
from instep.net.process_group import Group
from instep.replicate.wrapper import DataParallel

WARM_UP = 2  # the first step learns the order of the gradients, the second sends by it for the first time
LINK_BUDGET_S = 15.0
LINK_SHARE = 0.2  # of the time
LINK_SIZES = (4_000, 64_000, 1_000_000, 8_000_000, 32_000_000)
TIMEOUT_S = 300.0
OF_A_CALL = ("agree", "exchange")
COPIES = 4  # of the weights: they, gradients in buckets, and what two of an exchange need


def measure_buckets(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps, calls and phases on this rank; ``task``: see ``buckets.measure``."""
    shared = SharedModel(world, Workload(**task["workload"]))
    pg = world.group(task["backend"])
    total = sum(p.nbytes for p in shared.module.parameters())
    sizes = [*(size for size in LINK_SIZES if size < total), total]
    link = _link(world, pg, sizes, task["samples"], ordered=task["ordered"])
    turns: dict[str, list[dict[str, float]]] = {str(size): [] for size in (0, *task["sizes"])}
    todo = [size for _ in range(task["rounds"]) for size in (0, *task["sizes"])]  # 0: without exchange
    for number, size in enumerate(todo):
        said = f"buckets of {size:g} MiB" if size else "without exchange"
        world.work.at(LINK_SHARE + (1 - LINK_SHARE) * number / len(todo), said)
        turns[str(size)] += _steps(shared, pg, size, task)
    return {"link": link, "turns": turns, "gradient_bytes": total}


def _steps(
    shared: SharedModel, pg: ProcessGroup, size: float, task: dict[str, Any]
) -> list[dict[str, float]]:
    """One turn of one bucket size: a wrapper, its warm-up, then this turn's share of the samples."""
    model = DataParallel(
        shared.module,
        process_group=pg,
        strategy="bucketed",
        bucket_cap_mb=size or 25,
        ordered=task["ordered"],
        init_sync=False,
    )
    samples = -(-task["samples"] // task["rounds"])
    found = []
    for number in range(WARM_UP + samples):
        with nullcontext() if size else model.no_sync():
            sample = _step(shared, model, number)
        if number >= WARM_UP:
            found.append(sample)
    model.close()
    model.zero_grad()
    return found


def _step(shared: SharedModel, model: DataParallel, number: int) -> dict[str, float]:
    model.zero_grad()
    model.recorder.step = number
    shared.world.barrier()
    start = time.perf_counter()
    loss = shared.loss(model, shared.batch)
    synchronize(shared.world.device)  # forward sends nothing: what backward has to wait for is as before
    middle = time.perf_counter()
    loss.backward()
    synchronize(shared.world.device)
    end = time.perf_counter()
    calls, busy_s = _calls(model.recorder, number)
    return {"forward": middle - start, "backward": end - middle, "calls": calls, "busy": busy_s}


def _calls(recorder: Recorder, step: int) -> tuple[int, float]:
    """How many exchanges a step made, and how long all of them took together."""
    events = [event for event in recorder.events if event.step == step and event.name in OF_A_CALL]
    return sum(event.name == "exchange" for event in events), sum(event.duration_s for event in events)


def _link(
    world: World, pg: ProcessGroup, sizes: Sequence[int], samples: int, *, ordered: bool
) -> dict[str, list[float]]:
    """Seconds of an all-reduce by its size in bytes, alternately."""
    group = group_class(pg)(pg, range(world.size), world.rank, TIMEOUT_S)
    reduce = {str(size): _all_reduce(group, size, world.device, ordered=ordered) for size in sizes}
    return world.interleave(reduce, samples, budget_s=LINK_BUDGET_S)[0]


def _all_reduce(group: Group, nbytes: int, device: torch.device, *, ordered: bool) -> Callable[[], object]:
    """An all-reduce of ``nbytes``: the backend's, or as ``reduce.exchange`` does it, with its own adds."""
    W = group.size
    x = torch.zeros(nbytes // 4 // W * W, device=device)
    if not ordered:
        return lambda: group.all_reduce(x, "the sweep")
    received, header, headers = torch.empty_like(x), torch.zeros(8), torch.zeros(8 * W)
    splits = [x.numel() // W] * W

    def all_reduce() -> None:
        group.all_gather(headers, header, "the sweep's headers")
        group.all_to_all(received, x, splits, splits, "the sweep")
        own, *others = received.chunk(W)
        for other in others:
            own.add_(other)
        group.all_gather(x, own, "the sweep")

    return all_reduce
