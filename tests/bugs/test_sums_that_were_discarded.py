"""A gradient that ``zero_grad()`` had discarded came back for a parameter that the next step did not use.

After a synchronised backward, one under ``no_sync`` adds to what is there: a sharded module notes that the
reduced gradient, which lies in slices, is a part of the sum. ``zero_grad()`` takes ``.grad`` away, and the
note was only struck out when a gradient came for the same parameter again. A parameter without one in the
next step kept it, and was stepped with its gradient of before; with ``DataParallel`` it has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, numbers
from tests.replicate.nets import WIDTH, Twice
from tests.world import world


def loop(model: Any, optimizer: torch.optim.Optimizer, rank: int, *, declared: bool) -> None:
    def backward(key: str, sometimes: bool) -> None:
        model(numbers(4, WIDTH, key=f"{key} on rank {rank}"), sometimes).square().mean().backward()

    backward("first", True)
    with model.no_sync():
        backward("kept", True)
    optimizer.zero_grad()
    if declared:
        for _ in model.micro_batches(2):
            backward("last", False)
    else:
        backward("last", False)
    optimizer.step()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("declared", [False, True])
@world(2)
def test_a_parameter_without_a_gradient_is_not_stepped(mesh: Mesh, stage: int, declared: bool) -> None:
    plain = DataParallel(filled(Twice()), process_group=mesh, find_unused_parameters=True)
    loop(plain, SGD(plain.parameters(), lr=0.1), mesh.rank, declared=declared)
    model: nn.Module = fully_shard(filled(Twice()), mesh, stage, find_unused_parameters=True)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, lr=0.1)
    loop(model, optimizer, mesh.rank, declared=declared)
    assert model.sometimes.weight.grad is None
    ours = full_state_dict(model)
    for name, expected in plain.module.state_dict().items():
        assert torch.equal(ours[name], expected), name
    model.close()
    plain.close()
