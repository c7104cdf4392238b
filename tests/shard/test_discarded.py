"""Gradients in slices that one rank alone has discarded: an error on all, never a sum of two kinds."""

from __future__ import annotations

import pytest
from torch import nn

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from tests.parity import filled, numbers
from tests.world import world


def backward(model: nn.Module, mesh: Mesh, step: int) -> None:
    model(numbers(2, 8, key=f"step {step} of rank {mesh.rank}")).square().mean().backward()


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("everything", [True, False])
def test_what_one_rank_discards_is_noticed_in_the_next_exchange(
    mesh: Mesh, stage: int, everything: bool
) -> None:
    model = fully_shard(filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))), mesh, stage)
    backward(model, mesh, 0)
    if mesh.rank == 1:
        if everything:
            model.zero_grad()
        else:
            model[0].weight.grad = None
    with pytest.raises(Desync, match=r"rank [01] adds to gradients that were there before.*zero_grad"):
        backward(model, mesh, 1)
    model.close()


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_all_discard_or_keep_is_no_matter(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))), mesh, stage)
    for step in range(4):
        if step == 2:
            model.zero_grad()
        backward(model, mesh, step)
    model.close()
