"""Replicas go on over other ranks, in the same modules, parameters and optimizers, with the same bits."""

from __future__ import annotations

import pytest

from instep.mesh.mesh import Mesh
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.state.homes import offered
from tests.parity import filled, numbers, world_of_one
from tests.rejoin import Kind, Meetings, in_generations, lose_rank, replicated, served
from tests.replicate.nets import Dense, Residual, Tied, images, mean_square, next_token
from tests.replicate.replicas import assert_mean_gradients, square
from tests.world import world

KINDS = {
    "bucketed": Kind(Dense, mean_square, replicated, {"bucket_cap_mb": 1e-4}),
    "overlap": Kind(Tied, next_token, replicated, {"strategy": "overlap"}),
    "flat": Kind(Tied, next_token, replicated, {"strategy": "flat"}),
    "naive": Kind(Tied, next_token, replicated, {"strategy": "naive"}),
    "running statistics": Kind(Residual, images),
    "server": Kind(Tied, next_token, served),
}


@pytest.fixture
def meetings() -> Meetings:
    return Meetings(3)


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_two_ranks_then_three_then_one_give_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, meetings: Meetings
) -> None:
    in_generations(kind, meetings, mesh.rank, "gloo", [2, 3, 1, 3])


@world(3, deadline_s=120)
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shm"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_survivors_of_a_rank_that_is_lost_in_backward_give_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, backend: str, meetings: Meetings
) -> None:
    lose_rank(kind, meetings, mesh.rank, backend, "backward")


@world(3, deadline_s=120)
@pytest.mark.parametrize("strategy", ["bucketed", "naive"])
def test_a_rank_may_be_lost_in_a_step_that_declares_nothing(
    mesh: Mesh, strategy: str, meetings: Meetings
) -> None:
    lose_rank(KINDS[strategy], meetings, mesh.rank, "gloo", "undeclared")


@world(3, deadline_s=120)
def test_a_rank_may_be_lost_while_the_server_updates(mesh: Mesh, meetings: Meetings) -> None:
    lose_rank(KINDS["server"], meetings, mesh.rank, "gloo", "update")


@world(2)
def test_synchronisation_stays_off_where_a_loop_has_turned_it_off(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    model.require_backward_grad_sync = False
    square(model, mesh.rank).backward()
    wrapped = offered(model)
    wrapped.leave()
    wrapped.join(mesh)
    assert not model.require_backward_grad_sync and model.step_mode is None
    assert all(p.grad is None for p in model.parameters())
    square(model, mesh.rank).backward()
    model.sync_gradients()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


def test_replicas_in_threads_drop_what_they_have() -> None:
    model = ThreadedReplicas(filled(Dense()), 2)
    model(numbers(4, 6, key="x")).square().mean().backward()
    wrapped = offered(model)
    wrapped.leave()
    assert all(p.grad is None for p in model.parameters())
    wrapped.join(world_of_one())
    model(numbers(4, 6, key="x")).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.close()
