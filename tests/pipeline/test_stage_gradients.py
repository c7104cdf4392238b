"""Gradients of stages: in two parts, of norms and optimizers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import instep
from instep.mesh.mesh import Mesh
from instep.pipeline.split_backward import gradients_at_once, input_gradients
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


Forward = Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]]


def tied(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    return ((x + w[0]) * w[1] + w[0],)


def unrolled(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    for _ in range(3):
        x = torch.tanh(x @ w[2] + w[0])
    return (x,)


def of_a_shared_cast(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    half = w[2].double()
    return ((x.double() @ half).sin() @ half,)


def beside_the_path(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    return x * w[0], w[1].exp() + w[0], w[2]


def in_a_residual(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    return (x + F.layer_norm(x @ w[2], (4,), w[0], w[1]),)


def with_a_hook(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    found = x @ w[2] + w[0]
    found.register_hook(lambda gradient: gradient * 3)
    return (found.sin(),)


def with_a_hook_of_a_weight(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    w[2].register_hook(lambda gradient: gradient * 3)
    return ((x @ w[2]).sin() + w[0],)


def with_a_weight_that_is_not_used(x: Tensor, w: list[Tensor]) -> tuple[Tensor, ...]:
    return (x @ w[2],)


FORWARDS = (
    tied,
    unrolled,
    of_a_shared_cast,
    beside_the_path,
    in_a_residual,
    with_a_hook,
    with_a_hook_of_a_weight,
    with_a_weight_that_is_not_used,
)


def given() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator, requires_grad=True)
    shapes = ((4,), (4,), (4, 4))
    return x, [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def of_one_part(forward: Forward) -> list[Tensor | None]:
    x, weights = given()
    outputs = forward(x, weights)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return [x.grad, *(w.grad for w in weights)]


@pytest.mark.parametrize("split", [input_gradients, gradients_at_once])
@pytest.mark.parametrize("forward", FORWARDS)
def test_two_parts_have_the_bits_of_one(forward: Forward, split: Callable) -> None:
    x, weights = given()
    made = forward(x, weights)
    outputs, ones = [get_gradient_edge(y) for y in made], [torch.ones_like(y) for y in made]
    (first,), later = split(outputs, ones, [x])
    assert all(w.grad is None for w in weights)
    del made, outputs  # as a stage does: of a step's last micro-batch no graph is left
    later()
    for found, expected in zip([first, *(w.grad for w in weights)], of_one_part(forward), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


def test_all_of_a_reentrant_checkpoint_is_refused_with_the_ways_out() -> None:
    x, weights = given()
    output = checkpoint(lambda x: x @ weights[2], x, use_reentrant=True)
    with pytest.raises(ValueError, match=r"use_reentrant=False, or take a schedule without I and W"):
        gradients_at_once([get_gradient_edge(output)], [torch.ones(3, 4)], [x])
