"""The parameter server: the bits of the others, another way for the bytes, one optimizer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from instep.errors import PeerLost
from instep.events import Event
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from tests.parity import (
    Training,
    adamw,
    assert_same_bits,
    bits_of_one,
    filled,
    momentum,
    numbers,
    world_of_one,
)
from tests.replicate.nets import OTHER, PLAIN, Dense, mean_square
from tests.replicate.replicas import equal_everywhere, square
from tests.state_oracle import state_entries
from tests.world import world

WITHOUT_RANDOM = PLAIN | OTHER


def train(training: Training, mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The declared steps of ``training`` with a server."""
    module = filled(training.module())
    optimizer = training.optimizer(module.parameters())
    server = ParameterServer(module, optimizer, mesh, find_unused_parameters=True)
    for step in range(training.num_steps):
        for micro_batch in server.micro_batches(training.num_leaves):
            training.leaf_step(module, micro_batch, step)
        if training.clip is not None:
            clip_grad_norm_(module.parameters(), training.clip)
        server.step()
    server.close()
    return module, optimizer


def assert_bits_of_one(mesh: Mesh, training: Training) -> None:
    """Weights everywhere, and moments on the server, have the bits of ``DataParallel`` on one rank."""
    module, optimizer = train(training, mesh)
    expected = bits_of_one(training)
    ours = state_entries(module, optimizer)
    if mesh.rank == 0:
        assert_same_bits(ours, expected)
    else:
        assert_same_bits(ours, expected[: len(state_entries(module))])
        assert not optimizer.state
    assert all(parameter.grad is None for parameter in module.parameters())


@world(3)
def test_a_server_and_two_workers_give_the_bits_of_one(mesh: Mesh) -> None:
    for training in WITHOUT_RANDOM.values():
        assert_bits_of_one(mesh, training)


def undeclared(module: nn.Module, mesh: Mesh, *, with_server: bool, num_steps: int = 3) -> list[Tensor]:
    """The weights after plain steps, every rank on samples of its own."""
    optimizer = momentum(module.parameters())
    if with_server:
        server = ParameterServer(module, optimizer, mesh)
        for _ in range(num_steps):
            server.backward_and_step(square(module, mesh.rank))
        server.close()
    else:
        model = DataParallel(module, process_group=mesh)
        for _ in range(num_steps):
            optimizer.zero_grad()
            square(model, mesh.rank).backward()
            optimizer.step()
        model.close()
    return [*module.state_dict().values()]


class Statistics(nn.Module):
    """Running statistics, which differ between ranks until the first rank's win."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("kind", [Dense, Statistics])
@world(3)
def test_plain_steps_give_the_bits_of_data_parallel(mesh: Mesh, kind: type[nn.Module]) -> None:
    with_server = undeclared(filled(kind()), mesh, with_server=True)
    without = undeclared(filled(kind()), mesh, with_server=False)
    assert_same_bits([("x", x) for x in with_server], [("x", x) for x in without])
    assert equal_everywhere(mesh, with_server)


@world(2)
def test_plain_backwards_before_the_last_are_part_of_the_gradient(mesh: Mesh) -> None:
    module, alone = filled(Dense()), filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    optimizer = momentum(alone.parameters())
    square(module, mesh.rank).backward()
    server.backward_and_step(square(module, mesh.rank + 2))
    (sum(square(alone, i) for i in range(4)) / 2).backward()
    optimizer.step()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    server.close()


@world(3)
def test_the_workers_start_with_the_server_s_values_and_have_no_gradient_after_backward(mesh: Mesh) -> None:
    torch.manual_seed(mesh.rank)
    module = Dense()
    server = ParameterServer(module, adamw(module.parameters()) if mesh.rank == 0 else None, mesh)
    assert equal_everywhere(mesh, module.parameters())
    server.backward(square(module, mesh.rank))
    assert [p.grad is None for p in module.parameters()] == [not server.is_server] * 6
    server.step()
    assert equal_everywhere(mesh, module.parameters())
    assert server.step_mode == "undeclared"
    server.close()


def declared_step(server: ParameterServer, num_leaves: int) -> None:
    for micro_batch in server.micro_batches(num_leaves):
        mean_square(server.module, micro_batch, 0)


def spans(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


@world(3)
def test_the_server_s_link_carries_w_minus_one_gradients_in_and_weights_out(mesh: Mesh) -> None:
    module = filled(nn.Linear(16, 4, bias=False))  # 256 bytes, a multiple of what addresses are aligned to
    server = ParameterServer(module, adamw(module.parameters()), mesh)
    server.backward_and_step(
        numbers(2, 16, key=f"{mesh.rank}").requires_grad_().matmul(module.weight.T).sum()
    )
    events = list(server.recorder.events)
    size = server._reducer.buckets[0].nbytes
    bytes_of = {name: [event.bytes for event in spans(events, name)] for name in ("send", "receive")}
    if server.is_server:
        assert bytes_of == {"send": [2 * size], "receive": [2 * size]}
        (receive,), (aggregate,), (update,), (send,) = (
            spans(events, name) for name in ("receive", "aggregate", "update", "send")
        )
        times = [x for event in (receive, aggregate, update, send) for x in (event.start_ns, event.end_ns)]
        assert times == sorted(times)
    else:
        assert bytes_of == {"send": [size], "receive": [size]}
        (send,), (receive,) = (spans(events, name) for name in ("send", "receive"))
        (idle,) = (event for event in spans(events, "parameter update") if event.peer == 0)
        assert send.end_ns <= idle.start_ns <= idle.end_ns <= receive.start_ns
        assert not spans(events, "update") and not spans(events, "aggregate")
    server.close()


@world(3)
def test_a_worker_sends_every_root_of_its_micro_batches(mesh: Mesh) -> None:
    """Of 8 leaves rank 1 has 3, 4 and 5, two nodes of the tree; rank 2 has 6 and 7, one node."""
    module = filled(Dense())
    server = ParameterServer(module, adamw(module.parameters()), mesh)
    declared_step(server, 8)
    size = server._reducer.buckets[0].nbytes
    (moved,) = spans(list(server.recorder.events), "receive" if server.is_server else "send")
    assert moved.bytes == {0: 3, 1: 2, 2: 1}[mesh.rank] * size
    server.step()
    server.close()


@world(2, timeout_s=2)
def test_survivors_go_on_over_a_new_group_with_the_weights_of_its_server(mesh: Mesh) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    if server.is_server:
        with pytest.raises(PeerLost):
            server.backward(square(module, 0))
    else:
        module.layers[0].weight.data.add_(1)
    server.rebind(mesh)
    assert equal_everywhere(mesh, module.parameters())
    server.backward_and_step(square(module, mesh.rank))
    assert equal_everywhere(mesh, module.parameters())
    assert_same_bits(
        [("x", x) for x in module.state_dict().values()],
        [("x", x) for x in undeclared(filled(Dense()), mesh, with_server=False, num_steps=1)],
    )
    server.close()


def test_a_server_that_nobody_holds_is_gone_and_leaves_the_module_as_it_was() -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), world_of_one())
    alive = weakref.ref(server._model)
    del server
    gc.collect()
    assert alive() is None
    square(module, 0).backward()
    assert module.layers[0].weight.grad is not None


@world(2)
def test_a_step_ends_for_the_server_and_its_worker_when_both_have_the_weights(mesh: Mesh) -> None:
    module = filled(Dense())
    server = ParameterServer(module, adamw(module.parameters()), mesh)
    for _ in range(2):
        declared_step(server, 4)
        server.step()
    events = list(server.recorder.events)
    assert [event.step for event in spans(events, "step")] == [0, 1]
    for name in ("update", "send", "receive", "parameter update"):
        assert {event.step for event in spans(events, name)} <= {0, 1}, name
    last = max(event.end_ns for event in spans(events, "parameter update") if event.step == 0)
    (first, _) = spans(events, "step")
    assert first.start_ns < last <= first.end_ns
    server.close()
