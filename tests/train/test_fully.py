"""A run whose gradients and weights are divided, or whose ranks have one copy, does what one rank does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instep.elastic.faults import flip_bit
from instep.errors import Diverged, ReplicasDiffer
from instep.events import PARAMETER_GATHER
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig, num_parameters
from instep.ordered.shards import MODEL
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config, validate
from instep.run.ledger import SAMPLE_EVERY
from instep.run.memory_usage import run_memory, words
from instep.train.run_config import ChecksConfig, LedgerConfig, ParallelConfig
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.train.test_sharded import STEPS
from tests.train.test_sharded import config as stage_one
from tests.train.test_trainer import begun, trained
from tests.world import world

STAGES = [(2, False), (3, False)]
ONE_COPY = [(1, True), (2, True)]
KINDS = pytest.mark.parametrize(("stage", "one_copy"), STAGES)
SHARED = pytest.mark.parametrize(("stage", "one_copy"), [*STAGES, *ONE_COPY])


def config(data: Path, stage: int, one_copy: bool = False, **changes: object) -> Config:
    """As for stage 1; without dropout where it is not said."""
    changed = {"dropout": 0.0, "parallel": ParallelConfig(shard_stage=stage, one_copy=one_copy), **changes}
    return stage_one(data, stage, **changed)  # type: ignore[arg-type]


def assert_bits_of_one(mesh: Mesh, data: Path, stage: int, one_copy: bool) -> None:
    alone = Trainer(TextRecipe(config(data, 0, dropout=0.1)), world_of_one())
    together = Trainer(TextRecipe(config(data, stage, one_copy, dropout=0.1)), mesh)
    assert together.config.optim.clip > 0
    for trainer in (alone, together):
        begun(trainer)
    for _ in range(STEPS):
        made, plain = together.step(), alone.step()
        assert (made.loss, made.norm) == (plain.loss, plain.norm)
        assert together.sampled(SAMPLE_EVERY) == alone.sampled(SAMPLE_EVERY)
        assert together.state_digests() == alone.state_digests()
        assert together.evaluate() == alone.evaluate()
    assert together.contract == alone.contract
    assert together.canary == alone.canary
    together.compare_replicas()
    together.parallel.close()


@SHARED
@world(1, by="process", backend="shm")
def test_one_rank_has_the_bits_of_a_run_without_sharding(
    mesh: Mesh, data: Path, stage: int, one_copy: bool
) -> None:
    assert_bits_of_one(mesh, data, stage, one_copy)


@SHARED
@world(2, by="process", backend="shm")
def test_two_ranks_have_the_bits_of_one(mesh: Mesh, data: Path, stage: int, one_copy: bool) -> None:
    assert_bits_of_one(mesh, data, stage, one_copy)


@KINDS
@world(3, by="process")
def test_three_ranks_have_the_bits_of_one(mesh: Mesh, data: Path, stage: int, one_copy: bool) -> None:
    assert_bits_of_one(mesh, data, stage, one_copy)


@SHARED
@world(2, backend="shm")
def test_a_step_on_the_list_or_with_a_gradient_that_is_not_finite_is_skipped_by_all(
    mesh: Mesh, data: Path, stage: int, one_copy: bool
) -> None:
    """The weight is in a block: in stage 3 its values come and go, and the nan with them."""
    spoilt = "nan:rank=1,step=2,name=blocks.0.attention.qkv.weight"
    faulty = config(data, stage, one_copy, fault=(spoilt,), checks=ChecksConfig(skip_steps=(1,)))
    trainer = trained(faulty, mesh, 1)
    said = [trainer.step().skipped for _ in range(3)]
    assert said == ["step 1 is in checks.skip_steps", "gradient norm is nan", ""]
    alone = trained(config(data, 0, checks=ChecksConfig(skip_steps=(1, 2))), world_of_one(), 4)
    assert trainer.state_sha256() == alone.state_sha256()
    trainer.parallel.close()


@KINDS
@world(3)
def test_one_skipped_step_too_many_ends_the_run_and_names_rank_micro_batch_and_parameter(
    mesh: Mesh, data: Path, stage: int, one_copy: bool
) -> None:
    """Ranks take turns: of 8 micro-batches on 3 ranks the first of rank 1 is number 1, not number 3."""
    spoilt = "nan:rank=1,step=1,name=blocks.0.attention.qkv.weight"
    once = ChecksConfig(max_skipped=0)
    trainer = trained(config(data, stage, fault=(spoilt,), checks=once), mesh, 1)
    with pytest.raises(Diverged, match="in micro-batch 1, which rank 1 computed") as failure:
        trainer.step()
    assert failure.value.ranks == (1,)
    assert failure.value.parameter == "blocks.0.attention.qkv.weight"
    trainer.parallel.close()


@world(2)
def test_a_weight_that_is_not_finite_is_named_with_the_rank_that_has_it(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 3, checks=ChecksConfig(max_skipped=0)), mesh, 1)
    weights = [x for x in trainer.state.shards() if x.name.startswith(MODEL)]
    if mesh.rank == 1:
        weights[-1].tensor.fill_(torch.inf)
    mesh.world.group.barrier("the fault")
    with pytest.raises(Diverged, match="itself is not finite on rank 1"):
        trainer.step()
    trainer.parallel.close()


@SHARED
@world(2, backend="shm")
def test_ranks_compute_each_other_s_micro_batches_and_agree(
    mesh: Mesh, data: Path, stage: int, one_copy: bool
) -> None:
    trainer = trained(config(data, stage, one_copy, checks=ChecksConfig(leaves_every=1)), mesh)
    assert trainer.state_sha256() == trained(config(data, 0), world_of_one()).state_sha256()
    trainer.parallel.close()


@KINDS
@world(3)
def test_a_rank_that_computes_otherwise_is_named(mesh: Mesh, data: Path, stage: int, one_copy: bool) -> None:
    trainer = trained(config(data, stage, checks=ChecksConfig(leaves_every=2)), mesh, 1)
    compute = trainer.compute
    if mesh.rank == 2:
        trainer.compute = lambda leaf: _louder(compute(leaf))  # type: ignore[method-assign]
    with pytest.raises(ReplicasDiffer, match="rank 2 computed otherwise") as failure:
        trainer.step()
    assert failure.value.ranks == (2,)
    trainer.parallel.close()


def _louder(computed):  # type: ignore[no-untyped-def]
    flip_bit(next(iter(computed.gradients.values())))
    return computed


@SHARED
@world(2, backend="shm")
def test_who_leaves_may_join_others_and_begin_again(
    mesh: Mesh, data: Path, stage: int, one_copy: bool
) -> None:
    """Begun before it joins, and, twice, while it is sharded: from every stage to the same first step."""
    trainer = trained(config(data, stage, one_copy), mesh, 1)
    first = trainer.state_sha256()
    trainer.begin()
    assert trainer.step().loss
    assert trainer.state_sha256() == first
    trainer.leave()
    for p in trainer.module.parameters():
        p.data.zero_()  # it has memory of its own
    trainer.begin()
    trainer.join(world_of_one())
    begun(trainer)
    trainer.step()
    assert trainer.state_sha256() == first
    trainer.begin()
    trainer.step()
    assert trainer.state_sha256() == first


@world(2)
def test_in_stage_three_the_module_has_no_values_but_in_slices(mesh: Mesh, data: Path) -> None:
    trainer = Trainer(TextRecipe(config(data, 3)))
    trainer.prepare()
    assert all(p.is_meta for p in trainer.module.parameters())
    trainer.join(mesh)
    begun(trainer)
    trainer.step()
    sharding = trainer.parallel.model.sharding
    assert not any(p.is_meta or p.untyped_storage().nbytes() > 4 for p in trainer.module.parameters())
    assert all(unit.materialised and not unit.gathered_bytes for unit in sharding.stage3.units)
    divided = trainer.module
    trainer.leave()
    assert all(p.is_meta for p in trainer.module.parameters())
    assert not any(p.untyped_storage().nbytes() > 4 for p in divided.parameters())


@KINDS
def test_a_module_that_was_sharded_by_half_may_join_again(
    monkeypatch: pytest.MonkeyPatch, data: Path, stage: int, one_copy: bool
) -> None:
    """A rank may be lost when the weights are in slices already, and the reducer not there yet."""
    alone = trained(config(data, 0), world_of_one(), 1)
    trainer = Trainer(TextRecipe(config(data, stage)))
    monkeypatch.setattr("instep.shard.sharding.SliceReducer", _lose)
    with pytest.raises(RuntimeError, match="lost"):
        trainer.join(world_of_one())
    monkeypatch.undo()
    trainer.leave()
    trainer.begin()
    trainer.join(world_of_one())
    begun(trainer)
    trainer.step()
    assert trainer.state_sha256() == alone.state_sha256()


def _lose(*args: object, **options: object) -> None:
    raise RuntimeError("a rank is lost")


MEMORY = {
    (2, False): (4 + 12 / 2, {"parameters": 1.0, "gradients": 0.5, "optimizer": 1.0}),
    (3, False): (16 / 2, {"parameters": 0.5, "gradients": 0.5, "optimizer": 1.0}),
    (1, True): (2 + 4 + 8 / 2, {"parameters": 0.5, "gradients": 1.0, "optimizer": 1.0}),
    (2, True): (2 + 12 / 2, {"parameters": 0.5, "gradients": 0.5, "optimizer": 1.0}),
}
"""By stage and one copy, on two ranks: bytes per parameter, and shares of the bytes of all weights."""


@pytest.mark.parametrize("kind", MEMORY)
@world(2, backend="shm")
def test_memory_is_what_the_formula_of_the_stage_says(mesh: Mesh, data: Path, kind: tuple[int, bool]) -> None:
    each, shares = MEMORY[kind]
    wide = config(data, *kind, width=128)
    trainer = trained(wide, mesh, 1)
    memory = run_memory(trainer)
    trainer.parallel.close()
    model = GPTConfig(**{name: getattr(wide.model, name) for name in ("layers", "width", "heads", "context")})
    whole = 4 * num_parameters(model)
    assert memory["formula"]["bytes_per_parameter"] == each
    for row in memory["ranks"]:
        for purpose, share in shares.items():
            assert row[purpose] == pytest.approx(share * whole, rel=0.05), purpose
            assert memory["formula"][purpose] == pytest.approx(share * whole, rel=0.001), purpose
    assert f"{each:g} bytes per parameter, as the formula says" in words(memory)
    plain = run_memory(trained(config(data, 0, width=128), world_of_one(), 1))
    assert {row["activations"] for row in memory["ranks"]} == {plain["ranks"][0]["activations"]}


@world(2)
def test_gathers_of_weights_are_in_the_breakdown_and_in_no_bucket(mesh: Mesh, data: Path) -> None:
    trainer = trained(config(data, 3), mesh)
    trainer.timing.end()
    found = trainer.timing.breakdown()
    assert found.gathers_s > 0
    assert 0 <= found.gathers_hidden_s <= found.gathers_s
    assert PARAMETER_GATHER not in found.hosts
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found
    trainer.parallel.close()


WRONG: Sequence[tuple[dict[str, object], str]] = [
    ({"stage": 2, "parallel": ParallelConfig(shard_stage=2, strategy="flat")}, "with parallel.strategy flat"),
    ({"stage": 3, "parallel": ParallelConfig(shard_stage=3, ordered=False)}, "with parallel.ordered false"),
    ({"stage": 2, "ledger": LedgerConfig(leaves=True)}, "shard_stage 2 with ledger.leaves"),
    ({"stage": 0, "one_copy": True}, "one_copy with parallel.shard_stage 0"),
    ({"stage": 3, "one_copy": True}, "one_copy with parallel.shard_stage 3"),
    (
        {"stage": 2, "parallel": ParallelConfig(shard_stage=2, one_copy=True, backend="gloo")},
        "one_copy with parallel.backend gloo",
    ),
]


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_a_stage_does_not_go_with_is_refused(data: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*[;:,] (set|leave)"):
        validate(config(data, **settings))  # type: ignore[arg-type]
    validate(config(data, 3))
    validate(config(data, 2, one_copy=True))
    validate(replace(config(data, 1), ledger=LedgerConfig(leaves=True)))


@world(2)
def test_one_copy_among_ranks_that_share_no_memory_is_an_error_that_says_so(mesh: Mesh, data: Path) -> None:
    """Where the backend is chosen by the hosts it is known when the ranks have met."""
    with pytest.raises(ValueError, match="share memory, and this group's backend is 'gloo'"):
        Trainer(TextRecipe(config(data, 2, one_copy=True)), mesh)
