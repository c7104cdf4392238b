"""How to do a collective: one table from a name to what is called, for backends and for our own algorithms.

gloo, shm, nccl     a torch.distributed backend, through torch's functions
shm-in-place        the same on memory that all ranks have mapped, so that nothing is copied in or out
naive, ring, ...    the algorithms of ``instep.comm``, on gloo's point-to-point messages
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from instep.bench.cases import ROOT, Allocate, Case, private
from instep.bench.ranks import World
from instep.comm import algorithms
from instep.comm.messages import Messages
from instep.shm import ShmGroup  # which registers the backend
from instep.shm.futex import available

Call = Callable[[], object]

# By their names in torch 2.13, where the old ones warn, or in torch before it.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

BACKENDS = ("gloo", "shm", "nccl")
IN_PLACE = "shm-in-place"

OURS: dict[str, dict[str, Any]] = {
    "all_reduce": algorithms.ALL_REDUCE,
    "broadcast": algorithms.BROADCAST,
    "reduce": algorithms.REDUCE,
    "reduce_scatter": algorithms.REDUCE_SCATTER,
    "all_gather": algorithms.ALL_GATHER,
    "all_to_all": algorithms.ALL_TO_ALL,
    "scatter": algorithms.SCATTER,
    "gather": algorithms.GATHER,
}


def names(collective: str) -> list[str]:
    """Every way to do ``collective`` that this machine may have."""
    return ["gloo", "shm", IN_PLACE, *OURS[collective], "nccl"]


def default_names(collective: str) -> list[str]:
    """Those that are measured unless others are named: NCCL only where there are GPUs."""
    return [name for name in names(collective) if name != "nccl" or torch.cuda.is_available()]


def obstacle(name: str, collective: str, num_ranks: int) -> str | None:
    """Why ``name`` cannot be measured here, or None.

    Raises:
        ValueError: there is no such way.
    """
    if name not in names(collective):
        valid = ", ".join(names(collective))
        raise ValueError(f"unknown way {name!r} to do {collective}: expected one of {valid}")
    if name in ("shm", IN_PLACE) and not available():
        return "this platform has no shm backend"
    if name == "nccl" and torch.cuda.device_count() < num_ranks:
        return f"nccl needs a GPU per rank: {torch.cuda.device_count()} for {num_ranks} ranks"
    return None


class Way:
    """One way to do one collective on messages of one size, on this rank, with the buffers that it needs.

    ``shared`` is a case in private memory, which all ways that take such memory use in turn.
    """

    def __init__(self, name: str, shared: Case, world: World) -> None:
        self.name = name
        self.case = self._case(shared, world)
        self.run = self._ours(world) if name in OURS[shared.collective] else self._torchs(world)

    def wrong(self) -> int:
        """Number of wrong elements on this rank after one call."""
        self.case.fill()
        self.run()
        wrong = self.case.wrong()
        self.case.clear()
        return wrong

    def _case(self, shared: Case, world: World) -> Case:
        allocate: Allocate = private
        if self.name == IN_PLACE:
            allocate = mapped(world.group("shm"))
        elif self.name == "nccl":
            allocate = on_gpu(world.rank)
        else:
            return shared
        return Case(shared.collective, shared.size_bytes, shared.rank, shared.num_ranks, allocate)

    def _torchs(self, world: World) -> Call:
        backend = "shm" if self.name == IN_PLACE else self.name
        call = torchs(self.case, world.group(backend))
        return then_wait(call) if self.name == "nccl" else call

    def _ours(self, world: World) -> Call:
        function = OURS[self.case.collective][self.name]
        return ours(self.case, function, Messages(world.group("gloo", "messages")))


def mapped(pg: ProcessGroup) -> Allocate:
    """Memory that the other ranks of ``pg``, a group of the shm backend, map."""
    assert isinstance(pg, ShmGroup)

    def allocate(num_elements: int) -> Tensor:
        return pg.allocate(4 * num_elements).elements(torch.float32)

    return allocate


def on_gpu(index: int) -> Allocate:
    """Memory of GPU ``index``."""
    return lambda num_elements: torch.zeros(num_elements, device=f"cuda:{index}")


def then_wait(call: Call) -> Call:
    """``call``, and until the GPU has done it."""

    def both() -> None:
        call()
        torch.cuda.synchronize()

    return both


def torchs(case: Case, pg: ProcessGroup) -> Call:
    """``case`` through the function of torch.distributed that the collective is named after."""
    x, out = case.x, case.out
    at_root = case.rank == ROOT
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(x, group=pg),
        "broadcast": lambda: dist.broadcast(x, ROOT, group=pg),
        "reduce": lambda: dist.reduce(x, ROOT, group=pg),
        "all_gather": lambda: all_gather_single(out, x, group=pg),
        "reduce_scatter": lambda: reduce_scatter_single(out, x, group=pg),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=pg),
        "gather": lambda: dist.gather(x, case.out_parts if at_root else None, ROOT, group=pg),
        "scatter": lambda: dist.scatter(out, case.x_parts if at_root else None, ROOT, group=pg),
    }
    return calls[case.collective]


def ours(case: Case, function: Callable[..., None], messages: Messages) -> Call:
    """``case`` by an algorithm of ``instep.comm``; parts in place where those are what it takes."""
    x, out, rank = case.x, case.out, case.rank
    x_parts, out_parts = case.x_parts or [], case.out_parts or []

    def reduce_scatter() -> None:
        function(x_parts, messages)
        out.copy_(x_parts[rank])

    def all_gather() -> None:
        out_parts[rank].copy_(x)
        function(out_parts, messages)

    calls: dict[str, Call] = {
        "all_reduce": lambda: function(x, messages),
        "broadcast": lambda: function(x, messages, ROOT),
        "reduce": lambda: function(x, messages, ROOT),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "all_to_all": lambda: function(x_parts, messages, out_parts),
        "scatter": lambda: function(x_parts, messages, out, ROOT),
        "gather": lambda: function(x, messages, out_parts, ROOT),
    }
    return calls[case.collective]
