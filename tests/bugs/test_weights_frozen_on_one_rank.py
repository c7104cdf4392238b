"""A layer frozen on one rank alone, after wrapping: the mean lacked that rank's share, and all ranks agreed.

So no comparison of replicas could see it. A warning said that "no gradient came", but not why, and none came
where another parameter had been warned of before: once per model, not once per parameter.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.replicate.replicas import square
from tests.world import world

ALONE = r"frozen on some ranks alone .*: 'layers\.0\.weight' on rank 1; in step 0 "


def wrapped(mesh: Mesh, stage: int, **options: Any) -> Any:
    if stage == 0:
        return DataParallel(filled(Dense()), process_group=mesh, **options)
    return fully_shard(filled(Dense()), mesh, stage=stage, **options)


def first_layer(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, nn.Linear))


def step(model: Any, num_micro_batches: int | None, rank: int) -> None:
    model.zero_grad()
    if num_micro_batches is None:
        square(model, rank).backward()
    for micro_batch in model.micro_batches(num_micro_batches) if num_micro_batches else ():
        square(model, micro_batch.index).backward()


@pytest.mark.filterwarnings("ignore:no gradient came")
@world(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("num_micro_batches", [None, 4], ids=["plain", "declared"])
def test_it_is_an_error_on_all_ranks_that_names_both(
    mesh: Mesh, stage: int, num_micro_batches: int | None
) -> None:
    model = wrapped(mesh, stage)
    step(model, num_micro_batches, mesh.rank)
    first = first_layer(model).weight
    first.requires_grad_(mesh.rank == 0)
    with pytest.raises(Desync, match=ALONE):
        step(model, num_micro_batches, mesh.rank)
    first.requires_grad_(False)  # on all ranks: no gradient for any, as with torch's DDP
    step(model, num_micro_batches, mesh.rank)
    assert first.grad is None
    first.requires_grad_(True)
    step(model, num_micro_batches, mesh.rank)
    assert first.grad is not None
    model.close()


@world(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_it_is_allowed_where_unused_parameters_are_expected(mesh: Mesh, stage: int) -> None:
    model = wrapped(mesh, stage, find_unused_parameters=True)
    first_layer(model).weight.requires_grad_(mesh.rank == 0)
    step(model, 2, mesh.rank)
    model.close()


@world(2)
def test_a_rank_without_a_micro_batch_may_have_frozen_what_it_likes(mesh: Mesh) -> None:
    model = wrapped(mesh, 0)
    first_layer(model).weight.requires_grad_(mesh.rank == 0)
    step(model, 1, mesh.rank)
    model.close()


def test_each_unused_parameter_is_warned_of_once() -> None:
    model = DataParallel(filled(Dense()), process_group=world_of_one())
    seen: set[int] = set()
    for position in (0, 0, 3, 0):
        layer = model.module.layers[position]
        model.requires_grad_(True)
        layer.bias.requires_grad_(False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, None, 0)
        names = [name for name in ("layers.0.bias", "layers.3.bias") if any(name in str(w) for w in caught)]
        expected = [] if position in seen else [f"layers.{position}.bias"]
        assert names == expected
        seen.add(position)
