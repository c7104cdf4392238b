"""The state by formula: what a stage divides is divided, and what is counted is as much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.registered import Registered
from instep.mesh.mesh import Mesh
from instep.run.memory_formula import state_bytes
from instep.run.memory_usage import memory_usage
from tests.world import world

WIDTH = 256
SIZE = 2 * WIDTH * WIDTH
ADAMW, MOMENTUM, PLAIN = (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).to(dtype)


def stepped(model: Any, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> Registered:
    model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
    optimizer.step()
    return Registered({"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("kind", "dtype", "each"),
    [
        (ADAMW, torch.float32, 16),
        (MOMENTUM, torch.float32, 12),
        (PLAIN, torch.float32, 8),
        (ADAMW, torch.bfloat16, 8),
        (ADAMW, torch.float64, 32),
    ],
)
def test_of_one_rank_it_is_what_weights_gradients_and_moments_take(
    kind: Any, dtype: torch.dtype, each: int
) -> None:
    model = instep.DataParallel(net(dtype))
    optimizer = kind[0](model.parameters(), lr=0.1, **kind[1])
    said = state_bytes(stepped(model, optimizer, dtype))
    assert said is not None
    assert said["bytes_per_parameter"] == each
    found = memory_usage(model.module, optimizer, model)
    of_halves = ("parameters", "optimizer")  # their gradients are summed in float32, beside
    for name in of_halves if dtype == torch.bfloat16 else ("parameters", "gradients", "optimizer"):
        assert getattr(found, name) == pytest.approx(said[name], rel=0.01)
    model.close()


def test_a_frozen_weight_has_no_gradient_and_no_moments_and_a_shared_one_counts_once() -> None:
    module = net()
    module.get_parameter("0.weight").requires_grad_(False)
    model = instep.DataParallel(module)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
    optimizer_and_model = stepped(model, optimizer)
    assert state_bytes(optimizer_and_model) == {
        "bytes_per_parameter": 4 + 12 / 2,
        "parameters": 4 * SIZE,
        "gradients": 2 * SIZE,
        "optimizer": 4 * SIZE,
    }
    model.close()


@pytest.mark.parametrize(("stage", "each"), [(0, 16), (1, 8 + 8 / 2), (2, 4 + 12 / 2), (3, 16 / 2)])
@world(2)
def test_each_stage_divides_what_the_paper_says_it_divides(mesh: Mesh, stage: int, each: float) -> None:
    module = net()
    if stage >= 2:
        model: Any = instep.fully_shard(module, mesh, stage=stage)
    else:
        model = instep.DataParallel(module, mesh)
    if stage == 1:
        kind = torch.optim.AdamW
        optimizer: torch.optim.Optimizer = instep.ShardedOptimizer(model.parameters(), kind, mesh)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    said = state_bytes(stepped(model, optimizer))
    assert said is not None
    assert said["bytes_per_parameter"] == each
    found = memory_usage(module, optimizer, model)
    assert found.state == pytest.approx(each * SIZE, rel=0.05)
