"""A rank's part of ``instep bench collectives``: every size by every implementation in turn, with its check.

    gloo, shm, nccl     a torch.distributed backend, through torch's functions
    shm-in-place        the same on memory that all ranks have mapped, so that nothing is copied in or out
    naive, ring, ...    the algorithms of ``instep.comm``, on gloo's point-to-point messages

An ``Implementation`` works on ``CollectiveBuffers``: filled with numbers whose sums are exact, and compared
with what must come out. Element i of rank r's message is (i mod 7) + 8 r, so that every sum is a small
integer, which float32 holds exactly in any order of adding; no tolerance is needed, and a number that came
from a wrong place shows.

Modules that ranks import must not import matplotlib, which costs half a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from instep.bench.bandwidth import IN_PARTS, array_bytes, available_bytes, whole_count
from instep.bench.tables import size_text
from instep.bench.worlds import World
from instep.comm.algorithms import SCHEDULES
from instep.comm.perform import perform
from instep.comm.schedule import Schedule
from instep.net.device import num_gpus
from instep.net.messages import Messages
from instep.shm import ShmGroup  # which registers the backend
from instep.shm.segment import why_not

Call = Callable[[], object]
Allocate = Callable[[int], Tensor]  # elements -> flat float32 tensor

SMALL = 5_000_000  # bytes that take as long as the samples of small messages
WARM_UP = 2  # calls, of which the check is one
SHARE_OF_MEMORY = 0.6
COPIES = 5
ROOT = 0
PERIOD = 7  # of the numbers that are sent
BLOCK = 1 << 20  # elements that are made or compared at a time, so that a check needs no memory to speak of
IN_PLACE = "shm-in-place"
SHARED = ("shm", IN_PLACE)
ON_ONE_HOST = (*SHARED, "nccl")  # nccl: the hosts of ``--link`` have no GPU of their own
LONGEST_MESSAGE = 100_000_000  # bytes of one that is timed by itself; longer ones take as long a byte

# By their names in torch 2.13, where the old ones warn, or in torch before it.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def measure_collective(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds per call, by size and implementation, on this rank; ``task``: see ``collectives.measure``."""
    results, done = [], 0
    for size in task["sizes"]:
        said = f"{task['collective']}, {world.size} ranks, {size_text(size)}"
        world.work.at(done / sum(each + SMALL for each in task["sizes"]), said)
        done += size + SMALL
        results.append(
            _measure(world, task["collective"], task["backends"], size, task["samples"], task["budget_s"])
        )
    return {
        "memory": memory_bytes_per_s(world) if task["bound"] else None,
        "messages": message_times(world, task["sizes"], task["samples"], task["budget_s"]),
        "sizes": results,
    }


def _measure(
    world: World, collective: str, names: list[str], size: int, samples: int, budget_s: float
) -> dict[str, Any]:
    shared = CollectiveBuffers(collective, size, world.rank, world.size)
    all_of_them = [Implementation(name, shared, world) for name in names]
    wrong = {one.name: one.wrong() for one in all_of_them}
    times, calls = world.interleave(
        {one.name: one.run for one in all_of_them}, samples, warm_up=WARM_UP - 1, budget_s=budget_s
    )
    for one in all_of_them:
        wrong[one.name] += one.wrong()
    return {
        "size": shared.size_bytes,
        "count": shared.count,
        "times": times,
        "calls": calls,
        "wrong": wrong,
    }


def fits(collective: str, names: list[str], size: int, num_ranks: int) -> bool:
    """Whether all ranks together have memory for messages of ``size`` bytes.

    One buffer per kind of memory (two where it is not in place), and two for what an algorithm of our own
    needs on top; backends need little.
    """
    one = whole_count(size, num_ranks) * 4
    kinds = 1 + sum(name.startswith(IN_PLACE) for name in names)
    on_top = 2 if set(names) & set(SCHEDULES[collective]) else 0
    buffers = (1 if collective == "all_reduce" else 2) * kinds + on_top
    return one * buffers * num_ranks <= SHARE_OF_MEMORY * available_bytes()


def memory_bytes_per_s(world: World) -> float:
    """B_mem: what all ranks together read and write per second while all of them copy; collective."""
    nbytes = array_bytes(world.size)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    target.copy_(source)  # so that the pages are there
    found = []
    for _ in range(COPIES):
        world.barrier()
        start = time.perf_counter()
        target.copy_(source)
        found.append(world.slowest(time.perf_counter() - start))
    return 2 * nbytes * world.size / statistics.median(found)


def message_times(
    world: World, sizes: Sequence[int], samples: int, budget_s: float
) -> dict[str, list[float]]:
    """Seconds that one message takes, by its bytes: half of there and back between ranks 0 and 1; collective.

    Sizes from 4 bytes to the largest of ``sizes``, though at least to 64 KB: what a prediction needs.
    """
    messages = Messages(world.group("gloo", "messages"))
    counts = sorted({1, 16_000, *(min(size, LONGEST_MESSAGE) // 4 for size in sizes)} - {0})
    x = torch.zeros(counts[-1])

    def there_and_back(x: Tensor) -> None:
        if world.rank == 0:
            messages.together([(x, 1)], [])
            messages.together([], [(x, 1)])
        elif world.rank == 1:
            messages.together([], [(x, 0)])
            messages.together([(x, 0)], [])

    things = {str(count): partial(there_and_back, x[:count]) for count in counts}
    times, _ = world.interleave(things, samples, warm_up=WARM_UP, budget_s=budget_s)
    return {
        "bytes": [4 * count for count in counts],
        "seconds": [statistics.median(times[str(count)]) / 2 for count in counts],
    }


def implementations(collective: str) -> list[str]:
    """The names of all implementations of ``collective`` that this machine may have."""
    return ["gloo", *SHARED, *SCHEDULES[collective], "nccl"]


def default_names(collective: str, *, hosts: bool = False) -> list[str]:
    """Those that are measured unless others are named: NCCL only where there are GPUs, on one host."""
    elsewhere = ON_ONE_HOST if hosts else () if num_gpus() else ("nccl",)
    return [name for name in implementations(collective) if name not in elsewhere]


def obstacle(name: str, collective: str, num_ranks: int, *, hosts: bool = False) -> str | None:
    """Why ``name`` cannot be measured here, or None. ``hosts``: each rank has one of its own.

    Raises:
        ValueError: there is no such implementation.
    """
    if name not in implementations(collective):
        valid = ", ".join(implementations(collective))
        raise ValueError(f"unknown backend {name!r} for {collective}: expected one of {valid}")
    if hosts and name in ON_ONE_HOST:
        return "it is for ranks of one host"
    if name in SHARED and (why := why_not()):
        return why
    if name == "nccl" and num_gpus() < num_ranks:
        return f"nccl needs a GPU per rank: {num_gpus()} for {num_ranks} ranks"
    return None


class Implementation:
    """One implementation of one collective on messages of one size, on this rank, with the buffers it needs.

    ``shared`` are buffers in private memory, which all implementations that take such memory use in turn.
    """

    def __init__(self, name: str, shared: CollectiveBuffers, world: World) -> None:
        self.name = name
        self.buffers = self._buffers(shared, world)
        self.run = self._own_call(world) if name in SCHEDULES[shared.collective] else self._torch_call(world)

    def wrong(self) -> int:
        """Number of wrong elements on this rank after one call."""
        self.buffers.fill()
        self.run()
        wrong = self.buffers.wrong()
        self.buffers.clear()
        return wrong

    def _buffers(self, shared: CollectiveBuffers, world: World) -> CollectiveBuffers:
        allocate: Allocate = private_memory
        if self.name == IN_PLACE:
            allocate = mapped_memory(self.group(world))
        elif self.name == "nccl":
            allocate = gpu_memory(world.rank)
        else:
            return shared
        return CollectiveBuffers(
            shared.collective, shared.size_bytes, shared.rank, shared.num_ranks, allocate
        )

    def _torch_call(self, world: World) -> Call:
        call = torch_call(self.buffers, self.group(world))
        return synchronised(call) if self.name == "nccl" else call

    def group(self, world: World) -> ProcessGroup:
        """The process group that it works over."""
        return world.group("shm" if self.name in SHARED else self.name)

    def _own_call(self, world: World) -> Call:
        algorithm = SCHEDULES[self.buffers.collective][self.name]
        return own_call(self.buffers, algorithm, Messages(world.group("gloo", "messages")))


def mapped_memory(pg: ProcessGroup) -> Allocate:
    """Memory that the other ranks of ``pg``, a group of the shm backend, map."""
    assert isinstance(pg, ShmGroup)

    def allocate(num_elements: int) -> Tensor:
        return pg.allocate(4 * num_elements).elements(torch.float32)

    return allocate


def gpu_memory(index: int) -> Allocate:
    """Memory of GPU ``index``."""
    return lambda num_elements: torch.zeros(num_elements, device=f"cuda:{index}")


def synchronised(call: Call) -> Call:
    """``call``, and until the GPU has done it."""

    def both() -> None:
        call()
        torch.cuda.synchronize()

    return both


def torch_call(buffers: CollectiveBuffers, pg: ProcessGroup) -> Call:
    """``buffers`` through the function of torch.distributed that the collective is named after."""
    x, out = buffers.x, buffers.out
    at_root = buffers.rank == ROOT
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(x, group=pg),
        "broadcast": lambda: dist.broadcast(x, ROOT, group=pg),
        "reduce": lambda: dist.reduce(x, ROOT, group=pg),
        "all_gather": lambda: all_gather_single(out, x, group=pg),
        "reduce_scatter": lambda: reduce_scatter_single(out, x, group=pg),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=pg),
        "gather": lambda: dist.gather(x, buffers.out_parts if at_root else None, ROOT, group=pg),
        "scatter": lambda: dist.scatter(out, buffers.x_parts if at_root else None, ROOT, group=pg),
    }
    return calls[buffers.collective]


def own_call(buffers: CollectiveBuffers, algorithm: Schedule, messages: Messages) -> Call:
    """``buffers`` by an algorithm of ``instep.comm``; parts in place where those are what it takes."""
    x, out, rank = buffers.x, buffers.out, buffers.rank
    x_parts, out_parts = buffers.x_parts or [], buffers.out_parts or []

    def scatter() -> None:
        perform(algorithm, x_parts, messages)
        out.copy_(x_parts[rank])

    def gather() -> None:
        out_parts[rank].copy_(x)
        perform(algorithm, out_parts, messages)

    calls: dict[str, Call] = {
        "all_reduce": lambda: perform(algorithm, x, messages),
        "broadcast": lambda: perform(algorithm, x, messages, ROOT),
        "reduce": lambda: perform(algorithm, x, messages, ROOT),
        "reduce_scatter": scatter,
        "all_gather": gather,
        "all_to_all": lambda: perform(algorithm, x_parts, messages, out=out_parts),
        "scatter": scatter,
        "gather": gather,
    }
    return calls[buffers.collective]


def private_memory(num_elements: int) -> Tensor:
    """Ordinary memory."""
    return torch.zeros(num_elements)


class CollectiveBuffers:
    """Rank ``rank``'s buffers for ``collective`` on messages of ``num_elements`` in all, of W ranks.

    ``x`` is what it sends, ``out`` what it receives: the same tensor where the operation is in place.
    ``x_parts`` and ``out_parts`` are the same memory in W equal parts, None where it has no parts.
    """

    def __init__(
        self, collective: str, size_bytes: int, rank: int, num_ranks: int, allocate: Allocate = private_memory
    ) -> None:
        self.collective = collective
        self.rank, self.num_ranks = rank, num_ranks
        self.num_elements = whole_count(size_bytes, num_ranks)
        self.part = self.num_elements // num_ranks
        whole_in, whole_out = (
            collective not in ("all_gather", "gather"),
            collective not in ("reduce_scatter",),
        )
        if collective == "scatter":
            whole_out = False
        self.x = allocate(self.num_elements if whole_in else self.part)
        in_place = collective in ("all_reduce", "reduce", "broadcast")
        self.out = self.x if in_place else allocate(self.num_elements if whole_out else self.part)
        self.x_parts = list(self.x.split(self.part)) if whole_in else None
        self.out_parts = list(self.out.split(self.part)) if whole_out else None

    @property
    def size_bytes(self) -> int:
        """The size of the message as nccl-tests counts it."""
        return self.num_elements * self.x.element_size()

    @property
    def count(self) -> int:
        """Elements of the message, or of one rank's part of it."""
        return self.part if self.collective in IN_PARTS else self.num_elements

    def fill(self) -> None:
        """Put this rank's numbers into ``x``, and into ``out`` what cannot be right."""
        if self.out is not self.x:
            self.out.fill_(-1)
        for start, block in _blocks(self.x):
            block.copy_(_sent(self.rank, start, block.numel()))

    def clear(self) -> None:
        """Zeros, which stay finite however often they are summed."""
        self.x.zero_()
        self.out.zero_()

    def wrong(self) -> int:
        """Number of elements of ``out`` that are not what they must be."""
        if self.collective in ("reduce", "gather") and self.rank != ROOT:
            return 0
        return sum(
            int((block != self._expected(start, block.numel())).sum()) for start, block in _blocks(self.out)
        )

    def _expected(self, start: int, length: int) -> Tensor:
        own = self.rank * self.part  # where this rank's part begins in a message
        match self.collective:
            case "all_reduce" | "reduce":
                return _summed(self.num_ranks, start, length)
            case "reduce_scatter":
                return _summed(self.num_ranks, own + start, length)
            case "broadcast":
                return _sent(ROOT, start, length)
            case "scatter":
                return _sent(ROOT, own + start, length)
        # The others receive a part from every rank: their own first one, or the one meant for this rank.
        first = own if self.collective == "all_to_all" else 0
        place = torch.arange(start, start + length)
        source = place // self.part
        return ((place % self.part + first) % PERIOD + 8 * source).float()


def _blocks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, x.numel(), BLOCK):
        yield start, x[start : start + BLOCK]


def _sent(rank: int, start: int, length: int) -> Tensor:
    """What ``rank`` sends from element ``start`` on, at most a block of it: 0 to 6 over and over."""
    first = start % PERIOD
    return _cycle()[first : first + length] + 8 * rank


@cache
def _cycle() -> Tensor:
    return (torch.arange(BLOCK + PERIOD) % PERIOD).float()


def _summed(num_ranks: int, start: int, length: int) -> Tensor:
    return num_ranks * _sent(0, start, length) + 8 * (num_ranks * (num_ranks - 1) // 2)
