"""A gradient that ``zero_grad()`` had discarded came back for a parameter that the next step did not use.

After a synchronised backward, one under ``no_sync`` adds to what is there: a sharded module notes that the
reduced gradient, which lies in slices, is a part of the sum. ``zero_grad()`` takes ``.grad`` away, and the
note was only struck out when a gradient came for the same parameter again. A parameter without one in the
next step kept it, and was stepped with its gradient of before; with ``DataParallel`` it has none.

Nor did it help where the backward under ``no_sync`` had raised: the next forward put back what had made way
for it, also if ``zero_grad()`` had come in between, and the next gradient was added to the one of before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, numbers
from tests.replicate.nets import WIDTH, Twice
from tests.world import world


class Raises(torch.autograd.Function):
    """Backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("planted in backward")


class Breaks(nn.Module):
    """Its backward raises between two layers, if told so in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, breaks: bool) -> Tensor:
        x = self.below(x)
        return self.above(Raises.apply(x) if breaks else x)


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


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("discards", [True, False])
@world(2)
def test_after_a_backward_that_raised_the_sum_is_what_was_not_discarded(
    mesh: Mesh, stage: int, discards: bool
) -> None:
    sums = []
    for sharded in (False, True):
        module: Any = filled(Breaks())
        model = fully_shard(module, mesh, stage) if sharded else DataParallel(module, process_group=mesh)

        def loss(key: str, breaks: bool, model: Any = model) -> Tensor:
            return model(numbers(4, WIDTH, key=f"{key} on rank {mesh.rank}"), breaks).square().mean()

        loss("first", False).backward()
        with model.no_sync(), pytest.raises(ValueError, match="planted in backward"):
            loss("kept", True).backward()
        if discards:
            model.zero_grad()
        last = loss("last", False)
        assert all((p.grad is None) == discards for p in module.parameters())
        last.backward()
        sums.append(clip_grad_norm_(model.parameters(), float("inf")))
        model.close()
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)  # a sum over steps has no one order
