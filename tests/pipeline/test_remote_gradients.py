"""Norms and scalers over gradients of which some ranks of a pipeline have all, and others none."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce import norm
from tests.world import world

MAX_NORM = 0.01
SCALE = 1024.0


def net() -> nn.Sequential:
    """Not drawn: ranks that are threads share the generator."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape))
    return made


def stepped(mesh: Mesh, module: nn.Sequential, factor: float = 1.0) -> instep.Pipeline:
    model = instep.Pipeline(module, mesh, "1f1b", 2)
    model.step(lambda output, _: output.square().mean() * factor, lambda _: torch.ones(2, 4))
    return model


def alone(module: nn.Sequential, max_norm: float, clipped: Iterator[nn.Parameter]) -> tuple[float, nn.Module]:
    """The norm in one process, and the module, whose gradients are clipped."""
    module(torch.ones(2, 4)).square().mean().backward()
    return float(instep.clip_grad_norm_(clipped, max_norm)), module


def assert_same_gradients(piped: instep.Pipeline, expected: nn.Module) -> None:
    assert piped.home is not None
    for p, other in zip(piped.parameters(), expected.parameters(), strict=True):
        if piped.home.holds(p) and other.grad is not None:
            assert p.grad is not None and torch.equal(p.grad, other.grad)


@pytest.fixture
def summed_alone(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradients whose squares a rank sums for itself, and tells no other rank."""
    found: list[Tensor] = []
    squares = norm._square_sums

    def told(gradients: list[Tensor]) -> list[float]:
        found.extend(gradients)
        return squares(gradients)

    monkeypatch.setattr(norm, "_square_sums", told)
    return found


@world(2, pp=2, dp=1)
def test_squares_of_a_gradient_are_summed_once_for_all_ranks(mesh: Mesh, summed_alone: list[Tensor]) -> None:
    module = net()
    expected, whole = alone(module, MAX_NORM, module.parameters())
    mesh.world.group.barrier("one process has clipped")
    summed_alone.clear()
    mesh.world.group.barrier("what one process sums is counted")
    model = stepped(mesh, net())
    assert float(instep.clip_grad_norm_(model.parameters(), MAX_NORM)) == expected > MAX_NORM
    assert_same_gradients(model, whole)
    mesh.world.group.barrier("all have clipped")
    assert not summed_alone
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("frozen", [0, 1])
def test_the_norm_of_a_model_with_a_frozen_stage_is_that_of_one_rank(mesh: Mesh, frozen: int) -> None:
    modules = net(), net()
    for module in modules:
        module[frozen].requires_grad_(False)
    expected, whole = alone(modules[0], MAX_NORM, modules[0].parameters())
    model = stepped(mesh, modules[1])
    assert float(instep.clip_grad_norm_(model.parameters(), MAX_NORM)) == expected > MAX_NORM
    assert_same_gradients(model, whole)
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("number", [0, 1])
def test_the_layers_of_one_stage_can_be_clipped_alone(mesh: Mesh, number: int) -> None:
    module = net()
    expected, whole = alone(module, MAX_NORM, module[number].parameters())
    module = net()
    model = stepped(mesh, module)
    assert float(instep.clip_grad_norm_(module[number].parameters(), MAX_NORM)) == expected > MAX_NORM
    assert_same_gradients(model, whole)
    model.zero_grad()
    assert float(instep.clip_grad_norm_(module[number].parameters(), MAX_NORM)) == 0.0
    model.close()


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("overflows", [False, True])
def test_ranks_of_a_scaler_know_of_an_overflow_in_another_stage(mesh: Mesh, overflows: bool) -> None:
    model, scales = stepped(mesh, net(), math.inf if overflows else SCALE), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales.scale(torch.ones(()))  # which the loss was given by hand
    before = scaled(scales)
    scales.step(optimizer)
    scales.update()
    assert scaled(scales) == (before / 2 if overflows else before)
    model.close()


def scaled(scales: torch.amp.GradScaler) -> float:
    return float(scales.get_scale())


@world(2, pp=2, dp=1)
def test_a_scaler_of_one_stage_alone_is_refused_by_the_others_which_would_wait(mesh: Mesh) -> None:
    module = net()
    model, scales = stepped(mesh, module), scaler()
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1)
    scales.scale(torch.ones(()))
    if mesh.along["pp"].rank == 1:
        scales.unscale_(optimizer)
    else:
        with pytest.raises(Desync, match=r"one has all that an optimizer steps.*Make one optimizer"):
            scales.unscale_(optimizer)
    model.close()
