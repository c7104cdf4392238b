"""What a step that failed left behind was taken for a part of the next one.

After a ``Desync`` in a plain backward the reduction stayed open: every later backward raised the old error
again. A step given up twice, once by the hook that raised and once by the forward after it, was counted
twice, so the rank was out of step for good. And a backward that had raised let the first forward of the next
declared step give up that step instead.
"""

from __future__ import annotations

import pytest
import torch

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, mean_square
from tests.replicate.replicas import assert_mean_gradients, failing_at, gradients, square
from tests.world import world


def declared_step(model: DataParallel) -> None:
    for micro_batch in model.micro_batches(4):
        mean_square(model, micro_batch, 0)


def assert_declared_step_works(model: DataParallel) -> None:
    model.zero_grad()
    declared_step(model)
    one = DataParallel(filled(Dense()), process_group=world_of_one())
    declared_step(one)
    assert all(torch.equal(x, y) for x, y in zip(gradients(model), gradients(one), strict=True))


@pytest.mark.parametrize("layer", [0, 5])
@world(2)
def test_plain_backwards_after_one_that_raised_on_one_rank(mesh: Mesh, layer: int) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    for turn in range(3):
        if mesh.rank == 1:
            weight = model.module.layers[layer].weight
            with failing_at(weight, ArithmeticError), pytest.raises(ArithmeticError):
                square(model, 1).backward()
        else:
            with pytest.raises(Desync, match=rf"rank 1 left step {turn}"):
                square(model, 0).backward()
        square(model, mesh.rank).backward()
        assert_mean_gradients(mesh, model.module, square)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
    model.close()


@world(2)
def test_a_declared_step_after_one_whose_backward_raised(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    with failing_at(model.module.layers[0].weight, ArithmeticError), pytest.raises(ArithmeticError):
        declared_step(model)
    assert_declared_step_works(model)
    model.close()


@world(2)
def test_a_declared_step_after_a_backward_without_synchronisation_that_raised(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    weight = model.module.layers[0].weight
    with model.no_sync(), failing_at(weight, ArithmeticError), pytest.raises(ArithmeticError):
        square(model, mesh.rank).backward()
    assert_declared_step_works(model)
    model.close()


def leave_after_the_last_backward(model: DataParallel) -> None:
    for micro_batch in model.micro_batches(4):
        mean_square(model, micro_batch, 0)
        if micro_batch.index % 2:
            raise ArithmeticError("the loss is not a number")


@world(2)
def test_an_exception_after_the_last_backward_of_the_very_first_step(mesh: Mesh) -> None:
    """All buckets had left by then, so the others updated their weights with a gradient that this rank had
    dropped; in the first step they also waited for it in the broadcast of the bucket order.
    """
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    if mesh.rank == 0:
        with pytest.raises(ArithmeticError):
            leave_after_the_last_backward(model)
    else:
        with pytest.raises(Desync, match="rank 0 left step 0"):
            declared_step(model)
    assert_declared_step_works(model)
    model.close()
