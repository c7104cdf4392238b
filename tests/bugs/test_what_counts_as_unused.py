"""A rank that had nothing to do was reported as one that left every parameter unused.

With fewer micro-batches than ranks, or weights of 0, ``find_unused_parameters=False`` raised in a correct
step.
"""

from __future__ import annotations

import torch

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, mean_square
from tests.replicate.replicas import gradients
from tests.world import world


def gradients_of_leaf_zero() -> list[torch.Tensor]:
    one = DataParallel(filled(Dense()), process_group=world_of_one())
    for micro_batch in one.micro_batches(1):
        mean_square(one, micro_batch, 0)
    return gradients(one)


@world(3)
def test_ranks_without_micro_batches_use_nothing_and_that_is_right(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, find_unused_parameters=False)
    for micro_batch in model.micro_batches(1):
        mean_square(model, micro_batch, 0)
    assert all(map(torch.equal, gradients(model), gradients_of_leaf_zero()))
    model.close()


@world(2)
def test_so_is_a_rank_whose_weights_are_all_zero(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, find_unused_parameters=False)
    for micro_batch in model.micro_batches(2):
        micro_batch.weight = 1 - micro_batch.index
        if micro_batch.weight:
            mean_square(model, micro_batch, 0)
    assert all(map(torch.equal, gradients(model), gradients_of_leaf_zero()))
    model.close()
