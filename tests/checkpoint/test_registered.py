"""Several models, optimizers and objects: one state, which any number of ranks saves, and any other loads."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import save as saving
from instep.checkpoint.load import newest, restore_found
from instep.checkpoint.registered import Registered
from instep.mesh.mesh import Mesh
from tests.checkpoint.registry import KINDS, hash_of, train
from tests.parity import world_of_one
from tests.world import world as make_world

world = partial(make_world, timeout_s=20.0)  # a disk takes its time


@cache
def expected(kind: str) -> tuple[str, str, str]:
    """Of one process: the hashes after two and four steps, and the digest of the objects at the end."""
    objects = KINDS[kind](world_of_one(), "a")
    train(objects, range(2))
    middle = hash_of(objects, 2)
    train(objects, range(2, 4))
    return middle, hash_of(objects, 4), Registered(objects).digest()


def train_and_save(mesh: Mesh, kind: str, directory: Path) -> None:
    objects = KINDS[kind](mesh, "a")
    train(objects, range(2))
    state = Registered(objects).state()
    draft = saving.draft(step=2, data_cursor=0, numerical={}, world_size=mesh.world.size)
    if state.is_divided or not mesh.rank:
        saving.save(directory, state, draft)
    mesh.world.group.barrier("the test")


def load_and_go_on(mesh: Mesh, kind: str, directory: Path) -> None:
    objects = KINDS[kind](mesh, "other")
    train(objects, range(1))
    state = Registered(objects).state()
    found = newest(directory)
    assert found is not None
    restore_found(found, state)
    middle, end, digest = expected(kind)
    assert hash_of(objects, 2) == middle == found.manifest.state_sha256
    train(objects, range(2, 4))
    assert hash_of(objects, 4) == end
    assert Registered(objects).digest() == digest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1)], ids=str)
def test_what_some_ranks_have_saved_goes_on_on_others_with_the_same_bits(
    tmp_path: Path, kind: str, saved_by: int, loaded_by: int
) -> None:
    expected(kind)
    world(saved_by)(train_and_save)(kind=kind, directory=tmp_path)
    world(loaded_by)(load_and_go_on)(kind=kind, directory=tmp_path)
