"""Steps that are skipped, states that are handed on, ranks that meet again: always the same bits."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from instep.elastic.faults import flip_bit
from instep.errors import CheckpointRejected, Diverged, PeerLost, ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.recipes import text_config
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config
from instep.run.recovery import Checkpoints, restore_newest, take
from instep.train.run_config import ChecksConfig, ParallelConfig
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.train.snapshots import Supervisor, snapshots_of
from tests.world import world

STEPS = 3


def config(data: Path, strategy: str = "bucketed", **changes: object) -> Config:
    """The tiny recipe without dropout, which ranks that are threads cannot draw."""
    tiny = text_config.tiny()
    ranks = 2 if strategy == "threads" else 0
    tiny = replace(tiny, model=replace(tiny.model, dropout=0.0), data=data, steps=STEPS, ranks=ranks)
    return replace(tiny, parallel=ParallelConfig(strategy=strategy), **changes)  # type: ignore[arg-type]


NOWHERE = Path("there is no such run")


def agree(trainer: Trainer, path: Path = NOWHERE) -> str:
    """All ranks take the newest state that there is: where it came from. Collective."""
    return restore_newest(trainer, None, Checkpoints(path, 20))[0]


def begun(trainer: Trainer) -> None:
    """All ranks take the state of before the first step, as where no rank finds another. Collective."""
    trainer.begin()
    agree(trainer)


def trained(config: Config, mesh: Mesh, steps: int = STEPS) -> Trainer:
    """A trainer after some steps of the run."""
    trainer = Trainer(TextRecipe(config), mesh)
    begun(trainer)
    for _ in range(steps):
        trainer.step()
    return trainer


def test_a_process_that_cannot_read_the_data_knows_it_before_it_meets_others(
    data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "text"
    copy.write_bytes(data.read_bytes())
    trainer = Trainer(TextRecipe(config(copy)))
    trainer.prepare()
    copy.unlink()
    trainer.prepare()  # it has read them
    late = Trainer(TextRecipe(config(copy)))
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        late.prepare()


@pytest.mark.parametrize("strategy", ["bucketed", "server"])
@world(3)
def test_a_step_on_the_list_is_skipped_by_all_and_the_bits_are_those_of_one(
    mesh: Mesh, data: Path, strategy: str
) -> None:
    listed = ChecksConfig(skip_steps=(1,))
    alone = trained(config(data, checks=listed), world_of_one(), 1)
    before, made = alone.state_sha256(), alone.step()
    assert made.skipped == "step 1 is in checks.skip_steps"
    alone.rank_state.steps_done = 1
    assert alone.state_sha256() == before  # but for the number of steps
    alone.rank_state.steps_done = 2
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
    alone = trained(config(data, checks=ChecksConfig(skip_steps=(1,))), world_of_one())
    if mesh.rank == 0:
        assert trainer.state_sha256() == alone.state_sha256()


def test_replica_threads_skip_like_ranks(data):
    trainer = trained(config(data, "threads", checks=ChecksConfig(skip_steps=(1,))), world_of_one())
    alone = trained(config(data, checks=ChecksConfig(skip_steps=(1,))), world_of_one())
    assert trainer.state_sha256() == alone.state_sha256()
    trainer.leave()


@world(2)
def test_one_skipped_step_too_many_ends_the_run_and_names_rank_and_parameter(mesh: Mesh, data: Path) -> None:
    spoilt = "nan:rank=1,step=1,name=blocks.1.attention.qkv.weight"
    trainer = trained(config(data, fault=(spoilt,), checks=ChecksConfig(max_skipped=0)), mesh, 1)
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
    watched = config(data, checks=ChecksConfig(leaves_every=1))
    trainer, alone = trained(watched, mesh), trained(config(data), world_of_one())
    assert trainer.state_sha256() == alone.state_sha256()


def test_a_state_goes_through_a_snapshot_into_a_process_that_is_new(data):
    old, supervisor = trained(config(data, checks=ChecksConfig(spike=3.0)), world_of_one()), Supervisor()
    snapshots_of(supervisor).write(old)
    new = Trainer(TextRecipe(config(data, checks=ChecksConfig(spike=3.0))), world_of_one())
    snapshots = snapshots_of(supervisor)
    assert snapshots.newest() == (STEPS, supervisor.generation)
    snapshots.restore(new, *snapshots.newest())
    assert new.state_sha256() == old.state_sha256()
    assert new.last == old.last
    assert new.health.state() == old.health.state()
    assert new.step().norm == old.step().norm


def given(trainer: Trainer, reference: Trainer) -> None:
    """``trainer`` has the state of ``reference``, as one that it has brought along."""
    supervisor = Supervisor()
    snapshots_of(supervisor).write(reference)
    snapshots = snapshots_of(supervisor)
    bodies, readers = snapshots.opened(*snapshots.newest())
    take(trainer, bodies, readers)


def test_a_snapshot_of_another_model_is_rejected_and_nothing_changes(data):
    trainer = trained(config(data), world_of_one())
    other = Trainer(
        TextRecipe(replace(config(data), model=replace(config(data).model, width=64, heads=4))),
        world_of_one(),
    )
    before = other.state_sha256()
    with pytest.raises(CheckpointRejected):
        given(other, trainer)
    assert other.state_sha256() == before


@pytest.mark.parametrize("strategy", ["bucketed", "server"])
@world(3)
def test_the_newest_state_wins_wherever_it_is(mesh: Mesh, data: Path, strategy: str) -> None:
    reference = trained(config(data), world_of_one())
    trainer = Trainer(TextRecipe(config(data, strategy)), mesh)
    owner = 0 if strategy == "server" else 1
    if mesh.rank == owner:
        given(trainer, reference)
        trainer.rank_state.agreed(complete=True)
    elif mesh.rank == 2:
        trainer.rank_state.restoring()  # a survivor whose state is whole nowhere
        with torch.no_grad():
            next(trainer.module.parameters()).add_(1)
    assert agree(trainer) == "a survivor"
    assert trainer.steps_done == STEPS
    trainer.compare_replicas()
    assert trainer.step().norm == reference.step().norm


@world(2)
def test_where_no_rank_has_a_state_rank_zero_reads_one_for_all(
    mesh: Mesh, data: Path, tmp_path: Path
) -> None:
    """Hosts may have disks of their own."""
    reference = trained(config(data), world_of_one())
    trainer = Trainer(TextRecipe(config(data)), mesh)
    if mesh.rank == 0:
        checkpoints = Checkpoints(tmp_path / "rank 0", 20)
        checkpoints.save(reference)
        checkpoints.close()
    assert agree(trainer, tmp_path / f"rank {mesh.rank}").endswith(f"step-{STEPS:08d}")
    assert trainer.state_sha256() == reference.state_sha256()


@world(2)
def test_the_same_process_takes_part_in_one_group_after_another(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data), mesh, 1)
    trainer.parallel.close()
    trainer.join(mesh)
    agree(trainer)
    trainer.step()
    alone = trained(config(data), world_of_one(), 2)
    assert trainer.state_sha256() == alone.state_sha256()


class NormedGPT(GPT):
    """Its logits are normalised over the batch."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.context, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(super().forward(tokens))


class Normed(TextRecipe):
    """The tiny recipe with batch norm."""

    def make_model(self) -> GPT:
        return NormedGPT(GPTConfig(**asdict(self.config.model)))


@world(2)
def test_a_step_with_batch_norm_that_fails_before_its_update_is_repeated_with_the_same_bits(
    mesh: Mesh, data: Path
) -> None:
    alone, trainer = Trainer(Normed(config(data)), world_of_one()), Trainer(Normed(config(data)), mesh)
    begun(alone)
    begun(trainer)
    for _ in range(2):
        alone.step()
        trainer._check_leaves = _lose_a_rank  # type: ignore[method-assign]
        with pytest.raises(PeerLost):
            trainer.step()
        del trainer._check_leaves
        trainer.parallel.skip()
        trainer.step()
    assert alone.state_sha256() == trainer.state_sha256()
    assert alone.module.norm.num_batches_tracked == 2 * trainer.config.num_leaves
    begun(trainer)
    assert trainer.module.norm.num_batches_tracked == 0
    trainer.leave()
    alone.leave()


def _lose_a_rank() -> None:
    raise PeerLost("rank 1 is gone")
