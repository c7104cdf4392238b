"""torch's Adafactor takes the eps that it was not given from the dtype of the first parameter that it steps,
and keeps it for the rest of the group. On ranks that step some of the parameters each, another one may be
first: biases in float32 behind a weight in two bytes got other bits than from the plain optimizer."""

import pytest
import torch
from torch.optim import Adafactor

from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.shard.given import parameters, set_gradients
from tests.world import world


@world(2)
@pytest.mark.parametrize("foreach", [None, False, True])
def test_ranks_that_share_out_parameters_of_two_dtypes_take_the_eps_of_one_process(
    mesh: Mesh, foreach: bool | None
) -> None:
    def given():
        return [
            *parameters([(72,)], torch.bfloat16),
            *parameters([(72, 72), (72,), (72, 2), (2,)]),
        ]

    ours, expected = given(), given()
    sharded = ShardedOptimizer(ours, Adafactor, mesh, foreach=foreach)
    plain = Adafactor(expected, foreach=foreach)
    for step in range(2):
        for optimizer, its in ((plain, expected), (sharded, ours)):
            set_gradients(its, step)
            for p in its:
                p.grad.mul_(1e-4)  # so small that eps decides: that of bfloat16 is 65,536 times float32's
            optimizer.step()
    for mine, wanted in zip(ours, expected, strict=True):
        assert torch.equal(mine, wanted)
    assert sharded.param_groups[0]["eps"] == plain.param_groups[0]["eps"] == (None, 1e-3)
    sharded.close()
