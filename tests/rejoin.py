"""One script's objects in one generation of ranks after another, and their state, sent to the next one.

joined = Rejoined(program)                    as a script is built, in a world of one
joined.join(mesh, kept); joined.steps(2)      with a state from wherever it was kept
kept = joined.keep(); joined.leave()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instep.checkpoint.image import StateImage, source_of
from instep.checkpoint.load import restore
from instep.mesh.axes import resolve
from instep.mesh.mesh import Mesh, UnrankedMesh, build, no_store
from instep.net.store import backend_timeout
from instep.reduce.norm import clip_grad_norm_
from instep.state.hash import SharedHash
from instep.state.homes import offered
from instep.state.shards import without_ties
from tests.kinds import Program
from tests.parity import fill, filled, world_of_one
from tests.training_state import training_state
from tests.world import raw_groups


@dataclass
class Kept:
    """One rank's part of a state, copied."""

    image: StateImage
    step: int
    schedule: dict[str, Any]


class Rejoined:
    """A model, an optimizer and its schedule, made once."""

    def __init__(self, program: Program, from_meta: bool = False) -> None:
        self.program, self.mesh = program, unranked() if from_meta else world_of_one()
        with torch.device("meta" if from_meta else "cpu"):
            module = program.module()
        self.model, self.optimizer = program.make(module if from_meta else filled(module), self.mesh)
        if from_meta:
            self.model.materialise(fill)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.step = 0
        self.parameters = list(self.module.parameters())

    @property
    def module(self) -> nn.Module:
        return offered(self.model).module

    def in_backward(self, function: Callable[[], None]) -> None:
        """Call ``function`` in backward, when it comes to the last module that is here."""
        everywhere = self.program.kind != "pipeline"  # though a rank's slice of a module may be empty
        modules = list(self.module.modules())
        *_, last = (m for m in modules if any(p.numel() or everywhere for p in m.parameters(recurse=False)))
        last.register_full_backward_pre_hook(lambda module, gradient: function())

    def leave(self) -> None:
        """Give the groups back, from any point of a step."""
        for part in (self.optimizer, self.model):
            if (described := offered(part)) is not None:
                described.leave()
        assert all(p.grad is None for p in self.parameters)
        with pytest.raises(RuntimeError, match=r"is closed|has left its group"):  # else it would train alone
            self.program.backward(self.model, self.step)
        self.mesh.close()

    def join(self, mesh: Mesh, kept: Sequence[Kept]) -> None:
        """Take part in ``mesh``, with the state that all of ``kept`` are together; a new one, if none is."""
        self.mesh = mesh
        for part in (self.model, self.optimizer):
            if (described := offered(part)) is not None:
                described.join(mesh)
        assert all(p is q for p, q in zip(self.module.parameters(), self.parameters, strict=True))
        assert self.schedule.optimizer is self.optimizer
        if not kept:
            offered(self.model).fill()
            return
        state = training_state(self.model, self.optimizer)
        source, options = source_of([each.image for each in kept])
        restore(state, source, options, kept[0].step, None)
        state.settled()
        self.step = kept[0].step
        state.resume_at(self.step, options)
        self.schedule.load_state_dict(kept[0].schedule)

    def keep(self) -> Kept | None:
        """What this rank writes of the state; None if others write all of it."""
        state = training_state(self.model, self.optimizer)
        if not state.is_divided and self.mesh.rank:
            return None
        shards = without_ties(state.owned(), state.ties())
        image = StateImage.of(shards, {"ties": state.ties(), "options": state.options()})
        return Kept(image, self.step, dict(self.schedule.state_dict()))

    def sha256(self) -> str | None:
        """Of the state; None on a rank that has no part of it."""
        state = training_state(self.model, self.optimizer)
        if not state.is_divided and self.mesh.rank:
            return None
        return SharedHash(state.group).digests(state.owned(state.hashed()), self.step)[0]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.program.backward(self.model, self.step)
            clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.step += 1

    def assert_undisturbed(self) -> None:
        """The state is that of one process that was never left. Collective."""
        digest = self.sha256()
        assert digest == undisturbed(self.program, self.step) if digest else self.mesh.rank


def unranked() -> Mesh:
    """As a process has it before it is given a rank."""
    axes = resolve(1, dp=1, shard=1, pp=1, tp=1)
    return UnrankedMesh(
        axes, no_store, place=lambda: 0, on_device=lambda: torch.device("cpu"), timeout_s=20.0
    )


_undisturbed: dict[tuple[int, int], tuple[Program, str | None]] = {}
_lock = threading.Lock()


def undisturbed(program: Program, num_steps: int) -> str | None:
    """The hash after so many steps of one process that is never left."""
    with _lock:
        if (id(program), num_steps) not in _undisturbed:
            alone = Rejoined(program)
            alone.steps(num_steps)
            _undisturbed[id(program), num_steps] = program, alone.sha256()
            alone.leave()
        return _undisturbed[id(program), num_steps][1]


def generation(
    store: dist.Store, name: str, rank: int, size: int, backend: str, timeout_s: float = 20.0, **axes: int
) -> Mesh:
    """A mesh of ranks that are threads of one process and rendezvous under ``name``."""
    own = dist.PrefixStore(name, store)
    make = raw_groups(backend, own, rank, backend_timeout(timeout_s))
    return build(own, rank, size, timeout_s=timeout_s, make_group=make, **axes)


class Meetings:
    """The rendezvous of one test's threads, generation by generation, and what they have kept."""

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


def slice_bytes(model: Any) -> int:
    """Memory of its shards, and of what is gathered."""
    units = model.sharding.units
    shards = [x for unit in units for x in (*unit.parameters, unit.slice, unit.flat)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in shards}
    return sum(storages.values())


class Lost(Exception):
    """What a rank dies of."""
