"""Rows of ranks that each have the state once, and rows that repeat it: always what one rank does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.faults import flip_bit
from instep.errors import Diverged, ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.recipes.text import TextRecipe, run
from instep.recipes.text_config import validate
from instep.run.ledger import SAMPLE_EVERY
from instep.run.memory_usage import run_memory
from instep.train.run_config import ChecksConfig, ParallelConfig, check_rows, check_world, shard_axis
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.train.test_fully import config
from tests.train.test_snapshots import Supervisor, copied, kept_bytes, restored
from tests.train.test_trainer import begun, trained
from tests.world import world

STEPS = 2
KINDS = pytest.mark.parametrize(
    ("stage", "one_copy"), [(1, False), (2, False), (3, False), (1, True), (2, True)]
)
rows = partial(world, timeout_s=20.0)  # a disk takes its time, and so do six ranks on two cores


def history(trainer: Trainer) -> list[object]:
    """What ``STEPS`` steps were like, and what they led to. Collective."""
    steps = []
    for _ in range(STEPS):
        made = trainer.step()
        steps.append((made.loss, made.norm, trainer.sampled(SAMPLE_EVERY)))
    return [steps, trainer.state_digests(), trainer.evaluate()]


def one_rank(data: Path) -> list[object]:
    alone = Trainer(TextRecipe(config(data, 0, width=128)), world_of_one())
    begun(alone)
    return history(alone)


def like_one_rank(mesh: Mesh, data: Path, stage: int, one_copy: bool, expected: list[object]) -> None:
    """The bits of one rank, from the micro-batches that the plan says; every row has all moments once."""
    trainer = Trainer(TextRecipe(config(data, stage, one_copy, width=128)), mesh)
    begun(trainer)
    losses, _ = trainer._gradients()
    assert list(losses) == list(trainer.plan()[mesh.rank])
    trainer.parallel.skip()
    assert history(trainer) == expected
    trainer.compare_replicas()
    memory, shard = run_memory(trainer), mesh.axes.size("shard")
    trainer.parallel.close()
    moments = [row["optimizer"] for row in memory["ranks"]]
    for first in range(0, len(moments), shard):
        its_row = sum(moments[first : first + shard])
        assert its_row == pytest.approx(shard * memory["formula"]["optimizer"], rel=0.01)
    if shard == 2:  # the blocks of so small a model cannot be shared out among three as evenly
        require_formula(memory, stage, one_copy)


def require_formula(memory: dict[str, Any], stage: int, one_copy: bool) -> None:
    """Of rows of two ranks."""
    divided = {1: 8, 2: 12, 3: 16}[stage] + 4 * one_copy
    assert memory["formula"]["bytes_per_parameter"] == 16 - divided / 2
    for row in memory["ranks"]:
        for purpose in ("parameters", "gradients", "optimizer"):
            assert row[purpose] == pytest.approx(memory["formula"][purpose], rel=0.05), purpose


@KINDS
def test_two_rows_of_two_are_like_one_rank(data: Path, stage: int, one_copy: bool) -> None:
    body = rows(4, backend="shm", dp=2, shard=2)(like_one_rank)
    body(data=data, stage=stage, one_copy=one_copy, expected=one_rank(data))


@pytest.mark.parametrize("stage", [1, 3])
def test_two_rows_of_three_are_like_one_rank_though_eight_micro_batches_are_uneven(
    data: Path, stage: int
) -> None:
    body = rows(6, dp=2, shard=3)(like_one_rank)
    body(data=data, stage=stage, one_copy=False, expected=one_rank(data))


@rows(4, dp=2, shard=2)
def test_who_leaves_rows_may_join_others_and_begin_again(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 3), mesh, 1)
    first = trainer.state_sha256()
    trainer.leave()
    trainer.join(world_of_one())
    begun(trainer)
    trainer.step()
    assert trainer.state_sha256() == first


@pytest.mark.parametrize("stage", [1, 3])
@rows(6, dp=3, shard=2)
def test_a_moment_that_flips_in_one_of_three_rows_is_named_with_its_rank(
    mesh: Mesh, data: Path, stage: int
) -> None:
    trainer = trained(config(data, stage), mesh, 1)
    trainer.compare_replicas()
    name, moment = next(entry for entry in trainer.entries() if entry[0].startswith("exp_avg_sq/"))
    if mesh.rank == 3:
        flip_bit(moment)
    told = mesh.world.group.all_gather_bytes(name.encode(), "the names of moments")
    with pytest.raises(ReplicasDiffer, match="rank 3 holds other values than the other ranks") as failure:
        trainer.compare_replicas()
    assert (failure.value.ranks, failure.value.parameters) == ((3,), (told[3].decode(),))
    trainer.parallel.close()


@rows(4, dp=2, shard=2)
def test_weights_that_differ_between_two_rows_leave_no_majority(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 3), mesh, 1)
    if mesh.rank == 2:
        flip_bit(trainer.entries()[0][1])
    with pytest.raises(ReplicasDiffer, match="ranks 0 and 2 hold different values"):
        trainer.compare_replicas()
    trainer.parallel.close()


@pytest.mark.parametrize("after", [(2, 2), (1, 3)])
def test_shard_groups_share_out_the_snapshot_and_others_go_on_from_it(
    data: Path, tmp_path: Path, after: tuple[int, int]
) -> None:
    supervisor, (dp, shard) = Supervisor(), after
    there = {"data": data, "supervisor": supervisor, "path": tmp_path}
    rows(4, dp=2, shard=2)(copied)(**there, steps=(1, 3))
    sizes = [kept_bytes(kept) for kept in supervisor.all]
    assert len(sizes) == 4 and max(sizes) < 0.5 * sum(sizes)  # each writes a share of what two hold
    rows(dp * shard, dp=dp, shard=shard)(restored)(**there, step=3)


@rows(4, dp=2, shard=2)
def test_one_skipped_step_too_many_names_the_micro_batch_of_the_second_row(mesh: Mesh, data: Path) -> None:
    """The second row has micro-batches 4 to 7, its second rank every other one of them."""
    spoilt = "nan:rank=3,step=1,name=blocks.0.attention.qkv.weight"
    trainer = trained(config(data, 3, fault=(spoilt,), checks=ChecksConfig(max_skipped=0)), mesh, 1)
    with pytest.raises(Diverged, match="in micro-batch 5, which rank 3 computed"):
        trainer.step()
    trainer.parallel.close()


@given(st.integers(1, 40), st.integers(2, 40))
def test_rows_are_as_long_as_asked_for_or_longer_and_leave_no_rank_over(num_ranks: int, asked: int) -> None:
    axis = shard_axis(num_ranks, asked)
    assert num_ranks % axis == 0
    assert axis >= min(asked, num_ranks)
    assert not any(num_ranks % n == 0 for n in range(asked, axis))
    assert shard_axis(num_ranks, 0) == 1


def test_ranks_that_are_no_whole_rows_are_refused_before_anything_starts(data: Path, tmp_path: Path) -> None:
    check_rows(6, 3)
    check_rows(5, 0)
    asked = config(data, 3, parallel=ParallelConfig(shard_stage=3, shard_ranks=2))
    check_world(asked, 4)
    check_world(asked, 3, restarted=True)  # as many as its launcher could start
    for refused, size, said in (
        (check_rows, 7, "7 ranks for shard groups of parallel.shard_ranks 2: use 6 or 8 ranks, another"),
        (check_rows, 1, "1 rank for shard groups of parallel.shard_ranks 2: use 2 ranks, another"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            refused(size, 2)
    with pytest.raises(ValueError, match="3 ranks for shard groups of"):
        check_world(asked, 3)
    with pytest.raises(ValueError, match="3 ranks for shard groups of"):
        validate(replace(asked, ranks=3))
    wide = replace(asked, run_dir=tmp_path / "run", parallel=ParallelConfig(shard_stage=3, shard_ranks=1000))
    with pytest.raises(ValueError, match="1000: use 1000 ranks, another"):
        run(wide)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (
            ParallelConfig(shard_ranks=2),
            "shard_ranks 2 with parallel.shard_stage 0, where nothing is divided: set",
        ),
        (ParallelConfig(shard_stage=1, shard_ranks=1), "expected 2 or more, or 0 for all ranks, got 1"),
        (ParallelConfig(shard_stage=1, shard_ranks=-2), "expected 2 or more, or 0 for all ranks, got -2"),
    ],
)
def test_rows_that_divide_nothing_are_refused(data: Path, parallel: ParallelConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(config(data, 0, parallel=parallel))
