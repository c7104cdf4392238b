"""A rank's part of ``instep bench steps`` and ``scaling``: steps in turns, and each variant's memory alone.

A machine is not the same from minute to minute, so what is to be compared has to be measured at the same
time: in every round each variant makes one step, and what disturbs a round disturbs all variants. Another one
begins every two rounds, and every other round goes backwards, so that none always follows the same one.

    round 0   none   DDP    naive  flat     dropped: DDP and instep lay their buckets out anew
    round 1   flat   naive  DDP    none     dropped
    round 2   DDP    naive  flat   none     counts
    round 3   none   flat   naive  DDP      counts

A turn of a small model is several steps, and the mean of them counts, after one that is not timed: that one
meets caches which are the others', and threads that sleep, as no step does in a loop of its own.

Numbers of ranks take turns as variants do. Of four ranks the first two step while the others wait in the
barrier before the next turn, which costs no processor time.

For its memory each variant has a world of its own for three steps, in which buckets are laid out, used, and
laid out anew: those that take turns share a process, and the high-water mark of its resident memory is that
of all of them. The mark counts everything: torch itself, weights, activations, gradients, buckets. A page of
shared memory counts on every rank that has touched it, and once in what all ranks take together. One more
step is counted by what the memory is for. That is exact where resident memory is not, and as little as what
can be named: not torch itself, not what its allocator keeps, not the messages of a backend.

Modules that ranks import must not import matplotlib, which costs half a second and memory that would count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instep.bench.exchange_cost import measure_exchanges
from instep.bench.hosts import INTERFACE
from instep.bench.memory_usage import MemoryUsage, memory_usage
from instep.bench.saved_bytes import saved_beside
from instep.bench.thread_clock import ThreadClock, times_now
from instep.bench.variants import (
    NONE,
    IdleRank,
    Runner,
    ServerLoop,
    SharedModel,
    TrainingLoop,
    Unavailable,
    Variant,
)
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.events import Event
from instep.launch.process_memory import ResidentMemory, resident_memory, total_resident
from instep.net.device import peak_bytes, synchronize
from instep.plan.memory_estimate import for_gpt, largest
from instep.replicate.threads import ThreadedReplicas
from instep.timeline.intervals import total_ns, union

DROPPED = 2
EXCHANGES = 15  # of each size
NUM_STEPS = 3  # of a variant that is alone
MEGABYTE = 1e6
_KEYS = (
    *("step_s", "forward_s", "guard_s", "busy_s", "agree_s", "sent_bytes", "received_bytes"),
    "threads",
)
# Spans of the communication lane's name in which nothing is sent or received.
WAITING = ("queued", "wait", "aggregate")

# What a rank has measured of one variant, a list with one entry per round in each.
Measured = dict[str, list[Any]]
# What a rank needs for a variant that is alone.
Needed = Mapping[str, Any]


def measure_steps(world: World, task: dict[str, Any]) -> dict[str, Measured]:
    """All rounds on one rank: what it has measured, by variant; those that cannot run here are not in it.

    ``task``: "workload", "variants" (the fields of each), "samples".
    """
    shared = SharedModel(world, Workload(**task["workload"]))
    runners: dict[str, Runner] = {}
    for fields in task["variants"]:
        one = Variant(**fields)
        try:
            runners[one.name] = one.start(shared)
        except Unavailable as error:
            world.say(f"  without {one.name}: {error}")
    return take_turns(world, runners, task["samples"], shared.workload.steps)


def measure_link(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """What exchanges cost alone, and then all rounds of ``measure_steps``; ``task``: its."""
    total, pg = Workload(**task["workload"]).gradient_bytes, world.group("gloo")
    exchanges = measure_exchanges(world, pg, total, EXCHANGES)
    return {"exchanges": exchanges, "steps": measure_steps(world, task)}


def measure_scaling(world: World, task: dict[str, Any]) -> dict[str, Measured]:
    """All rounds on one rank: what it has measured, by arm; of those that it has no part in, nearly nothing.

    ``task``: "workload", "samples", and "arms", by name, each with its number of "ranks", its "batch" per
    rank and its "variant" (the fields). Arms that differ in their batch alone share a model and an optimizer.
    """
    whole = SharedModel(world, Workload(**task["workload"]))
    loops: dict[tuple[str, int], TrainingLoop] = {}
    runners: dict[str, Runner] = {}
    for name, arm in task["arms"].items():
        one, size = Variant(**arm["variant"]), arm["ranks"]
        if world.rank >= size:
            runners[name] = IdleRank()
            continue
        shared = whole.first(size)
        if (one.name, size) not in loops:
            loop = one.start(shared)
            assert isinstance(loop, TrainingLoop)
            loops[one.name, size] = loop
        loop = loops[one.name, size]
        runners[name] = TrainingLoop(shared, loop.model, shared.batch[: arm["batch"]], loop.optimizer)
    return take_turns(world, runners, task["samples"])


def take_turns(
    world: World, runners: Mapping[str, Runner], samples: int, steps: int = 1
) -> dict[str, Measured]:
    """A turn of each of ``runners`` in every round; what this rank has measured of a step, by their names."""
    measured: dict[str, Measured] = {name: {key: [] for key in _KEYS} for name in runners}
    for number in world.rounds(samples, DROPPED):
        for name in order(list(runners), number):
            found = _turn(world, runners[name], steps)
            if number >= DROPPED:
                for key, value in found.items():
                    measured[name][key].append(value)
    return measured


def order(names: Sequence[str], number: int) -> list[str]:
    """The order in which variants step in round ``number``."""
    shift = number // 2 % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 else turned


def _turn(world: World, runner: Runner, steps: int) -> dict[str, Any]:
    """What a step takes, of ``steps`` one after the other."""
    clock = runner.recorder if isinstance(runner.recorder, ThreadClock) else None
    world.barrier()
    if steps > 1:
        runner.step()
        if clock is not None:
            clock.take()
    before = traffic()
    mine = times_now()
    began, began_ns = time.perf_counter(), time.monotonic_ns()
    for _ in range(steps):
        runner.step()
    synchronize(world.device)
    step_s = (time.perf_counter() - began) / steps
    times = times_now().since(mine) if clock is None else clock.take()
    world.barrier()  # another rank of this host may still be sending
    after = traffic()
    recorded = [] if runner.recorder is None else runner.recorder.events
    events = [event for event in recorded if event.start_ns >= began_ns]
    return {
        "step_s": step_s,
        "forward_s": runner.forward_s,
        "guard_s": runner.guard_s,
        "busy_s": busy_s(events) / steps,
        "agree_s": [event.duration_s / steps for event in events if event.name == "agree"],
        "sent_bytes": (after[0] - before[0]) / steps,
        "received_bytes": (after[1] - before[1]) / steps,
        "threads": times,
    }


def busy_s(events: Sequence[Event]) -> float:
    """How long the communication lane was at work: the union of its spans, in seconds."""
    lane = (event for event in events if event.lane == "communication" and event.name not in WAITING)
    return total_ns(union((event.start_ns, event.end_ns) for event in lane)) / 1e9


def traffic(table: Path = Path("/proc/self/net/dev"), interface: str = INTERFACE) -> tuple[int, int]:
    """Bytes that have left and entered this host through its link; zeros without one."""
    for line in table.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8]), int(numbers.split()[0])
    return 0, 0


def measure_memory(world: World, task: dict[str, Any]) -> Needed | None:
    """ "held", "activations", "resident" and "on_gpu" of one rank, in bytes, after some steps of a variant.

    ``task``: "workload", "variant" (the fields of each). None if it cannot run here.
    """
    shared = SharedModel(world, Workload(**task["workload"]))
    try:
        runner = Variant(**task["variant"]).start(shared)
    except Unavailable:
        return None
    for _ in range(NUM_STEPS):
        runner.step()
    world.barrier()
    now, on_gpu = resident_memory(), peak_bytes(world.device)
    world.barrier()  # what is counted from here on takes memory of its own
    counted = count(runner)
    return {
        "held": None if counted is None else asdict(counted),
        "activations": _activations(shared, runner, Variant(**task["variant"])),
        "resident": None if now is None else asdict(now),
        "on_gpu": on_gpu,
    }


def count(runner: Runner) -> MemoryUsage | None:
    """What is held in one more step, gradients among it. Collective."""
    found: list[MemoryUsage] = []
    if isinstance(runner, ServerLoop):
        runner.step()
        return memory_usage(runner.server.module, runner.server.optimizer, runner.server.model)
    if not isinstance(runner, TrainingLoop):
        runner.step()
        return None
    hook = runner.optimizer.register_step_post_hook(lambda *_: found.append(_held(runner)))
    runner.step()
    hook.remove()
    return found[0]


def memory_columns(
    needed: Sequence[Needed], workload: Workload, one: Variant = NONE
) -> dict[str, float | None]:
    """The figures of a table, in MB: of the rank that needs most, but for what all ranks take together.

    Of ranks with a GPU the peak is that of its memory.
    ``needed`` is what every rank has measured of ``one``, and beside it stands what the formula says of it.
    """
    counts = [MemoryUsage(**each["held"]) for each in needed if each["held"]]
    kept = [each["activations"] for each in needed if each["activations"] is not None]
    peaks = [each["on_gpu"] for each in needed if each.get("on_gpu") is not None]
    processes = [ResidentMemory(**each["resident"]) for each in needed if each["resident"]]
    place: dict[str, Any] = {"stage": one.stage, "shard": len(needed)} if one.stage else {}
    said = largest(for_gpt(workload.config, workload.batch, moments=workload.num_moments, **place))
    purposes = {
        f"{purpose}(MB)": max((asdict(each)[purpose] for each in counts), default=None)
        for purpose in asdict(MemoryUsage())
    }
    found = {
        **purposes,
        "formula(MB)": said.state,
        "state(MB)": max((each.state for each in counts), default=None),
        "gathered(MB)": said.of("gathered"),
        "activations(MB)": max(kept, default=None),
        "peak(MB)": max(peaks or (each.peak for each in processes), default=None),
        "host(MB)": total_resident(processes) if processes else None,
    }
    return {name: None if nbytes is None else nbytes / MEGABYTE for name, nbytes in found.items()}


def _held(runner: TrainingLoop) -> MemoryUsage:
    of_threads = isinstance(runner.model, ThreadedReplicas)  # keeps nothing from step to step
    found = memory_usage(runner.model, runner.optimizer, None if of_threads else runner.model)
    if isinstance(runner.model, nn.parallel.DistributedDataParallel):
        # torch does not show its buckets; gradients are views of them, or copies.
        buckets = (
            0 if runner.model.gradient_as_bucket_view else sum(p.nbytes for p in runner.model.parameters())
        )
        found = replace(found, scratch=found.scratch + buckets)
    return found


def _activations(shared: SharedModel, runner: Runner, one: Variant) -> int | None:
    """Of one forward of the bare module: what wraps it keeps none."""
    batch: Tensor | None = getattr(runner, "batch", shared.batch if isinstance(runner, ServerLoop) else None)
    if batch is None:
        return None
    module = shared.copy(checkpoint=one.checkpoint)
    saved = saved_beside(module, [batch])
    devices = {x.device for x in module.parameters() if x.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), saved.watch():
        shared.loss(module, batch, autocast=one.autocast)
    return saved.peak
