"""What ranks have computed and what their reduction made of it, by hashes: the same on any placement."""

from __future__ import annotations

import json

import pytest
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.gradient_hashes import GradientHashes, observe_reduction
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.state.hash import tensor_digest
from instep.step.micro_batches import MicroBatch
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, Tied, mean_square, next_token
from tests.world import world

NUM_LEAVES = 5


def observed(model: DataParallel, loss=mean_square) -> GradientHashes:
    with observe_reduction(model._reducer) as seen:
        for micro_batch in model.micro_batches(NUM_LEAVES):
            loss(model.module, micro_batch, 0)
    return seen


def alone(module: nn.Module, **options: object) -> DataParallel:
    return DataParallel(filled(module), process_group=world_of_one(), **options)


def digests(module: nn.Module) -> dict[str, str]:
    trained = [(name, p.grad) for name, p in module.named_parameters() if p.requires_grad]
    return {name: tensor_digest(x).hex()[:16] for name, x in trained if x is not None}


def by_hand(module: nn.Module, loss=mean_square) -> dict[int, dict[str, str]]:
    """The digests of autograd's own gradients."""
    filled(module)
    found = {}
    for index in range(NUM_LEAVES):
        module.zero_grad()
        loss(module, MicroBatch(index, NUM_LEAVES), 0)
        found[index] = digests(module)
    return found


def gathered(mesh: Mesh, seen: GradientHashes) -> dict[int, dict[str, str]]:
    said = mesh.world.group.all_gather_bytes(json.dumps(seen.leaves).encode(), "a test")
    return {int(micro_batch): digests for data in said for micro_batch, digests in json.loads(data).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2)
def test_every_strategy_shows_the_gradients_of_autograd(mesh: Mesh, strategy: str) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, strategy=strategy, bucket_cap_mb=1e-4)
    for _ in range(2):  # before and after the first step has shown what is whole when
        model.zero_grad()
        seen = observed(model)
        assert gathered(mesh, seen) == by_hand(Dense())
        assert seen.reduced == digests(model)
        assert list(seen.reduced) == list(seen.leaves[NUM_LEAVES - 1 if mesh.rank else 0])
    model.close()


def test_tied_and_frozen_parameters_are_there_once_or_not() -> None:
    seen = observed(alone(Tied(), find_unused_parameters=True), next_token)
    assert seen.leaves == by_hand(Tied(), next_token)
    assert list(seen.leaves[0]) == ["tokens.weight", "middle.weight", "middle.bias"]
