"""Loads of experts: counted exactly, and made equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep.expert import MoE, StepLoads, aux_loss, balanced
from instep.mesh.mesh import Mesh
from tests.expert.by_token import layer_of
from tests.parity import numbers
from tests.world import world


def skewed() -> MoE:
    """A router that prefers its first experts: the mean of a token is not zero."""
    layer = layer_of(8, top_k=2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.linspace(0.3, -0.3, 8)[:, None] + 0.1 * layer.router.weight)
    return layer


def tokens(step: int) -> torch.Tensor:
    return numbers(200, 13, key=f"tokens {step}") + 0.5


def test_biases_make_the_loads_of_a_skewed_router_equal() -> None:
    layer, seen = skewed(), []
    for step in range(200):
        with balanced(layer, rate=0.003) as loads:
            layer(tokens(step))
        seen.append(loads.by_layer[""])
    assert seen[0].max() > 150 and seen[0].min() == 0  # of 200 tokens
    last = StepLoads({"": torch.stack(seen[-20:]).sum(0)}).figures()
    assert last["expert_load_max"] < 1.2
    assert last["expert_load_min"] > 0.8


def test_the_auxiliary_loss_makes_the_loads_of_a_skewed_router_equal() -> None:
    layer = skewed()
    optimizer = torch.optim.SGD([layer.router.weight], lr=0.5)
    losses, largest = [], []
    for step in range(60):
        layer(tokens(step))
        largest.append(int(layer.load.max()))
        loss = aux_loss(layer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 1.5 > 1.1 > losses[-1] >= 1.0
    assert largest[-1] < largest[0] / 2


@world(3)
def test_loads_are_those_of_all_ranks(mesh: Mesh) -> None:
    layer, shares = skewed(), []
    with balanced(layer, mesh, rate=0.25) as loads:
        for step in {0: (0, 1), 1: (2,), 2: ()}[mesh.rank]:
            layer(tokens(step))
    alone = skewed()
    for step in range(3):
        alone(tokens(step))
        shares.append(alone.load)
    expected = torch.stack(shares).sum(0)
    assert torch.equal(loads.by_layer[""], expected)
    assert torch.equal(layer.balance_bias, torch.where(expected < 150, 0.25, -0.25))


def test_loads_are_told_by_layer_with_the_busiest_expert() -> None:
    loads = StepLoads({"a": torch.tensor([1, 7, 4, 4]), "b": torch.tensor([3, 5, 2, 6])})
    assert str(loads) == (
        "a: 1 to 7 tokens per expert, 4.0 on average, most for expert 1\n"
        "b: 2 to 6 tokens per expert, 4.0 on average, most for expert 3"
    )
    assert loads.figures() == {"expert_load_min": 0.25, "expert_load_max": 1.75}


def test_a_step_that_raises_moves_no_bias_and_is_not_counted() -> None:
    layer = skewed()
    with pytest.raises(ValueError, match="dropout probability"), balanced(layer):
        nn.Sequential(layer, nn.Dropout(2.0))(tokens(0))
    assert not layer.balance_bias.any()
    with balanced(layer) as loads:
        layer.eval()(tokens(0))  # nor is an evaluation
        layer.train()(tokens(1))
    assert loads.by_layer[""].sum() == 400


def test_what_has_no_auxiliary_loss_is_refused() -> None:
    layer = layer_of(4)
    x = numbers(40, 13, key="x").requires_grad_()
    with pytest.raises(ValueError, match=r"'1' has computed nothing in training mode .* after each forward"):
        aux_loss(nn.Sequential(nn.Linear(13, 13), layer))
    layer(x)
    aux_loss(layer)
    with pytest.raises(ValueError, match="since the last call"):
        aux_loss(layer)
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ValueError, match=r"recorded no graph.*use_reentrant=False"):
        aux_loss(layer)
    with pytest.raises(ValueError, match=r"an instep.expert.MoE in the module, got a Linear without"):
        aux_loss(nn.Linear(2, 2))
