"""The losses of a step reach every rank unrounded, and no number of ranks moves a bit of their mean."""

import math

import pytest
import torch

from instep.mesh.mesh import Mesh
from instep.run.losses import gather, mean_loss, share
from tests.world import world


@world(3)
def test_every_value_reaches_every_rank_unrounded(mesh: Mesh) -> None:
    values = [math.pi, -0.1, 1e300, 5e-324, 1 / 3]
    mine = {i: value for i, value in enumerate(values) if i % mesh.world.size == mesh.rank}
    assert gather(mine, len(values), mesh.world.group) == values


@world(2)
def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches(mesh: Mesh) -> None:
    losses = [0.1, 0.2, 0.4]
    mine = {0: losses[0], 2: losses[2]} if mesh.rank else {1: losses[1]}
    mine = {i: torch.tensor(loss, dtype=torch.float64) for i, loss in mine.items()}
    told = share(mine, 3, {"votes": 1.0 + mesh.rank, "norm": 0.5 * mesh.rank}, mesh.world.group)
    assert mean_loss(told.losses) == math.fsum(losses) / 3
    assert told.sums == {"norm": 0.5, "votes": 3.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@world(2)
def test_one_micro_batch_that_has_diverged_shows_in_the_loss_of_all(mesh: Mesh, bad: float) -> None:
    mine = {mesh.rank: torch.tensor(bad if mesh.rank else 1.0)}
    assert math.isnan(mean_loss(share(mine, 2, {}, mesh.world.group).losses))
