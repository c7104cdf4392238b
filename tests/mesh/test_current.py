"""The registered mesh answers for this thread, a view for its axis, and a closed mesh for nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import instep
from instep.mesh import current
from instep.mesh.current import get
from instep.mesh.mesh import Mesh, build
from tests.world import world


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    get.register_mesh(None)
    yield
    get.register_mesh(None)


def alone() -> Mesh:
    return build(None, 0, 1, local_rank=0)


@world(4, dp=2, tp=2)
def test_a_whole_mesh_answers_for_the_world_and_a_view_for_its_axis(mesh):
    get.register_mesh(mesh)
    dp, tp = divmod(mesh.rank, 2)
    for whole in (None, mesh):
        assert get("grank", whole) == get("rank", whole) == mesh.rank
        assert get("ws", whole) == 4
        assert get("pg", whole) is mesh.world.pg
    for axis, rank in (("dp", dp), ("tp", tp)):
        view = mesh[axis]
        assert get("grank", view) == mesh.rank
        assert get("rank", view) == rank
        assert get("ws", view) == 2
        assert get("pg", mesh=view) is mesh.along[axis].pg
        assert get("pg", view).rank() == rank
    assert get("ws", mesh["pp"]) == 1
    assert get("pg", mesh["pp"]) is None


@world(2)
def test_a_registered_view_answers_for_its_axis(mesh):
    get.register_mesh(mesh["pp"])
    assert (get("grank"), get("rank"), get("ws"), get("pg")) == (mesh.rank, 0, 1, None)
    assert get("ws", mesh) == 2


def test_where_the_rank_computes():
    mesh = build(None, 0, 1, local_rank=3, on_device=torch.device("meta"))
    assert get("lrank", mesh) == 3
    assert get("device", mesh) == torch.device("meta")
    assert get("device", alone()) == torch.device("cpu")


def test_an_unknown_question_is_refused_with_the_known_ones():
    for mesh in (None, alone()):
        with pytest.raises(ValueError, match=r"get\('size'\): expected one of grank, rank, ws, pg"):
            get("size", mesh)


def test_without_a_mesh_there_is_no_answer_but_a_way_out():
    with pytest.raises(ValueError, match=r"get\('rank'\): no mesh yet: call instep.init\(\) first"):
        get("rank")


def test_every_thread_registers_its_own():
    mine, its = alone(), alone()
    get.register_mesh(mine)
    seen: list[Mesh | None] = []

    def other() -> None:
        seen.append(current.registered())
        get.register_mesh(its)
        seen.append(current.registered())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, its]
    assert current.registered() is mine


def test_a_mesh_is_forgotten_only_by_itself():
    first, second = alone(), alone()
    get.register_mesh(first)
    get.register_mesh(second)
    current.forget(first)
    assert current.registered() is second
    current.forget(second)
    assert current.registered() is None


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a program that nobody launched."""
    for name in list(os.environ):
        if name.startswith(("INSTEP_", "RANK", "WORLD_SIZE", "OMPI_", "SLURM_", "PET_", "LOCAL_")):
            monkeypatch.delenv(name)


def test_init_alone_makes_a_world_of_one_without_a_group_and_closing_leaves_nothing(no_launcher):
    environment = dict(os.environ)
    mesh = instep.init(backend="gloo")
    assert not dist.is_initialized()
    assert [get(name) for name in ("grank", "rank", "ws", "pg", "lrank")] == [0, 0, 1, None, 0]
    assert get("device") == torch.device("cpu")
    assert current.registered() is mesh
    mesh.close()
    assert current.registered() is None
    assert dict(os.environ) == environment
    assert not dist.is_initialized()


def test_init_has_as_many_threads_alone_as_among_many(no_launcher):
    for threads in (1, 2):
        mesh = instep.init(backend="gloo", threads=threads)
        assert torch.get_num_threads() == threads
        mesh.close()


def test_a_world_of_one_has_no_room_for_two_stages(no_launcher):
    with pytest.raises(ValueError, match=r"the fixed axes need a multiple of 2 ranks, but the world has 1"):
        instep.init(backend="gloo", pp=2)
    assert current.registered() is None
