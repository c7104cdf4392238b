"""Steps that are skipped, states that are handed on, ranks that meet again: always the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instep.elastic.bits import flip_bit
from instep.elastic.memory import Copy, tensor_bytes
from instep.errors import CheckpointRejected, Diverged, ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.train import recipes
from instep.train.config import Checks, Config, Parallel
from instep.train.state import agree, capture, restore, restore_copy, step_in
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.world import world

STEPS = 3


def config(data: Path, strategy: str = "bucketed", **changes: object) -> Config:
    """The tiny recipe without dropout, which ranks that are threads cannot draw."""
    tiny = recipes.tiny()
    ranks = 2 if strategy == "threads" else 0
    tiny = replace(tiny, model=replace(tiny.model, dropout=0.0), data=data, steps=STEPS, ranks=ranks)
    return replace(tiny, parallel=Parallel(strategy=strategy), **changes)  # type: ignore[arg-type]


def beginning() -> tuple[str, dict[str, object]]:
    """What rank 0 finds where there is nothing."""
    return "the beginning", {}


def begun(trainer: Trainer) -> None:
    """All ranks take the state of before the first step, as where no rank finds another. Collective."""
    trainer.begin()
    agree(trainer, beginning)


def trained(config: Config, mesh: Mesh, steps: int = STEPS) -> Trainer:
    """A trainer after some steps of the run."""
    trainer = Trainer(config, mesh)
    begun(trainer)
    for _ in range(steps):
        trainer.step()
    return trainer


@pytest.mark.parametrize("strategy", ["bucketed", "server"])
@world(3)
def test_a_step_on_the_list_is_skipped_by_all_and_the_bits_are_those_of_one(
    mesh: Mesh, data: Path, strategy: str
) -> None:
    listed = Checks(skip_steps=(1,))
    alone = trained(config(data, checks=listed), world_of_one(), 1)
    before, made = alone.state_sha256(), alone.step()
    assert made.skipped == "step 1 is in checks.skip_steps"
    alone.steps_done = 1
    assert alone.state_sha256() == before  # but for the number of steps
    alone.steps_done = 2
    alone.step()
    together = trained(config(data, strategy, checks=listed), mesh)
    if mesh.rank == 0:
        assert together.state_sha256() == alone.state_sha256()
    assert together.evaluate() == alone.evaluate()


@pytest.mark.parametrize("strategy", ["bucketed", "server"])
@world(2)
def test_a_gradient_that_is_not_finite_is_skipped_and_counted_by_all(
    mesh: Mesh, data: Path, strategy: str
) -> None:
    faulty = config(data, strategy, fault=("nan:rank=1,step=1",))
    trainer = trained(faulty, mesh, 1)
    assert trainer.step().skipped == "gradient norm is nan"
    assert trainer.step().skipped == ""
    assert (trainer.health.skipped, trainer.health.in_a_row) == (1, 0)
    alone = trained(config(data, checks=Checks(skip_steps=(1,))), world_of_one())
    if mesh.rank == 0:
        assert trainer.state_sha256() == alone.state_sha256()


def test_replica_threads_skip_like_ranks(data):
    trainer = trained(config(data, "threads", checks=Checks(skip_steps=(1,))), world_of_one())
    alone = trained(config(data, checks=Checks(skip_steps=(1,))), world_of_one())
    assert trainer.state_sha256() == alone.state_sha256()
    trainer.leave()


@world(2)
def test_one_skipped_step_too_many_ends_the_run_and_names_rank_and_parameter(mesh: Mesh, data: Path) -> None:
    spoilt = "nan:rank=1,step=1,name=blocks.1.attention.qkv.weight"
    trainer = trained(config(data, fault=(spoilt,), checks=Checks(max_skipped=0)), mesh, 1)
    with pytest.raises(Diverged, match=r"checks.max_skipped is 0.* rank 1") as failure:
        trainer.step()
    assert failure.value.ranks == (1,)
    assert failure.value.parameter == "blocks.1.attention.qkv.weight"


@world(3)
def test_a_flipped_bit_is_found_by_comparing_replicas(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data), mesh)
    trainer.compare_replicas()
    if mesh.rank == 2:
        flip_bit(dict(trainer.entries())["exp_avg/blocks.0.attention.out.weight"])
    with pytest.raises(ReplicasDiffer, match="rank 2") as failure:
        trainer.compare_replicas()
    assert failure.value.ranks == (2,)
    assert failure.value.parameters == ("exp_avg/blocks.0.attention.out.weight",)


@world(2)
def test_ranks_compute_each_other_s_micro_batches_and_agree(mesh: Mesh, data: Path) -> None:
    watched = config(data, checks=Checks(leaves_every=1))
    trainer, alone = trained(watched, mesh), trained(config(data), world_of_one())
    assert trainer.state_sha256() == alone.state_sha256()


def test_a_state_goes_through_the_memory_copy_into_a_process_that_is_new(data):
    old = trained(config(data, checks=Checks(spike=3.0)), world_of_one())
    description, live = capture(old)
    assert step_in(description) == STEPS
    copy = Copy.create(2 * len(description), tensor_bytes(live))
    copy.write(description, live)
    new = Trainer(config(data, checks=Checks(spike=3.0)), world_of_one())
    restore_copy(new, copy)
    assert new.state_sha256() == old.state_sha256()
    assert new.last == old.last
    assert new.health.state() == old.health.state()
    assert new.step().norm == old.step().norm


def test_a_description_of_another_model_is_rejected_and_nothing_changes(data):
    trainer = trained(config(data), world_of_one())
    description, live = capture(trainer)
    other = Trainer(
        replace(config(data), model=replace(config(data).model, width=64, heads=4)), world_of_one()
    )
    before = other.state_sha256()
    with pytest.raises(CheckpointRejected):
        restore(other, description, live)
    assert other.state_sha256() == before


@pytest.mark.parametrize("strategy", ["bucketed", "server"])
@world(3)
def test_the_newest_state_wins_wherever_it_is(mesh: Mesh, data: Path, strategy: str) -> None:
    reference = trained(config(data), world_of_one())
    trainer = Trainer(config(data, strategy), mesh)
    owner = 0 if strategy == "server" else 1
    if mesh.rank == owner:
        description, live = capture(reference)
        restore(trainer, description, live)
        trainer.state_of_run = True
    elif mesh.rank == 2:
        trainer.fresh = False  # a survivor whose state is whole nowhere
        with torch.no_grad():
            next(trainer.module.parameters()).add_(1)
    source, _ = agree(trainer, beginning)
    assert source == "a survivor"
    assert trainer.steps_done == STEPS
    trainer.compare_replicas()
    assert trainer.step().norm == reference.step().norm


@world(2)
def test_where_nobody_has_a_state_rank_zero_finds_one_for_all(mesh: Mesh, data: Path) -> None:
    reference = trained(config(data), world_of_one())
    trainer = Trainer(config(data), mesh)

    def find() -> tuple[str, dict[str, object]]:
        restore(trainer, *capture(reference))
        return "a drawer", {"notes": ["it was dusty"]}

    assert agree(trainer, find) == ("a drawer", {"notes": ["it was dusty"]})
    assert trainer.state_sha256() == reference.state_sha256()


@world(2)
def test_the_same_process_takes_part_in_one_group_after_another(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data), mesh, 1)
    trainer.parallel.close()
    trainer.join(mesh)
    agree(trainer, beginning)
    trainer.step()
    alone = trained(config(data), world_of_one(), 2)
    assert trainer.state_sha256() == alone.state_sha256()
