"""Divided state, and one copy of the weights: figures, hashes and samples are those of one rank."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.events import PARAMETER_GATHER
from instep.mesh.mesh import Mesh
from instep.recipes.text_config import Config
from instep.record.step_lines import SAMPLE_EVERY
from instep.run.rank_state import Holds
from tests.parity import world_of_one
from tests.run.text_training import STEPS, TextTraining, tiny, trained
from tests.world import world

STAGES = [2, 3]


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


@pytest.mark.parametrize("stage", STAGES)
@world(2, backend="shm")
def test_two_ranks_have_the_bits_of_one(mesh: Mesh, data: Path, stage: int) -> None:
    assert_bits_of_one(mesh, config(data, 0), config(data, stage))


@pytest.mark.parametrize(("stage", "autocast"), [(0, "off"), (3, "bf16")])
@world(3, by="process", backend="shm")
def test_three_ranks_that_compute_blocks_again_have_the_bits_of_one_that_keeps_them(
    mesh: Mesh, data: Path, stage: int, autocast: str
) -> None:
    """With dropout, which a block that is computed again has to draw again."""
    base = config(data, 0, width=32, autocast=autocast)
    alone = replace(base, model=replace(base.model, layers=2, dropout=0.1))
    again = replace(alone, model=replace(alone.model, checkpoint=True))
    assert_bits_of_one(mesh, alone, replace(again, parallel=replace(again.parallel, shard_stage=stage)))


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


@world(2)
def test_gathers_of_weights_are_in_the_breakdown_and_in_no_bucket(mesh: Mesh, data: Path) -> None:
    both = trained(config(data, 3), mesh)
    both.training.timing.end()
    found = both.training.timing.breakdown()
    assert found.gathers_s > 0
    assert 0 <= found.gathers_hidden_s <= found.gathers_s
    assert PARAMETER_GATHER not in found.hosts
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found
    both.close()


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
