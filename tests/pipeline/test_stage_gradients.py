"""Gradients of which a rank of a pipeline has those of its stage: norms, optimizers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from tests.world import world

MAX_NORM = 0.01


def net() -> nn.Sequential:
    """Not drawn: ranks that are threads share the generator."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape))
    return made


def stepped(mesh: Mesh, module: nn.Sequential) -> instep.Pipeline:
    model = instep.Pipeline(module, mesh, "1f1b", 2)
    model.step(lambda output, _: output.square().mean(), lambda _: torch.ones(2, 4))
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


class Signs(torch.optim.Optimizer):
    """An optimizer of one's own, with the shortest step that there is."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad.sign(), alpha=0.01)


@world(2, pp=2, dp=1)
def test_an_optimizer_whose_step_takes_no_closure_steps_this_stage(mesh: Mesh) -> None:
    """It crashed: its step was given a closure that passed over the gradients of other stages."""
    module, whole = net(), net()
    model = stepped(mesh, module)
    Signs(model.parameters()).step()
    whole(torch.ones(2, 4)).square().mean().backward()
    Signs(whole.parameters()).step()
    found = instep.full_state_dict(model)
    assert all(torch.equal(found[name], x) for name, x in whole.state_dict().items())
    model.close()


@world(2, pp=2, dp=1)
def test_a_parameter_of_another_stage_has_no_elements_and_no_gradient(mesh: Mesh) -> None:
    module = net()
    model = stepped(mesh, module)
    mine, absent = (module[0], module[1]) if mesh.rank == 0 else (module[1], module[0])
    assert [(p.shape, p.grad) for p in absent.parameters()] == [((0, 4), None), ((0,), None)]
    assert all(p.grad is not None and p.grad.shape == p.shape for p in mine.parameters())
    with pytest.raises(RuntimeError, match="Linear, was called, whose weights are on another rank"):
        module(torch.ones(2, 4))
    model.close()


@world(2, pp=2, dp=1)
def test_a_second_pipeline_of_a_closed_one_is_refused(mesh: Mesh) -> None:
    """Of parameters that are scalars, too: their losses were nan."""
    for module in (net(), nn.Sequential(Scale(), Scale())):
        stepped(mesh, module).close()
        with pytest.raises(ValueError, match=r"'.\..*' has no values here.*make the model anew"):
            instep.Pipeline(module, mesh, "1f1b", 2)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def by_torchs_clipping(model: instep.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def by_a_scaler(model: instep.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def by_hand(model: instep.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad / 2
    optimizer.step()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("change", [by_torchs_clipping, by_a_scaler, by_hand])
@pytest.mark.parametrize("fused", [False, True])
def test_no_other_code_may_change_gradients_of_which_it_sees_one_stage(
    mesh: Mesh, change: Any, fused: bool
) -> None:
    model = stepped(mesh, net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with pytest.raises(RuntimeError, match=r"was written to since.*instep.clip_grad_norm_.*bfloat16"):
        change(model, optimizer)
    model.close()
