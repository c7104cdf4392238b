"""What a survivor gives back when it leaves a generation that has lost a rank: all of it, and without a
collection of garbage, which a process with little garbage hardly ever makes.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from instep.elastic.heartbeat import Heartbeat
from instep.errors import Desync, PeerLost, let_go
from instep.mesh.mesh import Mesh
from instep.recipes.text import TextRecipe
from instep.train.run_config import ParallelConfig
from instep.train.trainer import Trainer
from tests.train.test_trainer import agree, config
from tests.world import world


class Died(Exception):
    """A rank's end, as far as a thread can have one."""


@dataclass
class Survivors:
    """The trainers of two ranks, through generations that each end when rank 1 dies in its second step.

    ``kept`` are a group and the gradients' memory of every generation, for as long as these live.
    """

    parallel: ParallelConfig
    data: Path
    graceful: bool = False  # rank 1 says that it leaves
    trainers: dict[int, Trainer] = field(default_factory=dict)
    kept: list[weakref.ref[object]] = field(default_factory=list)

    def live(self, mesh: Mesh) -> None:
        """One generation, as a worker has it."""
        if mesh.rank not in self.trainers:
            tiny = replace(config(self.data), parallel=self.parallel, steps=100)
            self.trainers[mesh.rank] = Trainer(TextRecipe(tiny), heartbeat=Heartbeat())
        trainer = self.trainers[mesh.rank]
        trainer.join(mesh)
        trainer.begin()
        agree(trainer)
        trainer.step()
        wrapped = trainer.parallel.model.__instep_state__()
        self.kept += map(weakref.ref, [wrapped.group, *wrapped.gradients()])
        if mesh.rank == 1:
            trainer.heartbeat.on_enter = self.die
        try:
            trainer.step()
        except (PeerLost, Desync, Died) as error:
            let_go(error)
        trainer.heartbeat.on_enter = None
        del wrapped
        trainer.leave()

    def die(self, phase: str, step: int) -> None:
        """In the middle of a step."""
        if phase == "backward":
            if not self.graceful:
                self.trainers[1].parallel.model.__instep_state__().group.close()
            raise Died


@world(2, backend="shm")
def over_shm(mesh: Mesh, survivors: Survivors) -> None:
    survivors.live(mesh)


@world(2)
def over_gloo(mesh: Mesh, survivors: Survivors) -> None:
    survivors.live(mesh)


def held() -> tuple[int, int]:
    """Descriptors, and mappings of nameless memory, of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:instep" in line for line in maps)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("parallel", "graceful"),
    [
        (ParallelConfig(), False),
        (ParallelConfig(), True),
        (ParallelConfig(strategy="naive"), False),
        (ParallelConfig(strategy="server"), False),
        (ParallelConfig(shard_stage=1), False),
        (ParallelConfig(shard_stage=2), False),
        (ParallelConfig(shard_stage=3), False),
        (ParallelConfig(shard_stage=3), True),
    ],
)
def test_a_lost_generation_is_given_back_at_once(
    data: Path, parallel: ParallelConfig, graceful: bool
) -> None:
    survivors = Survivors(parallel, data, graceful)
    over_shm(survivors=survivors)  # the first makes what stays, such as the memory that weights live in
    with no_collection():
        before = held()
        for _ in range(2):
            over_shm(survivors=survivors)
        assert held() == before
        assert [ref() for ref in survivors.kept if ref() is not None] == []


@pytest.mark.parametrize("stage", [0, 3])
def test_so_is_its_private_memory_over_gloo(data: Path, stage: int) -> None:
    survivors = Survivors(ParallelConfig(shard_stage=stage), data)
    over_gloo(survivors=survivors)
    with no_collection():
        before = held()
        over_gloo(survivors=survivors)
        assert held() == before
        assert [ref() for ref in survivors.kept if ref() is not None] == []
