"""Shard groups that each have the state once, of a run: always what one rank does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from instep.elastic.faults import flip_bit
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.run.recovery import Checkpoints, restore_newest
from tests.run.snapshots import Supervisor, snapshots_of
from tests.run.test_stages import assert_bits_of_one, config, hash_of_one
from tests.run.text_training import NOWHERE, TextTraining, trained
from tests.world import world

groups = partial(world, timeout_s=20.0)  # six ranks on two cores take their time


@groups(4, backend="shm", dp=2, shard=2)
def test_two_groups_of_two_are_like_one_rank(mesh: Mesh, data: Path) -> None:
    assert_bits_of_one(mesh, config(data, 0, width=128), config(data, 3, width=128))


@pytest.mark.parametrize("stage", [1, 3])
@groups(6, dp=3, shard=2)
def test_a_moment_that_flips_in_one_of_three_groups_is_named_with_its_rank(
    mesh: Mesh, data: Path, stage: int
) -> None:
    each = trained(config(data, stage), mesh, 1)
    training = each.training
    training.compare_replicas()
    name, moment = next(entry for entry in training.entries() if entry[0].startswith("exp_avg_sq/"))
    if mesh.rank == 3:
        flip_bit(moment)
    told = mesh.world.group.all_gather_bytes(name.encode(), "the names of moments")
    with pytest.raises(ReplicasDiffer, match="rank 3 holds other values than the other ranks") as failure:
        training.compare_replicas()
    assert (failure.value.ranks, failure.value.parameters) == ((3,), (told[3].decode(),))
    each.close()


@groups(4, dp=2, shard=2)
def test_weights_that_differ_between_two_groups_leave_no_majority(mesh: Mesh, data: Path) -> None:
    each = trained(config(data, 3), mesh, 1)
    if mesh.rank == 2:
        flip_bit(each.training.entries()[0][1])
    with pytest.raises(ReplicasDiffer, match="ranks 0 and 2 hold different values"):
        each.training.compare_replicas()
    each.close()


@world(3)
def test_a_flipped_bit_in_a_copy_of_the_weights_is_named_with_its_rank(mesh: Mesh, data: Path) -> None:
    """In stage 1 all have the weights, and each its part of the moments."""
    each = trained(config(data, 1), mesh, 1)
    if mesh.rank == 2:
        flip_bit(each.module.head.norm.weight)
    with pytest.raises(ReplicasDiffer, match="rank 2 holds other values than the other ranks in 'head"):
        each.training.compare_replicas()
    each.close()


def copied(mesh: Mesh, data: Path, supervisor: Supervisor) -> None:
    """Each rank copies its share of the state after the first step."""
    each = trained(config(data, 3), mesh, 1)
    snapshots_of(supervisor).write(each.training)
    mesh.world.group.barrier("the test")
    each.close()


def restored(mesh: Mesh, data: Path, supervisor: Supervisor) -> None:
    """They go on from it, with the second step."""
    expected = hash_of_one(data, 2)
    each = TextTraining(config(data, 3), mesh)
    memory = snapshots_of(supervisor)
    assert restore_newest(each.training, memory, Checkpoints(NOWHERE, 20))[0].endswith("the snapshot")
    each.step()
    assert each.training.state_sha256() == expected
    each.close()


@pytest.mark.parametrize("after", [(2, 2), (1, 3)], ids=str)
def test_others_go_on_from_the_copies_of_two_groups(data: Path, after: tuple[int, int]) -> None:
    supervisor, (dp, shard) = Supervisor(), after
    groups(4, dp=2, shard=2)(copied)(data=data, supervisor=supervisor)
    assert len(supervisor.all) == 4
    groups(dp * shard, dp=dp, shard=shard)(restored)(data=data, supervisor=supervisor)
