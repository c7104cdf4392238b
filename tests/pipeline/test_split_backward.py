"""A backward in two parts gives the gradients of one, to the bit, whatever hangs where in the graph."""

from __future__ import annotations

from collections.abc import Callable

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


class Checkpointed(nn.Module):
    """A layer whose forward is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@world(2, pp=2, dp=1)
def test_activations_are_computed_again_once(mesh: Mesh) -> None:
    layers = [Checkpointed() for _ in range(4)]
    calls = [0] * len(layers)

    def count(i: int) -> None:
        calls[i] += 1

    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.inner.register_forward_pre_hook(lambda *_, i=i: count(i))
            for p in layer.parameters():  # not drawn: ranks that are threads share the generator
                p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape))
    model = instep.Pipeline(nn.Sequential(*layers), mesh, "zb-h1", 4)
    model.step(lambda output, _: output.square().mean(), lambda micro_batch: torch.ones(2, 4))
    here = mesh.along["pp"].rank
    assert calls == [8 if i // 2 == here else 0 for i in range(4)]  # 4 micro-batches, forward and backward
    model.close()
