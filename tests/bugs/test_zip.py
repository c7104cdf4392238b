"""``zip(batches, model.micro_batches(G))`` trained nothing, on all ranks alike and without a word.

``zip`` asks its first argument first, and when that has ended it does not come back to the second: the loop
over ``micro_batches`` was left in its last iteration, on every rank, so there was nobody to raise
``Desync``.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.step.micro_batches import MicroBatch
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, samples, square
from tests.world import world


def train(model: DataParallel, pairs: Iterable[tuple[MicroBatch, torch.Tensor]]) -> None:
    for _, batch in pairs:
        model(batch).square().mean().backward()


@world(2)
def test_a_loop_that_zip_has_left_is_noticed_by_the_optimizer(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [samples(mesh.rank)]
    train(
        model,
        ((micro_batch, batch) for batch, micro_batch in zip(batches, model.micro_batches(2), strict=False)),
    )
    with pytest.raises(RuntimeError, match=r"leaving the loop over micro_batches\(\).*In zip\(\).* first"):
        optimizer.step()
    train(model, zip(model.micro_batches(2), batches, strict=False))
    assert_mean_gradients(mesh, model.module, square)
    optimizer.step()
    model.close()


@world(2)
def test_a_strict_zip_comes_back(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    batches = [samples(mesh.rank)]
    train(
        model,
        ((micro_batch, batch) for batch, micro_batch in zip(batches, model.micro_batches(2), strict=True)),
    )
    assert_mean_gradients(mesh, model.module, square)
    model.close()
