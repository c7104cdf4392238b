"""Gradients in slices that are zeroed: by ``zero_grad``, or past the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.shard.fully import fully_shard
from tests.parity import filled, numbers
from tests.shard.trained import WIDTH, Wide
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}
STAGES = pytest.mark.parametrize("stage", [2, 3])


@world(2)
@STAGES
def test_gradients_in_slices_are_discarded_also_where_zeros_are_asked_for(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage=stage)
    loss(model, "first", mesh.rank).backward()
    once = clip_grad_norm_(model.parameters(), float("inf"))
    model.zero_grad(set_to_none=False)
    assert clip_grad_norm_(model.parameters(), float("inf")) == 0
    loss(model, "first", mesh.rank).backward()
    assert clip_grad_norm_(model.parameters(), float("inf")) == once
    model.close()


def loss(model: nn.Module, key: str, rank: int) -> Tensor:
    return model(numbers(4, WIDTH, key=f"{key} on rank {rank}")).square().mean()


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    loss(model, "used", rank).backward()
    for p in list(model.parameters())[::2]:
        p.grad = torch.full_like(p, 0.25)
    optimizer.step()


# Gradients in slices that one rank alone has discarded: an error on all, never a sum of two kinds.
