"""An axis of the registered mesh that nothing uses is refused by name: its ranks would train alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from instep.mesh import mesh as current
from instep.mesh.mesh import Mesh
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.world import world


def server(module: nn.Module) -> ParameterServer:
    return ParameterServer(module, torch.optim.SGD(module.parameters(), 0.1))


def sharded_optimizer(module: nn.Module) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)


USERS: list[Callable[[nn.Module], object]] = [DataParallel, server, sharded_optimizer, fully_shard]


def refused_by_all(mesh: Mesh, written: str, unused: str) -> None:
    current.get.register_mesh(mesh)
    for use in USERS:
        with pytest.raises(ValueError, match=rf"{written}.* nothing would use {unused}, .*init\(dp=-1\), or"):
            use(nn.Linear(3, 2))
    current.get.register_mesh(None)


@world(2, pp=2)
def test_a_pipeline_axis_without_a_pipeline_is_refused_by_all_that_replicate_or_shard(mesh: Mesh) -> None:
    refused_by_all(mesh, r"pp\(2\) \* dp\(1\) \* shard\(1\) \* tp\(1\) = 2 ranks", "pp")


@world(4, shard=2, tp=2)
def test_so_is_a_tensor_axis_beside_one_that_is_used(mesh: Mesh) -> None:
    refused_by_all(mesh, r"pp\(1\) \* dp\(1\) \* shard\(2\) \* tp\(2\) = 4 ranks", "tp")


@world(2, pp=2)
def test_a_mesh_or_an_axis_that_is_named_is_taken(mesh: Mesh) -> None:
    for given, size in ((mesh, 1), (mesh["dp"], 1), (mesh["pp"], 2)):
        model = DataParallel(nn.Linear(3, 2), process_group=given)
        assert model.group.size == size
        model.close()
    current.get.register_mesh(mesh["pp"])
    model = DataParallel(nn.Linear(3, 2))
    assert model.group.size == 2
    model.close()
    current.get.register_mesh(None)
