"""One script's objects in one generation of ranks after the other, and what they hold, sent to the next one.

joined = Rejoined(kind)                       as a script is built, in a world of one
joined.join(mesh, kept); joined.steps(2)      with a state from wherever it was kept
kept = joined.keep(); joined.leave()
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from instep.checkpoint.load import restore
from instep.checkpoint.manifest import Json, canonical
from instep.checkpoint.state import TrainingState, merged
from instep.errors import PeerLost
from instep.mesh.axes import resolve
from instep.mesh.mesh import Mesh, UnrankedMesh, build, no_store
from instep.net.store import backend_timeout
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.shard_groups import shard_group_of
from instep.state.hash import SharedHash
from instep.state.homes import offered
from instep.state.shards import without_ties
from instep.state.stored import Source, assemble, shards_from_json, shards_to_json
from instep.step.micro_batches import MicroBatch
from tests.parity import LeafStep, fill, filled, world_of_one
from tests.world import raw_groups

NUM_LEAVES = 5
Made = tuple[Any, Any]
# The second keeps sums from its construction on; of the third there is nothing before the first step.
OPTIONS: dict[type[Optimizer], dict[str, Any]] = {
    AdamW: {"fused": True},
    Adagrad: {"initial_accumulator_value": 0.1},
    SGD: {"momentum": 0.9},
}


def plainly(model: nn.Module, optimizer: type[Optimizer] = AdamW) -> Optimizer:
    return optimizer(model.parameters(), lr=0.02, **OPTIONS[optimizer])


def replicated(module: nn.Module, mesh: Mesh, **options: Any) -> Made:
    return DataParallel(module, process_group=mesh, find_unused_parameters=True, **options), plainly(module)


def served(module: nn.Module, mesh: Mesh) -> Made:
    optimizer = plainly(module)
    return ParameterServer(module, optimizer, mesh, find_unused_parameters=True), optimizer


def stage1(
    module: nn.Module, mesh: Mesh, *, optimizer: type[Optimizer] = AdamW, one_copy: bool = False
) -> Made:
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True)
    return model, in_shards(model, mesh, optimizer, one_copy=one_copy)


def divided(
    module: nn.Module,
    mesh: Mesh,
    *,
    sharded: bool = False,
    optimizer: type[Optimizer] = AdamW,
    **options: Any,
) -> Made:
    model = fully_shard(module, mesh, find_unused_parameters=True, **options)
    return model, in_shards(model, mesh, optimizer) if sharded else plainly(model, optimizer)


def in_shards(model: nn.Module, mesh: Mesh, optimizer: type[Optimizer], **options: Any) -> Optimizer:
    among = shard_group_of(mesh)
    return ShardedOptimizer(model.parameters(), optimizer, among, lr=0.02, **OPTIONS[optimizer], **options)


@dataclass(frozen=True)
class Kind:
    """What is trained, and with which wrapper and optimizer."""

    module: Callable[[], nn.Module]
    leaf_step: LeafStep
    make: Callable[..., Made] = replicated
    options: Mapping[str, Any] = field(default_factory=dict)
    from_meta: bool = False  # the module has no values before ranks meet


@dataclass
class Kept:
    """What one rank holds of a state, copied; a place of elements (``state.stored.Reader``)."""

    rows: Json
    ties: Json
    options: Json
    values: dict[str, Tensor]
    step: int
    schedule: dict[str, Any]

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        out.copy_(self.values[name][first : first + out.numel()])


class Rejoined:
    """A model, an optimizer and its schedule, made once."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.mesh = kind, unranked() if kind.from_meta else world_of_one()
        with torch.device("meta" if kind.from_meta else "cpu"):
            module = kind.module()
        self.model, self.optimizer = kind.make(
            module if kind.from_meta else filled(module), self.mesh, **kind.options
        )
        if kind.from_meta:
            self.model.materialise(fill)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.step = 0
        self.parameters = list(self.module.parameters())
        self.under_way: list[Iterator[MicroBatch]] = []
        self.num_forwards = self.num_updates = 0
        self.module.register_forward_pre_hook(lambda *_: self._count_forward())
        self.optimizer.register_step_post_hook(lambda *_: self._count_update())

    def _count_forward(self) -> None:
        self.num_forwards += 1

    def _count_update(self) -> None:
        self.num_updates += 1

    @property
    def module(self) -> nn.Module:
        return offered(self.model).module

    def leave(self) -> None:
        """Give the groups back, from wherever a step has come to."""
        for part in (self.optimizer, self.model):
            if (said := offered(part)) is not None:
                said.leave()
        assert all(p.grad is None for p in self.parameters)
        with pytest.raises(RuntimeError, match=r"is closed|has left its group"):
            next(self.micro_batches())  # this rank would train alone, and not know it
        self.mesh.close()

    def join(self, mesh: Mesh, kept: Sequence[Kept]) -> None:
        """Take part in ``mesh``, with the state that all of ``kept`` are together; the first one, if there is
        none."""
        self.mesh = mesh
        for part in (self.model, self.optimizer):
            if (said := offered(part)) is not None:
                said.join(mesh)
        assert all(p is q for p, q in zip(self.module.parameters(), self.parameters, strict=True))
        assert self.schedule.optimizer is self.optimizer
        if not kept:
            offered(self.model).fill()
            return
        state = TrainingState(self.model, self.optimizer)
        readers = {str(i): each for i, each in enumerate(kept)}
        rows = {place: shards_from_json(each.rows) for place, each in readers.items()}
        source = Source(assemble(rows), readers, kept[0].ties)
        restore(state, source, merged([each.options for each in kept]), kept[0].step, None)
        state.drop_others_moments()
        state.settled()
        self.step = kept[0].step
        state.resume_at(self.step)
        self.schedule.load_state_dict(kept[0].schedule)

    def keep(self) -> Kept | None:
        """What this rank writes of the state; None if others write all of it."""
        state = TrainingState(self.model, self.optimizer)
        if not state.is_divided and self.mesh.rank:
            return None
        shards = without_ties(state.owned(), state.ties())
        said = [shards_to_json(shards), state.ties(), state.options()]
        values = {x.name: x.tensor.detach().flatten().clone() for x in shards}
        return Kept(*json.loads(canonical(said)), values, self.step, dict(self.schedule.state_dict()))

    def sha256(self) -> str | None:
        """Of the state; None on a rank that has nothing to say of it."""
        state = TrainingState(self.model, self.optimizer)
        if not state.is_divided and self.mesh.rank:
            return None
        return SharedHash(state.group).digests(state.owned(state.hashed()), self.step)[0]

    def micro_batches(self) -> Iterator[MicroBatch]:
        return self.model.micro_batches(NUM_LEAVES)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for micro_batch in self.micro_batches():
                self.kind.leaf_step(self.called, micro_batch, self.step)
            clip_grad_norm_(self.module.parameters(), 0.5)
            self.update()
            if not isinstance(self.model, ParameterServer) or self.model.is_server:
                self.schedule.step()
            self.optimizer.zero_grad()
            self.step += 1

    def update(self) -> None:
        """The optimizer's step."""
        if isinstance(self.model, ParameterServer):
            self.model.step()
        else:
            self.optimizer.step()

    def go_on(self, micro_batch: MicroBatch | None, others: Iterator[MicroBatch]) -> None:
        """Forward and backward of the rest of a step."""
        while micro_batch is not None:
            self.kind.leaf_step(self.called, micro_batch, self.step)
            micro_batch = next(others, None)

    @property
    def called(self) -> nn.Module:
        return self.module if isinstance(self.model, ParameterServer) else self.model


def unranked() -> Mesh:
    """As a process has it before it is given a rank."""
    axes = resolve(1, dp=1, shard=1, pp=1, tp=1)
    return UnrankedMesh(
        axes, no_store, place=lambda: 0, on_device=lambda: torch.device("cpu"), timeout_s=20.0
    )


_undisturbed: dict[tuple[int, int], tuple[Kind, str | None]] = {}
_lock = threading.Lock()


def undisturbed(kind: Kind, num_steps: int) -> str | None:
    """The hash after so many steps of one process that is never left."""
    with _lock:
        if (id(kind), num_steps) not in _undisturbed:
            alone = Rejoined(replace(kind, from_meta=False))
            alone.steps(num_steps)
            _undisturbed[id(kind), num_steps] = kind, alone.sha256()
            alone.leave()
        return _undisturbed[id(kind), num_steps][1]


def generation(
    store: dist.Store, name: str, rank: int, size: int, backend: str, timeout_s: float = 20.0, **axes: int
) -> Mesh:
    """A mesh of ranks that are threads of one process, who meet under ``name``."""
    own = dist.PrefixStore(name, store)
    make = raw_groups(backend, own, rank, backend_timeout(timeout_s))
    return build(own, rank, size, timeout_s=timeout_s, make_group=make, **axes)


class Meetings:
    """Where the threads of one test meet, in one generation after the other, and what they have kept."""

    def __init__(self, num_threads: int) -> None:
        self.store = dist.HashStore()
        self._of_others = set(threading.enumerate())  # a lost group of an earlier test may still have some
        self._barrier = threading.Barrier(num_threads)
        self._mine: list[Kept | None] = [None] * num_threads

    def keep(self, rank: int, mine: Kept | None) -> list[Kept]:
        """What all threads have kept together, once all are here."""
        self._mine[rank] = mine
        self.wait()
        everything = [each for each in self._mine if each is not None]
        self.wait()
        return everything

    def wait(self) -> None:
        self._barrier.wait(60)

    def threads(self, rank: int) -> list[threading.Thread]:
        """The threads that instep has started in this test, for ``rank``."""
        new = set(threading.enumerate()) - self._of_others
        return [t for t in new if t.name.startswith("instep") and f"rank {rank}" in t.name]

    def await_ends(self, rank: int) -> None:
        """Wait for the threads of groups that ``rank`` has left: woken, and on their way out."""
        for thread in self.threads(rank):
            if thread.name.startswith("instep messages"):
                thread.join(30)


def in_generations(
    kind: Kind, meetings: Meetings, rank: int, backend: str, sizes: Sequence[int], num_steps: int = 2
) -> None:
    """In each generation so many ranks make ``num_steps``, and have the hash of one process that made all."""
    joined = Rejoined(kind)
    kept = meetings.keep(rank, joined.keep() if rank == 0 and not kind.from_meta else None)
    made = 0
    for number, size in enumerate(sizes):
        joined.leave()
        assert kind.options.get("stage", 3) < 3 or kind.make is not divided or not slice_bytes(joined.model)
        if rank < size:
            joined.join(generation(meetings.store, f"generation {number}", rank, size, backend), kept)
            joined.steps(num_steps)
            made += num_steps
            digest = joined.sha256()
            assert digest in (None, undisturbed(kind, (number + 1) * num_steps))
            assert digest is not None or rank
            kept = meetings.keep(rank, joined.keep())
        else:
            kept = meetings.keep(rank, None)
    joined.leave()
    assert joined.num_updates in (made, 0)  # a worker of a parameter server makes none
    assert joined.num_forwards or not made


def slice_bytes(model: Any) -> int:
    """That its slices take in memory, but for the one element that stands for each."""
    slices = [x.tensor for unit in model.sharding.stage3.units for x in unit.held]
    slices += [unit.slice for unit in model.sharding.stage3.units]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in slices}
    return sum(nbytes for nbytes in storages.values() if nbytes > slices[0].itemsize)


class Lost(Exception):
    """What a rank dies of."""


def lose_rank(kind: Kind, meetings: Meetings, rank: int, backend: str, place: str) -> None:
    """Of three ranks the last is lost in the third step; the others repeat it, and make another one.

    ``place``: "backward", of a micro-batch; "undeclared", in a step without any; "update", of the optimizer.
    """
    joined = Rejoined(kind)
    kept = meetings.keep(rank, joined.keep() if rank == 0 else None)
    joined.leave()
    joined.join(generation(meetings.store, "three", rank, 3, backend), kept)
    joined.steps(2)
    kept = meetings.keep(rank, joined.keep())
    half_a_step = {"backward": _backward, "undeclared": _undeclared, "update": _update}[place]
    with pytest.raises(Lost if rank == 2 else PeerLost):
        half_a_step(joined, rank)
    under_way = list(joined.under_way)
    joined.leave()
    if rank < 2:
        joined.join(generation(meetings.store, "two", rank, 2, backend), kept)
        joined.steps(2)
        assert joined.sha256() in (None, undisturbed(kind, 4))
        joined.leave()
    assert not [micro_batch for each in under_way for micro_batch in each]
    meetings.wait()


def _backward(joined: Rejoined, rank: int) -> None:
    iterator = joined.micro_batches()
    joined.under_way.append(iterator)  # kept, so that no collector ends it
    with dying(joined, rank):
        joined.go_on(next(iterator), iterator)


def _undeclared(joined: Rejoined, rank: int) -> None:
    micro_batch = MicroBatch(rank, 3)
    joined.kind.leaf_step(joined.called, micro_batch, 2)
    with dying(joined, rank):
        joined.kind.leaf_step(joined.called, micro_batch, 2)


def _update(joined: Rejoined, rank: int) -> None:
    iterator = joined.micro_batches()
    joined.go_on(next(iterator), iterator)
    if rank == 2:
        raise Lost
    joined.update()


@contextmanager
def dying(joined: Rejoined, rank: int) -> Iterator[None]:
    """Inside, the last rank dies in backward."""
    hooks = [joined.parameters[-1].register_hook(_die)] if rank == 2 else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _die(gradient: Tensor) -> None:
    raise Lost
