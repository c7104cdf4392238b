"""What a survivor gives back of a generation that has lost a rank, by the time that it joins the next one:
all of it, and without a collection of garbage, which a process with little garbage hardly ever makes.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from instep.errors import Desync, PeerLost, clear_tracebacks
from instep.mesh.mesh import Mesh
from tests.rejoin import Lost, Meetings, generation
from tests.run.text_training import TextTraining, tiny
from tests.world import world


@pytest.fixture
def pair() -> Iterator[Meetings]:
    """Where two ranks meet; what they have disabled is enabled in the end."""
    yield Meetings(2)
    gc.enable()


def held() -> tuple[int, int]:
    """Descriptors, and mappings of nameless memory, of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:instep" in line for line in maps)


def die_in_step(mine: TextTraining) -> None:
    """In backward, so that the others are told."""

    def die(gradient: Tensor) -> None:
        raise Lost

    hook = next(mine.module.parameters()).register_hook(die)
    try:
        mine.step()
    finally:
        hook.remove()


def live(mine: TextTraining, mesh: Mesh, graceful: bool) -> list[weakref.ref[Any]]:
    """One generation, which ends when rank 1 dies in its second step: its group and its gradients' memory."""
    mine.join(mesh)
    mine.agree()
    mine.step()
    wrapped = mine.model.__instep_state__()
    kept = [weakref.ref(x) for x in [wrapped.group, *wrapped.gradients()]]
    try:
        if mesh.rank == 0:
            mine.step()
        elif graceful:
            die_in_step(mine)
        else:
            wrapped.group.close()
    except (PeerLost, Desync, Lost) as error:
        clear_tracebacks(error)
    del wrapped
    mine.leave()
    return kept


def give_back(mesh: Mesh, mine: TextTraining, graceful: bool, backend: str, pair: Meetings) -> None:
    mine.training.agreed = lambda: None  # what was built stays: every generation begins with it
    kept, before = [], held()
    for number in range(3):
        kept.append(live(mine, generation(pair.store, f"{number}", mesh.rank, 2, backend), graceful))
        pair.wait()
        if not number and mesh.rank == 0:  # the first makes what stays, such as the memory of weights
            gc.collect()
            gc.disable()
            before = held()
        pair.wait()
    *others, last = kept  # until it joins again, a wrapper knows of the group that it has left
    assert last
    if mesh.rank == 0:  # the survivor
        assert held() == before
        pair.await_ends(mesh.rank)
        assert [ref() for refs in others for ref in refs if ref() is not None] == []
    pair.wait()


@pytest.mark.parametrize(
    ("stage", "bucket_mb", "graceful", "backend"),
    [(0, 25.0, True, "shm"), (3, 25.0, False, "shm"), (0, 0.01, False, "gloo"), (3, 25.0, False, "gloo")],
)
@world(2)
def test_a_lost_generation_is_given_back_at_once(
    mesh: Mesh, data: Path, stage: int, bucket_mb: float, graceful: bool, backend: str, pair: Meetings
) -> None:
    """In small buckets several are under way."""
    config = tiny(data, stage=stage, steps=100)
    config = replace(config, parallel=replace(config.parallel, bucket_mb=bucket_mb))
    give_back(mesh, TextTraining(config), graceful, backend, pair)
