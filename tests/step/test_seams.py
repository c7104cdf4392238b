"""Whose gradients are added up by whom is data: a wrapper says it, and no reducer knows tensor parallelism.

The parameters of a toy are reduced over other groups than their neighbours, nowhere, or from micro-batches
that ranks share. Its loss is (weight * drawn numbers), so that a leaf's gradient is known without autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn

from instep.errors import Desync, ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group, alone
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.bucketed import Bucketed
from instep.replicate.reducer import Reducer
from instep.state.alignment import align
from instep.step.agreement import agree_on_structure
from instep.step.backward import StepSession
from instep.step.micro_batches import MicroBatch
from instep.step.parameter_registry import ParameterRegistry
from instep.step.reduction import ONE_GROUP, GradientGroups, ReductionOptions
from tests.parity import numbers
from tests.reduce.trees import tree_sum
from tests.world import world

G, WIDTH = 8, 300


class Weights(nn.Module):
    """``dense`` is what every model has; of ``own`` it depends on the test."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.own = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(7, WIDTH))

    def forward(self, key: object) -> Tensor:
        return (self.dense * leaf("dense", key)).sum() + (self.own * leaf("own", key)).sum()


def leaf(name: str, key: object) -> Tensor:
    """The gradient that the micro-batch, or the part of one, called ``key`` has of parameter ``name``."""
    return numbers(*(WIDTH,) if name == "dense" else (7, WIDTH), key=f"{name} {key}")


def mean(name: str, keys: list[object], weight: int) -> Tensor:
    """What the ranks with the leaves ``keys`` end with."""
    return tree_sum([leaf(name, key) for key in keys], torch.add) * (1.0 / weight)


class Toy:
    """Trains ``module`` over ``group``; ``own`` adds up the gradient of ``module.own``."""

    def __init__(self, module: Weights, mesh: Mesh, groups: GradientGroups = ONE_GROUP) -> None:
        self.module, group = module, mesh.world.duplicate()
        registry = ParameterRegistry(module)
        sizes = {f"group of {i}": its.size for i, its in groups.of.items()}
        agree_on_structure(module, sizes, group)
        align(module.parameters())
        names, parameters = zip(*registry.trainable, strict=True)
        options = ReductionOptions(Bucketed, caps=0.001)
        self.reducer = Reducer(names, parameters, group, mesh.recorder, options, groups)
        self.session = StepSession(self, module, self.reducer, registry, torch.device("cpu"), seed=0)
        self.next_step, self.close = 0, self.session.close

    def step(self, key: Callable[[MicroBatch], object] = attrgetter("index")) -> None:
        """A declared step; ``key`` names the gradients of a micro-batch."""
        for micro_batch in self.session.micro_batches(self, G, None):
            self.module(key(micro_batch)).backward()


def over_dp(mesh: Mesh) -> Group:
    """As long as its mesh; the ranks of a column have the same weights."""
    return mesh.along["dp"].duplicate()


def clip(module: nn.Module) -> Tensor:
    """The norm over the gradients of all ranks, each once."""
    return clip_grad_norm_(module.parameters(), max_norm=1e9).float()


COLUMNS = [(0, 2), (1, 3)]  # of dp(2) * tp(2)


@world(4, dp=2, tp=2)
def test_a_parameter_is_reduced_over_another_group_than_its_neighbour(mesh: Mesh) -> None:
    """As experts are: each column of ranks has its own, and makes gradients from micro-batches of its own."""
    model = Toy(Weights(), mesh, GradientGroups({1: over_dp(mesh)}, alike=COLUMNS))
    model.step()
    column = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}[mesh.coordinates["tp"]]  # two micro-batches a rank
    assert torch.equal(model.module.dense.grad, mean("dense", [*range(G)], G))
    assert torch.equal(model.module.own.grad, mean("own", column, G))
    norms = [mean("dense", [*range(G)], G).norm(), mean("own", [0, 1, 4, 5], G).norm()]
    expected = torch.stack([*norms, mean("own", [2, 3, 6, 7], G).norm()]).norm()
    torch.testing.assert_close(clip(model.module), expected)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    model.module(f"rank {mesh.rank}").backward()  # undeclared: one leaf a rank
    its = [f"rank {rank}" for rank in COLUMNS[mesh.coordinates["tp"]]]
    assert torch.equal(model.module.dense.grad, mean("dense", [f"rank {rank}" for rank in range(4)], 4))
    assert torch.equal(model.module.own.grad, mean("own", its, 4))
    model.close()


@world(2)
def test_a_gradient_that_is_reduced_nowhere_is_this_ranks_share(mesh: Mesh) -> None:
    model = Toy(Weights(), mesh, GradientGroups({1: alone(mesh.rank)}))
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    for _ in range(3):  # its weights differ, and that is no drift
        optimizer.zero_grad()
        model.step()
        assert torch.equal(model.module.dense.grad, mean("dense", [*range(G)], G))
        assert torch.equal(model.module.own.grad, mean("own", [*range(4 * mesh.rank, 4 * mesh.rank + 4)], G))
        optimizer.step()
    if mesh.rank == 1:
        model.module.dense.detach().add_(1)
    optimizer.zero_grad()
    with pytest.raises(ReplicasDiffer, match="'dense'"):
        model.step()
    model.close()


def parts_of(mesh: Mesh, groups: GradientGroups) -> Toy:
    """After a step in which the ranks along tp share micro-batches, and have a part of each."""
    model = Toy(Weights(), mesh, groups)
    model.step(lambda micro_batch: f"{micro_batch.index}, part {mesh.coordinates['tp']}")
    return model


EVERY_PART = [f"{index}, part {part}" for index in range(G) for part in range(2)]


def expect_the_mean_of_all_parts(mesh: Mesh) -> None:
    model = parts_of(mesh, GradientGroups(data_ranks=[rank // 2 for rank in range(mesh.world_size)]))
    assert torch.equal(model.module.dense.grad, mean("dense", EVERY_PART, G))
    assert torch.equal(model.module.own.grad, mean("own", EVERY_PART, G))
    model.close()


@world(2, tp=2)
def test_two_ranks_share_every_micro_batch(mesh: Mesh) -> None:
    """As in context parallelism: each has the gradient of its part of the sequence, a leaf of G x 2."""
    expect_the_mean_of_all_parts(mesh)


@world(4, dp=2, tp=2)
def test_who_leaves_tells_the_ranks_of_every_group_at_once(mesh: Mesh) -> None:
    model = Toy(Weights(), mesh, GradientGroups({1: over_dp(mesh)}, alike=COLUMNS))

    def fail(micro_batch: MicroBatch) -> int:
        if micro_batch.index == 7:
            raise KeyError("lost")
        return micro_batch.index

    expected, words = (KeyError, "lost") if mesh.rank == 3 else (Desync, "rank 3 left step 0")
    with pytest.raises(expected, match=words):
        model.step(fail)
    model.step()  # and all go on together
    assert torch.equal(model.module.dense.grad, mean("dense", [*range(G)], G))
    model.close()
