"""The parameter server, and replicas that are threads: errors and refusals (bits: test_placements.py)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import Desync, PeerLost
from instep.launch.launch import launch
from instep.mesh.mesh import Mesh
from instep.replicate.replica import tree_sum
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.step.micro_batches import MicroBatch
from tests.parity import _tree_sum, assert_same_bits, filled, momentum, numbers
from tests.replicate.nets import Dense, Segments, mean_square
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


def batch(num_rows: int) -> Tensor:
    return numbers(num_rows, 6, key="batch")


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "dense": (Dense, lambda model: model(batch(7)).square().mean()),
    "fewer rows than replicas": (Dense, lambda model: model(batch(2)).square().mean()),
    "checkpointed": (lambda: Segments(False), lambda model: model(batch(5)).square().mean()),
    "reentrant": (lambda: Segments(True), lambda model: model(batch(5).requires_grad_()).sum()),
    "recurrent": (Recurrent, lambda model: model(numbers(5, 3, 6, key="x")).square().sum()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_the_gradient_of_a_split_batch_is_that_of_the_whole_batch(name: str, num_replicas: int) -> None:
    make, loss = CASES[name]
    alone, replicas = filled(make()), ThreadedReplicas(filled(make()), num_replicas)
    for _ in range(2):  # gradients accumulate
        expected, ours = loss(alone), loss(replicas)
        expected.backward()
        ours.backward()
        torch.testing.assert_close(ours, expected)
    for x, y in zip(gradients(replicas), gradients(alone), strict=True):
        torch.testing.assert_close(x, y)


def test_every_run_has_the_same_bits_those_of_the_tree_over_the_parts() -> None:
    module, parts = filled(Dense()), []
    for part in batch(13).tensor_split(5):
        parts.append(torch.autograd.grad(module(part).square().sum(), [*module.parameters()]))
    expected = [("g", _tree_sum(list(column))) for column in zip(*parts, strict=True)]
    for _ in range(20):
        ThreadedReplicas(module, 5)(batch(13)).square().sum().backward()
        assert_same_bits([("g", x) for x in gradients(module)], expected)
        module.zero_grad()
    with pytest.raises(AssertionError):  # a control: another order has other bits
        assert_same_bits([("g", x) for x in tree_sum(parts[::-1])], expected)


class Says(nn.BatchNorm1d):
    """Waits until both replicas compute; returns their state."""

    both = threading.Barrier(2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.both.wait(30)
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x.T).dtype
        return {"y": super().forward(x), "rows": torch.tensor(len(x)), "state": state}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (torch.no_grad, (False, False, torch.float32)),
        (torch.inference_mode, (False, True, torch.float32)),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), (True, False, torch.bfloat16)),
    ],
)
def test_replicas_compute_at_once_in_the_caller_s_state_and_the_first_keeps_buffers(state, expected) -> None:
    module, alone = Says(6), nn.BatchNorm1d(6)
    with state():
        found = ThreadedReplicas(module, 2)(batch(7))
        alone(batch(7)[:4])
    assert found["state"] == expected
    assert found["y"].shape == (7, 6) and found["rows"].tolist() == [4, 3]
    assert_same_bits([*module.named_buffers()], [*alone.named_buffers()])


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.add_(0.5)
        return super().forward(x)


def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        change(module := nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
        return module

    return make


def body(act: Callable[[nn.Module, MicroBatch], object]) -> Callable[[ThreadedReplicas, Path], object]:
    return lambda replicas, path: replicas.micro_batches(4, act)


BYPASS = changed(lambda module: module[0].compile(backend="eager"))  # which keeps the layer
HOOKED = changed(lambda module: module[0].bias.register_hook(lambda gradient: 2 * gradient))
DECLARE = body(lambda model, one: mean_square(model, one, 0))
IN_THE_PLACE = "for comparison, without Run, checkpoints, copies: use instep.DataParallel"
DROPOUT = "forward drew random numbers, .* use instep.DataParallel"
OF_THREADS: list[tuple[str, Callable[[], nn.Module], Callable[[ThreadedReplicas, Path], object]]] = [
    (IN_THE_PLACE, Dense, lambda replicas, path: instep.save(path, step=1, model=replicas)),
    (IN_THE_PLACE, Dense, lambda replicas, path: next(iter(instep.Run(path).steps(1, model=replicas)))),
    (IN_THE_PLACE, Dense, lambda replicas, path: copy.deepcopy(replicas)),
    ("instep's ThreadedReplicas already", Dense, lambda replicas, path: instep.fully_shard(replicas)),
    ("an int of at least 1", Dense, lambda replicas, path: ThreadedReplicas(replicas.module, 0)),
    (DROPOUT, lambda: Dense(dropout=0.5), lambda replicas, path: replicas(batch(4))),
    (DROPOUT, lambda: Dense(dropout=0.5), DECLARE),
    (r"one length along dim 0, .* \[3, 4\]", Dense, lambda r, path: r(batch(3), batch(4))),
    ("forward changed buffer 'running_mean'", lambda: Own(6), DECLARE),
    (r"gradient of '0\.weight' came past its replica: use instep\.DataParallel", BYPASS, DECLARE),
    (r"'0\.bias' has a hook, .* use instep\.DataParallel", HOOKED, DECLARE),
    ("micro-batch 0 ended without a gradient", Dense, body(lambda model, one: None)),
    ("expected a non-negative int", Dense, body(lambda model, one: setattr(one, "weight", 0.5))),
    ("of the step sum to 0", Dense, body(lambda model, one: setattr(one, "weight", 0))),
    ("mat1 and mat2 shapes", Dense, body(lambda model, one: model(torch.ones(3, 5)))),
]


@pytest.mark.parametrize(("message", "make", "refused"), OF_THREADS)
def test_what_threads_refuse_leaves_no_gradient(message, make, refused, tmp_path) -> None:
    replicas = ThreadedReplicas(filled(make()), 2)
    with pytest.raises((ValueError, RuntimeError), match=message):
        refused(replicas, tmp_path)
    assert all(x is None for x in gradients(replicas))


def rank_of_two() -> None:
    instep.init(backend="gloo")
    with pytest.raises(ValueError, match=r"one of 2 ranks, .* use instep.DataParallel"):
        ThreadedReplicas(Dense(), 1)
    ThreadedReplicas(Dense(), 2, alone=True)


def test_one_of_several_ranks_does_not_train_alone_by_mistake() -> None:
    launch(rank_of_two, (), ranks=2)
