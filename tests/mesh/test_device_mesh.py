"""torch's ``DeviceMesh`` in the place of a mesh: its ranks are those of the batch, and others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import instep
from instep.mesh import mesh as current
from instep.mesh.mesh import Mesh, get
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import mean_gradients, square
from tests.world import world


@contextmanager
def registered(mesh: DeviceMesh) -> Iterator[None]:
    """For a while, in a process that serves other tests too."""
    get.register_mesh(mesh)
    try:
        yield
    finally:
        get.register_mesh(None)


def grid(*names: str) -> DeviceMesh:
    """Ranks 0 1 and 2 3: along the first dim 0 and 2, 1 and 3; along the second 0 and 1, 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def ranks_of(model: DataParallel) -> tuple[int, ...]:
    ranks = tuple(model.group.ranks)
    model.close()
    return ranks


def trained(mesh: Mesh, ranks: list[int], **where: object) -> None:
    """The gradient is the mean over ``ranks``, and over no other."""
    module = filled(Dense())
    model = DataParallel(module, **where)
    square(model, ranks.index(mesh.rank)).backward()
    found = [p.grad.clone() for p in module.parameters()]
    assert ranks_of(model) == tuple(ranks)
    torch.testing.assert_close(found, mean_gradients(module, square, len(ranks)))


@world(4, by="process")
def test_the_dim_that_is_called_so_shares_out_the_batch(mesh: Mesh) -> None:
    along_first, along_second = (
        [mesh.rank % 2, mesh.rank % 2 + 2],
        [mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1],
    )
    trained(mesh, along_first, process_group=grid("dp", "tp"))
    trained(mesh, along_second, process_group=grid("pp", "data"))
    trained(mesh, along_second, process_group=grid("a", "b")["b"])
    trained(mesh, [0, 1, 2, 3], process_group=init_device_mesh("cpu", (4,)))


@world(4, by="process")
def test_one_that_is_registered_is_found_by_all_that_name_none(mesh: Mesh) -> None:
    with registered(grid("x", "y")["y"]):
        pair = (mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1)
        assert (get("grank"), get("rank"), get("ws")) == (mesh.rank, mesh.rank % 2, 2)
        assert tuple(dist.get_process_group_ranks(get("pg"))) == pair
        assert get("device") == torch.device("cpu")
        assert ranks_of(DataParallel(nn.Linear(3, 2))) == pair
        assert instep.mean(float(mesh.rank)) == sum(pair) / 2
        sharded = fully_shard(nn.Linear(64, 64), stage=2)
        assert tuple(sharded.group.ranks) == pair
        sharded.close()
        optimizer = ShardedOptimizer(nn.Linear(3, 2).parameters(), torch.optim.SGD, lr=0.1)
        assert tuple(optimizer.group.ranks) == pair
        optimizer.close()


@world(4, by="process")
def test_of_several_dims_all_ranks_are_meant_where_a_place_is_asked_for(mesh: Mesh) -> None:
    both = grid("dp", "tp")
    assert (get("rank", both), get("ws", both), get("pg", both)) == (mesh.rank, 4, dist.group.WORLD)
    assert (get("rank", both["dp"]), get("ws", both["dp"])) == (mesh.rank // 2, 2)
    with registered(both):
        assert (get("rank"), get("ws"), get("pg")) == (mesh.rank, 4, dist.group.WORLD)
    half = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "x"))["dp", "x"]
    with pytest.raises(ValueError, match=r"no group has all ranks of"):
        get("pg", half)


@world(4, by="process")
def test_a_dim_that_nothing_would_use_is_refused_unless_it_is_passed(mesh: Mesh) -> None:
    unused = r"DeviceMesh of dp\(2\) \* tp\(2\): .* nothing would use tp, whose"
    with registered(grid("dp", "tp")), pytest.raises(ValueError, match=unused):
        DataParallel(nn.Linear(3, 2))
    assert len(ranks_of(DataParallel(nn.Linear(3, 2), process_group=grid("dp", "tp")))) == 2


@world(4, by="process")
def test_a_mesh_that_does_not_say_which_ranks_is_refused_in_words(mesh: Mesh) -> None:
    unnamed = r"DeviceMesh of dim 0\(2\) \* dim 1\(2\): expected one dim, or one"
    two = r"dp_replicate and dp_shard would share out .*init\(dp=\.\.\., shard="
    for use in (get.register_mesh, lambda m: DataParallel(nn.Linear(3, 2), process_group=m)):
        with pytest.raises(ValueError, match=unnamed):
            use(init_device_mesh("cpu", (2, 2)))
        with pytest.raises(ValueError, match=two):
            use(grid("dp_replicate", "dp_shard"))
    with pytest.raises(TypeError, match=r"expected a mesh of instep.init.* got a ProcessGroup"):
        get.register_mesh(dist.group.WORLD)
    assert current.registered_mesh() is None
