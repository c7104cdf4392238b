"""Tree nodes in smaller formats, where gradients are in slices: the bits of whole ones on one rank."""

from __future__ import annotations

import threading
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.reduce.node_format import NodeFormat
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.step.micro_batches import MicroBatch
from tests.parity import bits, filled, numbers, world_of_one
from tests.reduce.rounded_nodes import FORMATS
from tests.shard.trained import WIDTH, Wide, WideImages
from tests.world import world

EVERY = pytest.mark.parametrize("nodes", FORMATS, ids=str)
STAGES = pytest.mark.parametrize("stage", [2, 3])
OPTIONS = {"lr": 0.02, "momentum": 0.9, "fused": False, "foreach": False}


class Mixed(nn.Module):
    """Parameters of several blocks and of parts of one, complex ones, and one that few micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Wide()
        self.turn = nn.Parameter(
            torch.zeros(40, WIDTH, dtype=torch.complex64)
        )  # a block of pairs, and a half
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.seldom = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        x = self.wide(x)
        found = torch.view_as_real(x.to(torch.complex64) @ self.turn.mT * self.small.sum()).square().mean()
        return found + self.seldom(x).square().mean() if seldom else found


def leaf(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    x = numbers(4, WIDTH, key=f"step {step} leaf {micro_batch.index}")
    model(x, micro_batch.index == 3).backward()


def words(nodes: NodeFormat) -> dict[str, Any]:
    name, rounding, seed = astuple(nodes)
    return {"nodes": name, "rounding": rounding, "seed": seed, "find_unused_parameters": True}


def steps(
    model: Any, module: nn.Module, optimizer: torch.optim.Optimizer, num_leaves: int
) -> dict[str, Tensor]:
    for step in range(2):
        for micro_batch in model.micro_batches(num_leaves):
            leaf(model, micro_batch, step)
        clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.clone() for name, x in full_state_dict(module).items()}


_references: dict[tuple[NodeFormat, int], dict[str, Tensor]] = {}
_lock = threading.Lock()


def of_one(nodes: NodeFormat, num_leaves: int) -> dict[str, Tensor]:
    """Plain, on one rank, once for all who ask."""
    with _lock:
        if (nodes, num_leaves) not in _references:
            module = filled(Mixed())
            model = DataParallel(module, process_group=world_of_one(), **words(nodes))
            optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
            _references[nodes, num_leaves] = steps(model, module, optimizer, num_leaves)
            model.close()
        return _references[nodes, num_leaves]


def assert_bits_of_one(mesh: Mesh, nodes: NodeFormat, stage: int, num_leaves: int = 7) -> None:
    module = filled(Mixed())
    if stage == 1:
        model: Any = DataParallel(module, process_group=mesh, bucket_cap_mb=0.1, **words(nodes))
        optimizer: Any = ShardedOptimizer(module.parameters(), torch.optim.SGD, mesh, **OPTIONS)
    else:
        model = fully_shard(module, mesh, stage=stage, **words(nodes))
        optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
    found = steps(model, module, optimizer, num_leaves)
    if stage == 1:
        optimizer.close()
    model.close()
    for name, expected in of_one(nodes, num_leaves).items():
        differ = (bits(found[name]) != bits(expected)).sum().item()
        assert not differ, f"{name}: {differ} bytes of {expected.numel()} elements differ"


@EVERY
@world(2)
def test_two_ranks_give_the_bits_of_one_in_every_stage(mesh: Mesh, nodes: NodeFormat) -> None:
    for stage in (1, 2, 3):
        assert_bits_of_one(mesh, nodes, stage)


@EVERY
@world(4, dp=2, shard=2)
def test_shard_groups_give_the_bits_of_one(mesh: Mesh, nodes: NodeFormat) -> None:
    assert_bits_of_one(mesh, nodes, 2)


@EVERY
@STAGES
@world(2)
def test_a_second_backward_adds_before_it_rounds_as_with_whole_gradients(
    mesh: Mesh, stage: int, nodes: NodeFormat
) -> None:
    found = []
    for sharded in (True, False):
        module = filled(Wide())
        optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
        if sharded:
            model: Any = fully_shard(module, mesh, stage=stage, **words(nodes))
        else:
            model = DataParallel(module, process_group=mesh, **words(nodes))
        for number in range(2):
            model(numbers(4, WIDTH, key=f"{number} on rank {mesh.rank}")).square().mean().backward()
        optimizer.step()
        found.append({name: x.clone() for name, x in full_state_dict(module).items()})
        model.close()
    for name, x in found[0].items():
        assert torch.equal(bits(x), bits(found[1][name])), name


@world(2)
def test_weights_in_another_order_of_memory_are_refused_where_their_order_counts(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="another order of memory"):
        fully_shard(WideImages(), mesh, stage=2, nodes="int8")
    model: Any = fully_shard(WideImages(), mesh, stage=2, nodes="bfloat16")
    model.close()


@world(2)
def test_a_format_on_one_rank_alone_is_refused_on_all(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="rounding"):
        fully_shard(filled(Wide()), mesh, nodes="int8", rounding=("nearest", "stochastic")[mesh.rank])
