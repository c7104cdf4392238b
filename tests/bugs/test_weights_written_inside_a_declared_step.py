"""Weights that changed between the micro-batches of a declared step: other bits for every placement.

A decay in the loop's body, or a load: the micro-batches before it have other weights than those after it, and
which these are depends on the ranks. An optimizer's step there, and edited gradients, were refused already.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.checkpoint.shorthand import load, save
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.replicate.replicas import square
from tests.world import world

WRITTEN = r"'layers\.0\.bias' was written to in micro-batch \d"
IN_FORWARD = r"'layers\.0\.weight' was written to in forward"


def wrapped(mesh: Any, stage: int, module: nn.Module | None = None) -> Any:
    module = filled(module or Dense())
    if stage == 0:
        return DataParallel(module, process_group=mesh)
    return fully_shard(module, mesh, stage=stage)


def step(model: Any, edit: Callable[[], object]) -> None:
    for micro_batch in model.micro_batches(6):
        square(model, micro_batch.index).backward()
        with torch.no_grad():
            edit()


def leaves_a_write(mesh: Any, stage: int, frozen: bool) -> None:
    module = Dense()
    module.layers[0].bias.requires_grad_(not frozen)
    model = wrapped(mesh, stage, module)
    try:
        step(model, lambda: module.layers[0].bias.mul_(0.99))
    finally:
        model.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_write_that_stays_is_refused(stage: int, frozen: bool) -> None:
    with pytest.raises(ValueError, match=WRITTEN):
        leaves_a_write(world_of_one(), stage, frozen)


@world(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_so_it_is_on_two_ranks(mesh: Mesh, stage: int, frozen: bool) -> None:
    """Where weights are gathered, a rank may hear of the other one's error before it looks for its own."""
    heard = r"rank \d left the step before its gradients" if stage else WRITTEN
    with pytest.raises((ValueError, Desync), match=f"{WRITTEN}|{heard}"):
        leaves_a_write(mesh, stage, frozen)


@world(2)
def test_on_one_rank_the_others_raise_too(mesh: Mesh) -> None:
    model = wrapped(mesh, 0)
    with pytest.raises(ValueError if mesh.rank else Desync, match=r"written to|rank 1 left step 0"):
        step(model, lambda: mesh.rank and model.module.layers[0].weight.mul_(0.99))
    model.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_write_that_is_taken_back_in_the_same_micro_batch_is_legal(stage: int) -> None:
    model = wrapped(world_of_one(), stage)
    parameters = list(model.parameters())

    def aside() -> None:
        kept = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.add_(0.1)
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)

    step(model, aside)


class Clamped(Dense):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_so_is_a_weight_that_every_forward_clamps(stage: int) -> None:
    model = wrapped(world_of_one(), stage, Clamped())
    step(model, lambda: None)


class ClampedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def clamps_gathered_weights(mesh: Any, stage: int) -> None:
    module = Dense()
    first = module.layers[0]
    module.layers[0] = ClampedLinear(first.in_features, first.out_features)
    model = wrapped(mesh, stage, module)
    try:
        step(model, lambda: None)
    finally:
        model.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_that_writes_to_gathered_weights_is_refused(stage: int) -> None:
    with pytest.raises(RuntimeError, match=IN_FORWARD):
        clamps_gathered_weights(world_of_one(), stage)


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_so_it_is_on_two_ranks_where_it_would_be_lost(mesh: Mesh, stage: int) -> None:
    with pytest.raises(
        (RuntimeError, Desync), match=f"{IN_FORWARD}|rank \\d left the step before its gradients"
    ):
        clamps_gathered_weights(mesh, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_in_the_loop_is_refused(stage: int, tmp_path: Path) -> None:
    model = wrapped(world_of_one(), stage)
    save(tmp_path, step=0, model=model)
    with pytest.raises(ValueError, match=r"instep\.load inside micro_batches\(\)"):
        step(model, lambda: load(tmp_path, model=model))
    load(tmp_path, model=model)
    step(model, lambda: None)
