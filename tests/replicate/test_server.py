"""The parameter server: the bits of ``DataParallel``, one optimizer, errors on all ranks, refusals."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import Desync, PeerLost
from instep.mesh.mesh import Mesh
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from tests.parity import assert_same_bits, filled, momentum
from tests.replicate.nets import Dense
from tests.replicate.replicas import equal_everywhere, square
from tests.world import world


def with_statistics() -> nn.Module:
    """Whose running statistics differ between ranks until those of the first rank are taken."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("kind", [Dense, with_statistics])
@world(3)
def test_plain_steps_have_the_bits_of_data_parallel(mesh: Mesh, kind: Callable[[], nn.Module]) -> None:
    found = []
    for with_server in (True, False):
        module = filled(kind())
        module.apply(lambda part: getattr(part, "reset_parameters", int)() if mesh.rank else None)
        optimizer = momentum(module.parameters())
        model: Any = ParameterServer(module, optimizer, mesh) if with_server else DataParallel(module, mesh)
        for _ in range(3):
            optimizer.zero_grad()
            square(model, mesh.rank).backward()
            (model if with_server else optimizer).step()
        model.close()
        found.append([*module.state_dict().items()])
    assert_same_bits(*found)
    assert equal_everywhere(mesh, [x for _, x in found[0]])


@pytest.fixture
def noticed() -> threading.Event:
    return threading.Event()


@world(2, timeout_s=2)
def test_a_rank_that_leaves_early_or_never_comes_is_named(mesh: Mesh, noticed: threading.Event) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    if mesh.rank == 1:
        for _ in server.micro_batches(4):
            break
    else:
        with pytest.raises(Desync, match="rank 1 left step 0"):  # noqa: PT012
            for micro_batch in server.micro_batches(4):
                square(server, micro_batch.index).backward()
        with pytest.raises(ValueError, match=r"step\(\) without a gradient"):
            server.step()
        with pytest.raises(PeerLost, match=r"never came: rank 1"):
            square(server, 0).backward()
        noticed.set()
    assert noticed.wait(30)
    server.close()


@world(2)
def test_an_update_that_fails_on_the_server_is_an_error_on_all_ranks(mesh: Mesh) -> None:
    module = filled(Dense())
    optimizer = momentum(module.parameters())
    server = ParameterServer(module, optimizer, mesh)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    square(server, mesh.rank).backward()
    with pytest.raises(ZeroDivisionError if server.is_server else Desync, match="division by zero"):
        server.step()
    handle.remove()
    assert_same_bits([*module.named_parameters()], [*filled(Dense()).named_parameters()])
    square(server, mesh.rank).backward()
    server.step()
    assert equal_everywhere(mesh, module.parameters())
    server.close()


def second_gradient(server: ParameterServer, path: Path) -> None:
    for _ in range(2):
        square(server, 0).backward()


def run(model: Any, server: ParameterServer, path: Path) -> None:
    next(iter(instep.Run(path / "run").steps(1, model=model, optimizer=server.optimizer)))


def sharded(model: nn.Module) -> instep.ShardedOptimizer:
    return instep.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


INSTEAD = "for comparison, without Run, checkpoints and copies: use instep.DataParallel"
TRAINS = "a ParameterServer, for comparison, trains these: use instep.DataParallel"
NAMED = "strategy 'server' is a wrapper of its own: use instep.ParameterServer"
REFUSALS: list[tuple[str, Callable[[ParameterServer, Path], object]]] = [
    (r"a second gradient before step\(\)", second_gradient),
    (r"step\(\) without a gradient", lambda server, path: server.step()),
    (INSTEAD, lambda server, path: instep.save(path, step=1, model=server)),
    (INSTEAD, lambda server, path: run(server, server, path)),
    (INSTEAD, lambda server, path: copy.deepcopy(server)),
    (TRAINS, lambda server, path: run(server.module, server, path)),
    (TRAINS, lambda server, path: sharded(server)),
    ("instep's ParameterServer already", lambda server, path: instep.fully_shard(server)),
    (NAMED, lambda server, path: DataParallel(Dense(), strategy="server")),
    ("plain torch optimizer, got ShardedO", lambda *_: ParameterServer(net := Dense(), sharded(net))),
    ("plain torch optimizer, got NoneType", lambda server, path: ParameterServer(Dense(), None)),
    ("that the module lacks", lambda server, path: ParameterServer(nn.Linear(1, 1), server.optimizer)),
]


@pytest.mark.parametrize(("message", "refused"), REFUSALS)
def test_what_is_refused_says_what_to_do(message: str, refused: Any, tmp_path: Path) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()))
    with pytest.raises((ValueError, TypeError), match=message):
        refused(server, tmp_path)
    server.close()
