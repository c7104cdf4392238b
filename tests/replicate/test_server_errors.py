"""The parameter server when something is wrong: all ranks learn what, and the next step works."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from instep.errors import Desync, PeerLost
from instep.mesh.mesh import Mesh
from instep.replicate.server import WORD_BYTES, Declined, ParameterServer
from instep.replicate.strategies import find
from tests.parity import (
    adamw,
    assert_same_bits,
    filled,
    momentum,
)
from tests.replicate.nets import Dense
from tests.replicate.replicas import equal_everywhere, square
from tests.replicate.test_server import declared_step
from tests.world import world


@world(2)
def test_an_optimizer_over_parameters_that_are_not_the_module_s_is_refused_on_all_ranks(mesh: Mesh) -> None:
    module, other = filled(Dense()), nn.Linear(2, 3)
    mine = [*module.parameters(), *other.parameters()] if mesh.rank == 1 else module.parameters()
    teller = "" if mesh.rank == 1 else "rank 1: "
    match = rf"^{teller}parameter 6 of group 0 .* \(3, 2\), is none of the module"
    with pytest.raises(ValueError, match=match):
        ParameterServer(module, adamw(mine), mesh)
    teller = "" if mesh.rank == 0 else "rank 0: "
    with pytest.raises(ValueError, match=f"^{teller}expected an optimizer on the parameter server, got None"):
        ParameterServer(module, None, mesh)
    with pytest.raises(ValueError, match=r"^expected a torch\.optim\.Optimizer, got Dense") as caught:
        ParameterServer(module, module, mesh)
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)  # each has its own, one reports it


@pytest.mark.parametrize("words", ["gradient norm is nan", "ä" * WORD_BYTES, ""])
@world(3)
def test_an_update_that_the_server_declines_is_declined_on_all_ranks_in_its_words(
    mesh: Mesh, words: str
) -> None:
    module = filled(Dense())
    optimizer = momentum(module.parameters())
    server = ParameterServer(module, optimizer, mesh)

    def decline(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        raise Declined(words)

    hook = optimizer.register_step_pre_hook(decline)
    with pytest.raises(Declined) as caught:
        server.backward_and_step(square(module, mesh.rank))
    told = str(caught.value)
    assert told == words if mesh.rank == 0 else told in (words[: len(told)], "declined")
    assert mesh.rank == 0 or told
    assert_same_bits([*module.named_parameters()], [*filled(Dense()).named_parameters()])
    assert all(p.grad is None for p in module.parameters())
    hook.remove()
    server.backward_and_step(square(module, mesh.rank))
    assert equal_everywhere(mesh, module.parameters())
    server.close()


@world(2)
def test_a_worker_without_a_gradient_says_so_and_the_server_does_not_update(mesh: Mesh) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    loss = square(filled(Dense()) if mesh.rank == 1 else module, mesh.rank)
    kind, message = (
        (ValueError, "backward\\(\\) on rank 1 gave no parameter of the module a gradient"),
        (Desync, "rank 1 left step 0"),
    )[mesh.rank == 0]
    with pytest.raises(kind, match=message):
        server.backward(loss)
    with pytest.raises(ValueError, match="step\\(\\) without a gradient"):
        server.step()
    assert_same_bits([*module.named_parameters()], [*filled(Dense()).named_parameters()])
    server.backward_and_step(square(module, mesh.rank))
    assert equal_everywhere(mesh, module.parameters())
    server.close()


@world(2)
def test_a_worker_that_raises_in_backward_does_not_leave_the_server_waiting(mesh: Mesh) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    if mesh.rank == 1:
        handle = module.layers[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError if mesh.rank == 1 else Desync):
        server.backward_and_step(square(module, mesh.rank))
    if mesh.rank == 1:
        handle.remove()
    server.backward_and_step(square(module, mesh.rank))
    assert equal_everywhere(mesh, module.parameters())
    server.close()


@pytest.fixture
def noticed() -> threading.Event:
    return threading.Event()


@world(3)
def test_another_number_of_micro_batches_on_a_worker_is_an_error_on_all_ranks(mesh: Mesh) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    with pytest.raises(Desync, match="rank 2 expects 7 micro-batches in the step; ranks 0, 1: 6"):
        declared_step(server, 7 if mesh.rank == 2 else 6)
    server.close()


@world(2)
def test_a_worker_that_leaves_the_loop_is_named_to_the_server(mesh: Mesh, noticed: threading.Event) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    if mesh.rank == 1:
        for _ in server.micro_batches(4):
            break
    else:
        with pytest.raises(Desync, match="rank 1 left step 0"):
            declared_step(server, 4)
        noticed.set()
    assert noticed.wait(30)
    server.close()


@world(2)
def test_an_update_that_fails_on_the_server_is_an_error_on_its_workers(mesh: Mesh) -> None:
    module = filled(Dense())
    optimizer = momentum(module.parameters())
    server = ParameterServer(module, optimizer, mesh)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if server.is_server else pytest.raises(Desync, match="could not"):
        server.backward_and_step(square(module, mesh.rank))
    handle.remove()
    assert_same_bits([*module.named_parameters()], [*filled(Dense()).named_parameters()])
    server.backward_and_step(square(module, mesh.rank))
    assert equal_everywhere(mesh, module.parameters())
    server.close()


@world(2)
def test_a_second_gradient_before_the_step_is_refused(mesh: Mesh) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    server.backward(square(module, mesh.rank))
    with pytest.raises(ValueError, match=r"backward\(\) before step\(\)"):
        server.backward(square(module, mesh.rank))
    with pytest.raises(ValueError, match=r"micro_batches\(\) before step\(\)"):
        next(server.micro_batches(2))
    server.step()
    server.close()


@world(2, timeout_s=2)
def test_a_worker_that_never_comes_is_found_by_the_deadline(mesh: Mesh, noticed: threading.Event) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    if server.is_server:
        with pytest.raises(PeerLost, match=r"never came: rank 1") as failure:
            server.backward(square(module, 0))
        assert failure.value.ranks == (1,)
        noticed.set()
    assert noticed.wait(30)
    server.close()


@world(2, timeout_s=2)
def test_a_server_that_never_updates_is_found_by_the_deadline(mesh: Mesh, noticed: threading.Event) -> None:
    module = filled(Dense())
    server = ParameterServer(module, momentum(module.parameters()), mesh)
    server.backward(square(module, mesh.rank))
    if not server.is_server:
        with pytest.raises(PeerLost, match=r"rank 1 waited .* in the server's report on its update"):
            server.step()
        noticed.set()
    assert noticed.wait(30)
    server.close()


def test_the_name_of_a_wrapper_is_no_strategy_and_leads_to_it() -> None:
    for name, wrapper in (("server", "ParameterServer"), ("threads", "ThreadedReplicas")):
        with pytest.raises(
            ValueError, match=f"strategy '{name}' is a wrapper of its own: use instep.{wrapper}"
        ):
            find(name)
