"""Weights in slices that are used outside of their modules: what DDP trains right, stage 3 trains alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, world_of_one
from tests.shard.gathered import gathered_units
from tests.world import world

WORDS, WIDTH = 11, 8
LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}
Use = Callable[[nn.Module], Any]


class Tied(nn.Module):
    """The embedding, a unit, is the head too; the projections of attention are units that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleList([nn.Embedding(WORDS, WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding[0](x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.linear(h, self.embedding[0].weight)


def units(model: nn.Module) -> list[nn.Module]:
    return [model.embedding[0], model.attention.out_proj, *model.layers]  # type: ignore[list-item]


def nothing(model: nn.Module) -> Tensor:
    return torch.zeros(())


def squares(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def norms(model: nn.Module) -> Tensor:
    return sum((p.norm() for p in model.parameters()), torch.zeros(()))


def decay(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p


def decay_of_all(model: nn.Module) -> None:
    torch._foreach_mul_([p.data for p in model.parameters()], 0.99)


def clipped(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)
        p.detach()[0] = 0.25


def as_a_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.99, model.parameters())


def filled_again(model: nn.Module) -> None:
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.125 * i)


def looked_at(model: nn.Module) -> None:
    p = next(model.parameters())
    assert "nan" not in repr(p) and bool(p.norm() > 0) and copy.deepcopy(p).equal(p)
    assert all(map(torch.isfinite, torch._foreach_norm(list(model.parameters()))))


class Average:
    """Of the weights, a quarter of which goes back into them."""

    def __call__(self, model: nn.Module) -> None:
        with torch.no_grad():
            if not hasattr(self, "means"):
                self.means = [p.detach().clone() for p in model.parameters()]
            for mean, p in zip(self.means, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
                p.lerp_(mean, 0.25)


# Added to the loss before and after forward; done before and after the optimizer's step.
LOOPS: dict[str, Callable[[], tuple[Use, Use, Use, Use]]] = {
    "tied": lambda: (nothing, nothing, nothing, looked_at),
    "regularised": lambda: (norms, squares, looked_at, nothing),
    "decayed": lambda: (nothing, nothing, decay, decay_of_all),
    "clipped": lambda: (nothing, nothing, nothing, clipped),
    "as a vector": lambda: (nothing, nothing, as_a_vector, filled_again),
    "averaged": lambda: (squares, nothing, nothing, Average()),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, name: str) -> None:
    before, after, unstepped, stepped = LOOPS[name]()
    for step in range(3):
        penalty = before(model)
        loss = model((torch.arange(12).view(3, 4) * (7 + rank) + step) % WORDS).log_softmax(-1)[..., 0].mean()
        (0.01 * penalty - loss + 0.01 * after(model)).backward()
        unstepped(model)
        optimizer.step()
        optimizer.zero_grad()
        stepped(model)


def weights_of(mesh: Mesh, name: str) -> dict[str, Tensor]:
    module = filled(Tied())
    whole = DataParallel(module, process_group=mesh)
    train(whole, SGD(module.parameters(), **LOOP), mesh.rank, name)
    whole.close()
    return {**module.state_dict()}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("reshard", [True, False])
@world(2)
def test_any_use_of_the_weights_has_the_bits_of_data_parallel(mesh: Mesh, name: str, reshard: bool) -> None:
    expected = weights_of(mesh, name)
    module = filled(Tied())
    model = fully_shard(module, mesh, reshard_after_forward=reshard, units=units(module))
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
    train(model, optimizer, mesh.rank, name)
    found = full_state_dict(model)
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
    optimizer.close()
    model.close()


def test_one_rank_alone_is_no_exception() -> None:
    mesh = world_of_one()
    expected = weights_of(mesh, "averaged")
    model = fully_shard(filled(Tied()), mesh)
    train(model, ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP), 0, "averaged")
    found = full_state_dict(model)
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    model.close()


@world(2)
def test_one_rank_may_read_alone_and_keeps_one_unit_at_a_time(mesh: Mesh) -> None:
    model = fully_shard(filled(Tied()), mesh)
    if mesh.rank == 1:
        for p, expected in zip(model.parameters(), filled(Tied()).parameters(), strict=True):
            assert torch.equal(p, expected)
            assert len(gathered_units(model.sharding.stage3)) == 1
    model.close()


@world(2)
def test_a_view_from_before_the_step_is_not_written_to(mesh: Mesh) -> None:
    model = fully_shard(filled(Tied()), mesh)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
    views = [p.data for p in model.parameters()]
    train(model, optimizer, mesh.rank, "tied")
    with pytest.raises(RuntimeError, match=r"written to after its weights had gone.*take the view again"):
        views[0].mul_(0.5)
    with pytest.raises(ValueError, match="read-only"):  # torch cannot see what numpy writes
        next(model.parameters()).detach().numpy()[0] = 1.0
    optimizer.close()
    model.close()


@world(2)
def test_what_would_be_rounded_is_not_written_to(mesh: Mesh) -> None:
    model = fully_shard(filled(Tied()), mesh, compute_dtype=torch.bfloat16)
    before = full_state_dict(model)
    with pytest.raises(RuntimeError, match=r"'embedding.0.weight' was written to in its rounded form"):
        model.embedding[0].weight.data.mul_(0.5)
    after = full_state_dict(model)
    assert all(torch.equal(after[n], before[n]) for n in before)
    model.close()
    with pytest.raises(RuntimeError, match=r"'embedding.0.weight' of a .* that was closed has no"):
        model.embedding[0].weight.norm()
