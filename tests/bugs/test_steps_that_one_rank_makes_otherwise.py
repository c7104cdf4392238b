"""One rank alone skips or repeats an optimizer step, clips, or takes a state dict: all are told at once.

Where the state is in slices, these are collective. The others waited for the rank in a group of the
optimizer's, while it waited for them in the exchange of its next gradients: ``PeerLost`` after the deadline,
five minutes by default, where plain ``DataParallel`` said at once which rank was out of step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled
from tests.world import world

ODD = 1  # rank, and step
DEADLINE_S = 50.0  # of a wait, which would raise PeerLost
KINDS = ["stage 1", "stage 2", "stage 3", "stage 2, ShardedOptimizer"]


def sharded(kind: str, mesh: Mesh) -> tuple[Any, Optimizer]:
    """A model, and an optimizer whose steps all ranks make together."""
    net: Any = filled(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1)))
    if kind == "stage 1":
        model: Any = DataParallel(net, process_group=mesh)
        return model, ShardedOptimizer(model.parameters(), SGD, mesh, lr=0.1)
    model = fully_shard(net, mesh, stage=int(kind[6]))
    if kind.endswith("ShardedOptimizer"):
        return model, ShardedOptimizer(model.parameters(), SGD, mesh, lr=0.1)
    return model, SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Optimizer, rank: int, odd: str) -> None:
    """Some steps of the plain loop, one of which rank ``ODD`` makes otherwise."""
    for step in range(3):
        alone = rank == step == ODD
        model(torch.ones(2, 3)).sum().backward()
        if alone and odd == "clips":
            clip_grad_norm_(model.parameters(), 1.0)
        for _ in range(1 if not alone else {"skips": 0, "repeats": 2}.get(odd, 1)):
            optimizer.step()
        if alone and odd == "keeps":
            full_state_dict(model)
        optimizer.zero_grad()


SAID = {
    "skips": r"rank 1 is in the exchange of gradients; rank 0: optimizer.step\(\)",
    "repeats": r"rank 1 is in optimizer.step\(\); rank 0: the exchange of gradients",
    "clips": r"rank 1 is in clip_grad_norm_; rank 0: optimizer.step\(\)",
    "keeps": "rank 1 is in a barrier outside of a step .*; rank 0: the exchange of gradients",
}


@pytest.mark.parametrize("odd", ["skips", "repeats"])
@pytest.mark.parametrize("kind", KINDS)
@world(2, timeout_s=DEADLINE_S)
def test_a_step_that_one_rank_skips_or_repeats_is_told_at_once(mesh: Mesh, kind: str, odd: str) -> None:
    model, optimizer = sharded(kind, mesh)
    with pytest.raises(Desync, match=f"{SAID[odd]}. Each rank must do the same in the same order"):
        train(model, optimizer, mesh.rank, odd)
    model.close()


@pytest.mark.parametrize("odd", ["clips", "keeps"])
@pytest.mark.parametrize("kind", ["stage 2", "stage 3"])
@world(2, timeout_s=DEADLINE_S)
def test_a_norm_or_a_state_dict_that_one_rank_takes_is_told_at_once(mesh: Mesh, kind: str, odd: str) -> None:
    model, optimizer = sharded(kind, mesh)
    with pytest.raises(Desync, match=SAID[odd]):
        train(model, optimizer, mesh.rank, odd)
    model.close()


@world(4, timeout_s=DEADLINE_S, dp=2, shard=2)
def test_ranks_of_other_shard_groups_are_told_too(mesh: Mesh) -> None:
    model, optimizer = sharded("stage 3", mesh)
    with pytest.raises(Desync, match="rank 1 is in the exchange of gradients; ranks 0, 2, 3: optimizer"):
        train(model, optimizer, mesh.rank, "skips")
    model.close()


@world(2, timeout_s=DEADLINE_S)
def test_the_error_of_the_rank_itself_comes_first(mesh: Mesh) -> None:
    """It raises in its closure, and its own traceback has the cause."""
    model, optimizer = sharded("stage 2", mesh)
    model(torch.ones(2, 3)).sum().backward()

    def closure() -> float:
        if mesh.rank == ODD:
            raise KeyError("mine")
        return 0.0

    with pytest.raises(KeyError if mesh.rank == ODD else Desync):
        optimizer.step(closure)
    model.close()
