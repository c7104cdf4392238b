"""A run whose optimizer state is divided among the ranks has the bits, the hashes and the samples of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from instep.elastic.faults import flip_bit
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.ordered.hash import bare
from instep.recipes import text_config
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config, validate
from instep.run.ledger import SAMPLE_EVERY
from instep.run.memory_usage import run_memory, words
from instep.run.rank_state import Holds
from instep.shard.optimizer import ShardedOptimizer
from instep.train.run_config import ChecksConfig, OptimConfig, ParallelConfig
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.train.test_trainer import agree, trained
from tests.world import world

STEPS = 3


def config(data: Path, stage: int, *, dropout: float = 0.1, width: int = 96, **changes: object) -> Config:
    """8 micro-batches a step, clipping, and weights of up to 9 blocks, which edges of slices fall into.

    Ranks that are threads cannot draw dropout.
    """
    tiny = text_config.tiny()
    model = replace(tiny.model, dropout=dropout, layers=1, width=width)
    tiny = replace(tiny, model=model, data=data, steps=STEPS, parallel=ParallelConfig(shard_stage=stage))
    return replace(tiny, **changes)  # type: ignore[arg-type]


def assert_bits_of_one(mesh: Mesh, data: Path) -> None:
    alone, together = (
        Trainer(TextRecipe(config(data, 0)), world_of_one()),
        Trainer(TextRecipe(config(data, 1)), mesh),
    )
    assert together.config.optim.clip > 0
    for trainer in (alone, together):
        agree(trainer)
    for _ in range(STEPS):
        made, plain = together.step(), alone.step()
        assert (made.loss, made.norm) == (plain.loss, plain.norm)
        assert together.sampled(SAMPLE_EVERY) == alone.sampled(SAMPLE_EVERY)
        assert together.state_digests() == alone.state_digests()
    assert together.evaluate() == alone.evaluate()
    assert together.contract == alone.contract
    together.compare_replicas()


@world(1, by="process")
def test_one_rank_has_the_bits_of_a_run_without_sharding(mesh: Mesh, data: Path) -> None:
    assert_bits_of_one(mesh, data)


@world(2, by="process", backend="shm")
def test_two_ranks_have_the_bits_of_one(mesh: Mesh, data: Path) -> None:
    assert_bits_of_one(mesh, data)


@world(3, by="process")
def test_three_ranks_have_the_bits_of_one(mesh: Mesh, data: Path) -> None:
    assert_bits_of_one(mesh, data)


@world(4, by="process")
def test_four_ranks_have_the_bits_of_one(mesh: Mesh, data: Path) -> None:
    assert_bits_of_one(mesh, data)


@world(2)
def test_momentum_is_divided_too_and_a_skipped_step_is_one(mesh: Mesh, data: Path) -> None:
    sgd = {"optim": OptimConfig(name="sgd", lr=0.1), "checks": ChecksConfig(skip_steps=(1,)), "dropout": 0.0}
    together = trained(config(data, 1, **sgd), mesh)
    alone = trained(config(data, 0, **sgd), world_of_one())
    assert together.state_sha256() == alone.state_sha256()


@world(2)
def test_no_rank_has_all_of_the_state_until_it_is_alone(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 1, dropout=0.0), mesh, 1)
    assert isinstance(trainer.optimizer, ShardedOptimizer)
    assert trainer.rank_state.holds is Holds.SHARDS
    alone = trained(config(data, 1, dropout=0.0), world_of_one(), 1)
    assert alone.rank_state.holds is Holds.EVERYTHING


@world(2)
def test_who_leaves_keeps_weights_and_steps_and_may_begin_again(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 1, dropout=0.0), mesh, 1)
    first = trainer.state_sha256()
    weights = {name: x.clone() for name, x in trainer.module.named_parameters()}
    trainer.leave()
    assert not isinstance(trainer.optimizer, ShardedOptimizer)
    assert all(bool((weights[name] == x).all()) for name, x in trainer.module.named_parameters())
    trainer.begin()
    trainer.join(world_of_one())
    agree(trainer)
    trainer.step()
    assert trainer.state_sha256() == first
    trainer.begin()  # sharded, as it is now
    trainer.step()
    assert trainer.state_sha256() == first


@world(3)
def test_a_flipped_bit_in_the_piece_of_a_rank_changes_the_hash_and_names_the_entry(
    mesh: Mesh, data: Path
) -> None:
    trainer = trained(config(data, 1, dropout=0.0), mesh, 1)
    (before, sound) = trainer.state_digests()
    pieces = [(part.name, part.first, part.last) for part in trainer.state.shards() if not part.is_whole]
    cut = next(name for name, _, _ in pieces if name.startswith("optimizer:exp_avg_sq/"))
    told = mesh.world.group.all_gather_bytes(cut.encode(), "the names of pieces")
    name = bare(told[1].decode())
    if mesh.rank == 1:
        flip_bit(dict(trainer.entries())[name], index=3, bit=0)
    after, spoiled = trainer.state_digests()
    assert after != before
    assert [each for each in sound if sound[each] != spoiled[each]] == [name]


@world(3)
def test_a_flipped_bit_in_a_copy_of_the_weights_is_named_with_its_rank(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 1, dropout=0.0), mesh, 1)
    if mesh.rank == 2:
        flip_bit(trainer.module.head.norm.weight)
    with pytest.raises(ReplicasDiffer, match="rank 2 holds other values than the other ranks in 'head"):
        trainer.compare_replicas()


@world(2)
def test_a_bit_that_flips_before_the_update_spreads_from_the_owner_and_heals_elsewhere(
    mesh: Mesh, data: Path
) -> None:
    alone = trained(config(data, 0, dropout=0.0), world_of_one(), 2)
    for rank, heals in ((0, False), (1, True)):  # the first weight is in the first rank's slice
        flip = (f"flip:rank={rank},step=1,phase=update",)
        trainer = trained(config(data, 1, dropout=0.0, fault=flip), mesh, 2)
        trainer.compare_replicas()
        assert (trainer.state_sha256() == alone.state_sha256()) == heals


@world(2)
def test_memory_of_the_moments_is_halved_on_two_ranks_as_the_formula_says(mesh: Mesh, data: Path) -> None:
    memory = run_memory(trained(config(data, 1, dropout=0.0, width=128), mesh, 1))
    size = memory["formula"]["parameters"]
    assert memory["formula"]["bytes_per_parameter"] == 12
    for row in memory["ranks"]:
        assert row["parameters"] == pytest.approx(size, rel=0.05)
        assert row["gradients"] == pytest.approx(size, rel=0.05)
        assert row["optimizer"] == pytest.approx(size, rel=0.05)  # two moments, halved
    assert "12 bytes per parameter, as the formula says" in words(memory)


@pytest.mark.parametrize("strategy", ["server", "threads"])
def test_strategies_with_one_holder_of_the_state_are_refused(data: Path, strategy: str) -> None:
    wrong = config(data, 1, dropout=0.0, parallel=ParallelConfig(strategy=strategy, shard_stage=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"shard_stage 1 with parallel.strategy {strategy}.* use another"):
        validate(wrong)


def test_a_stage_that_there_is_not_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel.shard_stage: expected 0, 1, 2 or 3, got 4"):
        validate(config(data, 4))
