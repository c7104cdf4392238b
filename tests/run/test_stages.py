"""Divided state, in shard groups too: figures, hashes, samples and copies are those of one rank."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.elastic.faults import flip_bit
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.recipes.text_config import Config
from instep.record.step_lines import SAMPLE_EVERY
from instep.run.rank_state import Holds
from instep.run.recovery import Checkpoints, restore_newest
from tests.parity import world_of_one
from tests.run.snapshots import Supervisor, snapshots_of
from tests.run.text_training import NOWHERE, STEPS, TextTraining, tiny, trained
from tests.world import world


def config(data: Path, stage: int, *, width: int = 96, **changes: object) -> Config:
    """8 micro-batches a step, clipping, and weights of up to 9 blocks, which edges of slices fall into."""
    base = tiny(data, "bucketed", stage, **changes)
    model = replace(base.model, layers=1, width=width)
    return replace(base, model=model)


def history(each: TextTraining) -> list[Any]:
    """What some steps were like and led to, one after the other; an evaluation; the contract. Collective."""
    each.begin()
    training, steps = each.training, []
    for made in (each.step() for _ in range(STEPS)):
        steps.append((training.state_digests(), made.loss, made.norm, training.sampled(SAMPLE_EVERY)))
    return [steps, training.evaluate(), training.contract]


_histories: dict[str, list[Any]] = {}
_lock = threading.Lock()


def history_of_one(config: Config) -> list[Any]:
    """That of one rank, trained once for all who ask in this process."""
    name = repr(replace(config, data=None))  # all read the same text
    with _lock:
        if name not in _histories:
            alone = TextTraining(config, world_of_one())
            _histories[name] = history(alone)
            alone.close()
        return _histories[name]


def hash_of_one(data: Path, steps: int) -> str:
    """The state of one rank after some steps."""
    return history_of_one(config(data, 0))[0][steps - 1][0][0]


def assert_bits_of_one(mesh: Mesh, alone: Config, together: Config) -> None:
    expected = history_of_one(alone)
    each = TextTraining(together, mesh)
    assert history(each) == expected
    each.training.compare_replicas()
    assert together.optim.clip > 0
    each.close()


@pytest.mark.parametrize("stage", [2, 3])
@world(2, backend="shm")
def test_two_ranks_have_the_bits_of_one(mesh: Mesh, data: Path, stage: int) -> None:
    assert_bits_of_one(mesh, config(data, 0), config(data, stage))


@world(2)
def test_no_rank_has_all_of_a_divided_state_until_it_is_alone(mesh: Mesh, data: Path) -> None:
    together = trained(config(data, 1), mesh, 1)
    assert together.training.rank_state.holds is Holds.SHARDS
    together.close()
    alone = trained(config(data, 1), world_of_one(), 1)
    assert alone.training.rank_state.holds is Holds.EVERYTHING
    alone.close()


def parked(config: Config) -> TextTraining:
    """As under `instep run`: built in a world of one, and kept until ranks meet."""
    training = TextTraining(config, world_of_one())
    training.training.keep()
    return training


@pytest.mark.parametrize("stage", [1, 3])
@world(2, backend="shm")
def test_who_has_left_after_a_first_step_that_not_all_have_made_begins_again_with_others(
    mesh: Mesh, data: Path, stage: int
) -> None:
    """All begin with what was built, which is kept until it is known that a step of it is kept."""
    expected = hash_of_one(data, 2)
    both = parked(config(data, stage))
    both.join(mesh)
    both.agree()
    agreed, both.training.agreed = both.training.agreed, lambda: None  # type: ignore[method-assign]
    both.step()
    first = both.training.state_sha256()
    weights = {name: p.clone() for name, p in both.module.named_parameters()} if stage < 3 else {}
    both.leave()
    assert both.training.rank_state.holds is Holds.NOTHING
    assert all(torch.equal(weights[name], p) for name, p in both.module.named_parameters() if weights)
    both.join(world_of_one())
    both.agree()
    both.training.agreed = agreed  # type: ignore[method-assign]
    both.step()
    assert both.training.state_sha256() == first
    both.step()
    assert both.training.state_sha256() == expected
    both.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_that_was_sharded_by_half_may_join_again(
    monkeypatch: pytest.MonkeyPatch, data: Path, stage: int
) -> None:
    """A rank may be lost when the weights are in slices already, and the reducer is not there yet."""
    one = parked(config(data, stage))
    monkeypatch.setattr("instep.shard.sharding.SliceReducer", _lose)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        one.join(world_of_one())
    monkeypatch.undo()
    one.leave()
    one.join(world_of_one())
    one.agree()
    one.step()
    assert one.training.state_sha256() == hash_of_one(data, 1)
    one.close()


def _lose(*args: object, **options: object) -> None:
    raise RuntimeError("a rank is lost")


@pytest.mark.parametrize(("rank", "heals"), [(0, False), (1, True)])
@world(2)
def test_a_bit_that_flips_before_the_update_spreads_from_the_owner_and_heals_elsewhere(
    mesh: Mesh, data: Path, rank: int, heals: bool
) -> None:
    """The first weight is in the first rank's slice."""
    expected = hash_of_one(data, 2)
    both = trained(config(data, 1, fault=(f"flip:rank={rank},step=1,phase=update",)), mesh, 2)
    both.training.compare_replicas()
    assert (both.training.state_sha256() == expected) == heals
    both.close()


groups = partial(world, timeout_s=20.0)  # six ranks on two cores take their time


@groups(4, backend="shm", dp=2, shard=2)
def test_two_groups_of_two_are_like_one_rank(mesh: Mesh, data: Path) -> None:
    assert_bits_of_one(mesh, config(data, 0, width=128), config(data, 3, width=128))


@groups(6, dp=3, shard=2)
def test_a_moment_that_flips_in_one_of_three_groups_is_named_with_its_rank(mesh: Mesh, data: Path) -> None:
    each = trained(config(data, 3), mesh, 1)
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


def test_others_go_on_from_the_copies_of_two_groups(data: Path) -> None:
    supervisor, (dp, shard) = Supervisor(), (1, 3)
    groups(4, dp=2, shard=2)(copied)(data=data, supervisor=supervisor)
    assert len(supervisor.all) == 4
    groups(dp * shard, dp=dp, shard=shard)(restored)(data=data, supervisor=supervisor)
