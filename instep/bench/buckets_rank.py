"""A rank's part of ``instep bench buckets``: steps with every bucket size in turn.

The inputs of the model come from the same run: how long forward and backward take without any exchange, and
what exchanges of several sizes cost alone.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

from torch.distributed import ProcessGroup

from instep.bench.exchange_cost import measure_exchanges
from instep.bench.variants import SharedModel
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.net.device import synchronize
from instep.replicate.wrapper import DataParallel

WARM_UP = 2  # the first step learns the order of the gradients, the second sends by it for the first time
EXCHANGES_SHARE = 0.2  # of the time
OF_A_CALL = ("agree", "exchange")
COPIES = 4  # of the weights: they, gradients in buckets, and what two of an exchange need


def measure_buckets(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps, calls and phases on this rank; ``task``: see ``buckets.measure``."""
    workload = Workload(**task["workload"])
    shared, pg, total = SharedModel(world, workload), world.group(task["backend"]), workload.gradient_bytes
    exchanges = measure_exchanges(world, pg, total, task["samples"], ordered=task["ordered"])
    turns: dict[str, list[dict[str, Any]]] = {str(size): [] for size in (0, *task["sizes"])}
    todo = [size for _ in range(task["rounds"]) for size in (0, *task["sizes"])]  # 0: without exchange
    for number, size in enumerate(todo):
        said = f"buckets of {size:g} MiB" if size else "without exchange"
        world.work.at(EXCHANGES_SHARE + (1 - EXCHANGES_SHARE) * number / len(todo), said)
        turns[str(size)] += _steps(shared, pg, size, task)
    return {"exchanges": exchanges, "turns": turns, "gradient_bytes": total}


def _steps(shared: SharedModel, pg: ProcessGroup, size: float, task: dict[str, Any]) -> list[dict[str, Any]]:
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
            sample = _step(shared, model)
        if number >= WARM_UP:
            found.append(sample)
    model.close()
    model.zero_grad()
    return found


def _step(shared: SharedModel, model: DataParallel) -> dict[str, Any]:
    model.zero_grad()
    shared.world.barrier()
    start, start_ns = time.perf_counter(), time.monotonic_ns()
    loss = shared.loss(model, shared.batch)
    synchronize(shared.world.device)  # forward sends nothing: what backward has to wait for is as before
    middle = time.perf_counter()
    loss.backward()
    synchronize(shared.world.device)
    end = time.perf_counter()
    events = [event for event in model.recorder.events if event.start_ns >= start_ns]
    return {
        "forward": middle - start,
        "backward": end - middle,
        "sizes": [event.bytes for event in events if event.name == "exchange"],
        "busy": sum(event.duration_s for event in events if event.name in OF_A_CALL),
    }
