"""The layer on one rank, against its definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import instep
from instep.expert import MoE, aux_loss
from instep.expert.routes import choose
from tests.expert.by_token import by_token, layer_of
from tests.parity import assert_same_bits, numbers


@pytest.mark.parametrize("num_tokens", [1, 7, 101])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 5},
        {"normalise": False},
        {"capacity_factor": 0.5},
        {"capacity_factor": 1.25, "top_k": 3},
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_the_definition(num_tokens: int, options: dict[str, Any]) -> None:
    layer = layer_of(5, **options).double()
    layer.balance_bias.copy_(numbers(5, key="bias", dtype=torch.float64) / 20)
    tokens, weight = (numbers(num_tokens, 13, key=key, dtype=torch.float64) for key in ("x", "w"))
    found, expected = [], []
    for results, compute in ((found, lambda x: (layer(x), aux_loss(layer))), (expected, by_token_of(layer))):
        x = tokens.clone().requires_grad_()
        output, aux = compute(x)
        ((output * weight).sum() + 0.1 * aux).backward()
        results += [output, aux, x.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
    for ours, its in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-12)


def by_token_of(layer: MoE) -> Any:
    return lambda x: by_token(layer, x)


def test_a_gradient_of_gradients_is_that_of_finite_differences() -> None:
    layer = layer_of(3, width=3, ff_width=4).double()
    x = numbers(4, 3, key="x", dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(layer, x)


def test_of_equal_scores_the_expert_with_the_lower_number_is_chosen() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 3.0]])
    assert choose(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2], [0, 3, 1]]


def test_an_expert_that_no_token_chooses_has_a_gradient_of_zeros() -> None:
    layer = layer_of(4)
    layer.balance_bias[2] = -10
    layer(numbers(40, 13, key="x")).sum().backward()
    assert layer.load[2] == 0
    assert not layer.up.grad[2].any() and layer.up.grad[1].any()


def test_a_full_expert_drops_the_last_tokens() -> None:
    layer = layer_of(4, top_k=1, capacity_factor=1.0)
    layer.balance_bias[3] = 10
    output = layer(numbers(4, 10, 13, key="x")).view(40, 13)
    assert layer.load.tolist() == [0, 0, 0, 40]
    assert output[:10].all() and not output[10:].any()


def test_recomputing_forward_changes_neither_bits_nor_counts() -> None:
    results = []
    for recompute in (False, True):
        layer = layer_of(4)
        x = numbers(40, 13, key="x").requires_grad_()
        with instep.expert.balanced(layer) as loads:
            output = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            (output.square().sum() + aux_loss(layer)).backward()
        results.append([("x", x.grad), *((name, p.grad) for name, p in layer.named_parameters())])
        assert loads.by_layer[""].sum() == 80
    assert_same_bits(*results)


def test_autocast_computes_experts_in_bfloat16_and_the_router_in_float32() -> None:
    layer = layer_of(4)
    x = numbers(40, 13, key="x").requires_grad_()
    expected = layer(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.02)
    output.float().sum().backward()
    assert layer.up.grad.dtype == layer.router.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (gradient,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_copy_is_a_layer_of_its_own() -> None:
    layer = layer_of(4)
    x = numbers(40, 13, key="x")
    output = layer(x)  # whose auxiliary loss has a graph, which cannot be copied
    assert torch.equal(copy.deepcopy(layer)(x), output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, r"1 <= top_k <= num_experts, got top_k\(5\) and num_experts\(4\)"),
        ({"top_k": 0}, r"got top_k\(0\)"),
        ({"block": 48}, "block to be a multiple of 32, got 48"),
        ({"block": 0}, "multiple of 32, got 0"),
        ({"capacity_factor": 0.0}, "capacity_factor > 0, or None to drop no token, got 0.0"),
        ({"top_k": 1, "normalise": True}, "the router would have no gradient"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(16, 32, 4, **options)
