"""A mesh has groups per axis over the right ranks, and leaves none; the registered one answers its thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import instep
from instep.mesh import mesh as current
from instep.mesh.mesh import Axis, Mesh, build, get
from tests.world import world

OPERATION = "the gathering of a test"


def gathered(axis: Axis, value: int) -> list[int]:
    out = torch.empty(axis.size, dtype=torch.int64)
    axis.group.all_gather(out, torch.tensor([value]), OPERATION)
    return out.tolist()


def members(axis: Axis, rank: int) -> list[int]:
    """The global ranks that one really meets on ``axis``."""
    return gathered(axis, rank)


@world(4, dp=2, pp=2)
def test_a_mesh_tells_its_ranks_and_its_place(mesh):
    pp, dp = divmod(mesh.rank, 2)
    assert repr(mesh) == f"<mesh pp(2) * dp(2) = 4 ranks on cpu; this is rank {mesh.rank}, pp={pp}, dp={dp}>"
    assert repr(mesh["dp"]) == f"<mesh dp(2) = 2 ranks on cpu; this is rank {mesh.rank}, dp={dp}>"
    assert (mesh.size, mesh["pp"].size, mesh["pp"].world_size, mesh["tp"].size) == (4, 2, 4, 1)


@world(4, dp=2, pp=2)
def test_two_by_two(mesh):
    pp, dp = divmod(mesh.rank, 2)  # dp is faster, so its groups are neighbours
    assert mesh.coordinates == {"pp": pp, "dp": dp, "shard": 0, "ep": 0, "tp": 0}
    expected = {
        "pp": [dp, dp + 2],
        "dp": [2 * pp, 2 * pp + 1],
        "shard": [mesh.rank],
        "ep": [mesh.rank],
        "tp": [mesh.rank],
    }
    for name, axis in mesh.along.items():
        assert members(axis, mesh.rank) == list(axis.ranks) == expected[name]
        assert (axis.name, axis.size, axis.rank) == (name, len(axis.ranks), axis.ranks.index(mesh.rank))
    assert members(mesh.world, mesh.rank) == [0, 1, 2, 3]
    assert mesh.along["tp"].pg is None


@world(2)
def test_an_axis_has_the_user_s_group_and_as_many_more_as_are_asked_for(mesh):
    axis = mesh.along["dp"]
    groups = [axis.group, axis.duplicate(), axis.duplicate()]
    assert axis.pg not in [group.pg for group in groups]
    assert len({id(group.pg) for group in groups}) == 3
    assert {(group.ranks, group.rank, group.timeout_s) for group in groups} == {((0, 1), mesh.rank, 20.0)}


def test_a_world_of_one_has_axes_but_no_groups():
    mesh = build(None, 0, 1)
    assert mesh.coordinates == {"pp": 0, "dp": 0, "shard": 0, "ep": 0, "tp": 0}
    for axis in (*mesh.along.values(), mesh.world):
        assert (axis.pg, axis.size, axis.rank, axis.ranks) == (None, 1, 0, (0,))
        assert axis.pg is axis.duplicate().pg is None
        assert gathered(axis, 5) == [5]
    assert not dist.is_initialized()
    mesh.close()


@world(4, by="process", dp=2, tp=2)
def test_torch_knows_the_user_s_groups_until_the_mesh_is_closed(mesh):
    groups = {name: axis.pg for name, axis in mesh.along.items() if axis.pg is not None}
    for name, pg in groups.items():
        assert tuple(dist.get_process_group_ranks(pg)) == mesh.axes.peers(name, mesh.rank)
        x = torch.tensor([mesh.rank])
        dist.all_reduce(x, group=pg)
        assert x.item() == sum(mesh.axes.peers(name, mesh.rank))
        assert gathered(mesh.along[name], mesh.rank) == list(mesh.axes.peers(name, mesh.rank))
    mesh.close()
    for pg in groups.values():
        with pytest.raises((KeyError, ValueError)):
            dist.get_process_group_ranks(pg)
    assert dist.is_initialized()  # the default group is not the mesh's
    assert dist.get_world_size() == 4


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


def test_an_unknown_question_is_refused_with_the_known_ones():
    for mesh in (None, alone()):
        with pytest.raises(ValueError, match=r"get\('size'\): expected one of grank, rank, ws, pg"):
            get("size", mesh)


def test_without_a_mesh_there_is_no_answer_but_a_way_out():
    with pytest.raises(ValueError, match=r"get\('rank'\): no mesh yet: call instep.init\(\) first"):
        get("rank")


def test_a_mesh_is_forgotten_only_by_itself():
    first, second = alone(), alone()
    get.register_mesh(first)
    get.register_mesh(second)
    current.unregister(first)
    assert current.registered_mesh() is second
    current.unregister(second)
    assert current.registered_mesh() is None


def test_other_threads_see_the_main_thread_s_mesh_or_their_own():
    """They saw none, so that instep.mean of a thread was that of this rank alone, without a word."""
    mesh, own = alone(), alone()

    def seen(register: Mesh | None = None) -> object:
        if register is not None:
            get.register_mesh(register)
        return current.registered_mesh()

    get.register_mesh(mesh)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(seen).result() is mesh
        assert thread.submit(seen, own).result() is own
        assert current.registered_mesh() is mesh
    get.register_mesh(None)


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
    assert current.registered_mesh() is mesh
    mesh.close()
    assert current.registered_mesh() is None
    assert dict(os.environ) == environment
    assert not dist.is_initialized()
