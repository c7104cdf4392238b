"""``verify`` of sharded modules: right gradients pass, planted faults are named, and nothing changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from instep.errors import InstepError
from instep.mesh.mesh import Mesh
from instep.shard.fully import FullySharded, full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.shard_groups import shard_group_of
from instep.verify.gradient_report import UNUSED
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import WIDTH as NARROW
from tests.replicate.nets import Twice, gpt
from tests.replicate.trials import by_name, next_token, square, square_of_both, tokens_of
from tests.shard.trained import FUSED, WIDTH, TiedWide, Wide, WideImages, assert_same
from tests.shard.verified import (
    after_the_exchange,
    assert_untouched,
    failing,
    low,
    on_the_reduced_path,
    piece_of,
    rows_of,
    verified,
)
from tests.world import world

STAGES = pytest.mark.parametrize("stage", [2, 3])
WAYS: dict[str, dict[str, Any]] = {
    "2": {"stage": 2},
    "2, one copy": {"stage": 2, "one_copy": True},
    "2, bfloat16": {"stage": 2, "compute_dtype": torch.bfloat16},
    "3": {"stage": 3},
    "3, bfloat16": {"stage": 3, "compute_dtype": torch.bfloat16},
    "3, no resharding": {"stage": 3, "reshard_after_forward": False},
}


def loss_for(options: dict[str, Any]) -> Any:
    return low if "compute_dtype" in options else square


def bad(report: Any) -> list[tuple[str, int]]:
    return [(row.name, row.rank) for row in report.rows if not row.ok]


# Right models


@pytest.mark.parametrize("way", WAYS)
@world(2, backend="shm")
def test_ranks_that_share_memory_pass(mesh: Mesh, way: str) -> None:
    options = WAYS[way]
    report = verified(mesh, filled(Wide()), rows_of(mesh.rank), loss_for(options), **options)
    report.raise_for_error()
    assert [len(report.rows), report.world_size] == [6, 2] and all(row.error < 1e-6 for row in report.rows)
    assert str(report).startswith(f"all 6 gradients on 2 rank(s) (fully_shard, stage {way[0]}, ordered)")


@pytest.mark.parametrize("way", [way for way in WAYS if "copy" not in way])
@world(3)
def test_ranks_that_send_pass(mesh: Mesh, way: str) -> None:
    options = WAYS[way]
    assert verified(mesh, filled(Wide()), rows_of(mesh.rank), loss_for(options), **options).ok


@pytest.mark.parametrize(("backend", "stage"), [("gloo", 3), ("shm", 2)])
def test_shard_groups_pass(backend: str, stage: int) -> None:
    @world(4, backend=backend, dp=2, shard=2)
    def body(mesh: Mesh) -> None:
        for one_copy in {False, stage == 2}:
            report = verified(mesh, filled(Wide()), rows_of(mesh.rank), stage=stage, one_copy=one_copy)
            report.raise_for_error()
            assert report.world_size == 4 and all(row.error < 1e-6 for row in report.rows)

    body()


@STAGES
@world(2, by="process")
def test_a_transformer_with_dropout_passes(mesh: Mesh, stage: int) -> None:
    batch = tokens_of(mesh.rank, 2, 8, vocabulary=17)
    report = verified(mesh, filled(gpt(dropout=0.2)), batch, next_token, stage=stage)
    report.raise_for_error()


@STAGES
@world(2)
def test_tied_frozen_and_unused_parameters_pass_without_a_warning(mesh: Mesh, stage: int) -> None:
    report = verified(
        mesh, filled(TiedWide()), tokens_of(mesh.rank, 6, vocabulary=130), next_token, stage=stage
    )
    assert report.ok and set(by_name(report)) == {"tokens.weight", "middle.weight", "middle.bias"}
    x = numbers(4, NARROW, key=f"rank {mesh.rank}")
    report = verified(mesh, filled(Twice()), [x, mesh.rank == 1], square_of_both, stage=stage)
    assert report.ok
    notes = {name: row.note for name, row in by_name(report).items() if row.note}
    assert notes == {"never.weight": UNUSED, "never.bias": UNUSED}


@STAGES
@world(2)
def test_other_layouts_and_batches_of_other_sizes_pass(mesh: Mesh, stage: int) -> None:
    images = numbers(2 + mesh.rank, 3, 7, 7, key=f"images of {mesh.rank}")
    assert verified(mesh, filled(WideImages()), images, stage=stage).ok


@STAGES
def test_a_world_of_one_passes(stage: int) -> None:
    report = verified(world_of_one(), filled(Wide()), rows_of(0), stage=stage)
    assert report.ok and report.world_size == 1


# Planted faults


@STAGES
@world(2)
def test_a_hook_that_scales_one_gradient_is_named(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage)
    model.layers[0].weight.register_hook(on_the_reduced_path(model, 3.0))
    report = model.verify(rows_of(mesh.rank), square)
    assert [name for name, _ in bad(report)] == ["layers.0.weight"]
    assert (report.rows[0].error, report.rows[0].ratio) == (pytest.approx(2.0), pytest.approx(3.0))
    with pytest.raises(InstepError, match=r"1 of 6 gradients .* 'layers\.0\.weight' .* 3\.000.* hook"):
        report.raise_for_error()
    model.close()


@STAGES
@world(2)
def test_a_slice_that_is_wrong_on_one_rank_is_named_with_the_rank(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage)
    weight = model.layers[3].weight

    def spoil() -> None:
        piece = piece_of(model, weight)
        assert piece is not None
        piece.mul_(1 + mesh.rank)

    after_the_exchange(model, spoil)
    report = model.verify(rows_of(mesh.rank), square)
    assert bad(report) == [("layers.3.weight", 1)]
    assert 0 < report.rows[0].error < 1  # a part of it is right
    model.close()


@world(4, dp=2, shard=2)
def test_in_shard_groups_the_replica_that_is_wrong_is_named(mesh: Mesh) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, 3)
    weight = model.layers[0].weight

    def spoil() -> None:
        piece = piece_of(model, weight)
        if mesh.rank == 2 and piece is not None:
            piece.neg_()

    after_the_exchange(model, spoil)
    report = model.verify(rows_of(mesh.rank), square)
    assert bad(report) == [("layers.0.weight", 2)] and report.differing == ()
    assert report.rows[0].ratio is not None and abs(report.rows[0].ratio) == pytest.approx(
        1
    )  # of that replica
    model.close()


@pytest.mark.parametrize("stage", [2, 3])
@world(4, dp=2, shard=2)
def test_weights_that_differ_between_replicas_are_named(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage)
    if mesh.rank == 3:
        held = [x for space in model.sharding.spaces for x in space.held]
        with torch.no_grad():
            next(x for x in held if x.parameter is model.layers[3].weight).tensor.add_(1)
    report = model.verify(rows_of(mesh.rank), square)
    than = 0 if stage == 2 else 1  # stage 3 compares the ranks that have the same slice
    assert report.differing == (f"'layers.3.weight' has other values on rank 3 than on rank {than}",)
    with pytest.raises(InstepError, match="the ranks hold different models"):
        report.raise_for_error()
    model.close()


@STAGES
@world(2, by="process")
def test_random_numbers_from_elsewhere_are_suspected(mesh: Mesh, stage: int) -> None:
    other = torch.Generator().manual_seed(mesh.rank)

    def noisy(model: nn.Module, batch: Tensor) -> Tensor:
        return square(model, batch * torch.rand(batch.shape, generator=other))

    report = verified(mesh, filled(Wide()), rows_of(mesh.rank), noisy, stage=stage)
    assert not report.ok and "random numbers from outside" in report.cause


# Nothing changes


class Noisy(Wide):
    """With random numbers, and statistics that forward changes."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return super().forward(x)


def train(mesh: Mesh, verify: bool, options: dict[str, Any]) -> list[Any]:
    """A few plain and declared steps, before, between and after trials."""
    torch.manual_seed(5)
    loss = loss_for(options)
    model: Any = fully_shard(filled(Noisy()), mesh, **options)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, shard_group_of(mesh), **FUSED)

    def trial() -> None:
        if verify:
            batch = rows_of(mesh.rank + 7)
            assert_untouched(model, optimizer, lambda: model.verify(batch, loss).raise_for_error())

    trial()
    for step in range(2):
        loss(model, rows_of(mesh.rank, f"{step} first")).backward()
        trial()
        with model.no_sync():
            loss(model, rows_of(mesh.rank, f"{step} kept")).backward()
        trial()
        loss(model, rows_of(mesh.rank, f"{step} last")).backward()
        trial()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for micro_batch in model.micro_batches(3):
        loss(model, rows_of(micro_batch.index, "declared")).backward()
    trial()
    optimizer.step()
    result = [full_state_dict(model), optimizer.state_dict()]
    model.close()
    return result


@pytest.mark.parametrize("way", WAYS)
@world(2, by="process", backend="shm")
def test_everything_is_as_before_and_training_goes_on_the_same(mesh: Mesh, way: str) -> None:
    assert_same(train(mesh, True, WAYS[way]), train(mesh, False, WAYS[way]), "state")


@world(4, by="process", dp=2, shard=2)
def test_in_shard_groups_everything_is_as_before_too(mesh: Mesh) -> None:
    assert_same(train(mesh, True, WAYS["3"]), train(mesh, False, WAYS["3"]), "state")


@pytest.mark.parametrize("way", ["2", "3", "3, no resharding"])
@world(2)
def test_a_graph_from_before_can_still_be_walked_backwards(mesh: Mesh, way: str) -> None:
    found = []
    for trials in (0, 2):
        model: Any = fully_shard(filled(Wide()), mesh, **WAYS[way])
        loss = square(model, rows_of(mesh.rank, "before"))
        if trials:
            assert_untouched(model, None, lambda: model.verify(rows_of(mesh.rank), square).raise_for_error())  # noqa: B023
            with pytest.raises(ValueError, match="planted in backward"):
                model.verify(rows_of(mesh.rank), failing(mesh.rank, "backward"))
        loss.backward()
        pieces = [piece_of(model, p) for p in model.parameters()]
        found.append([None if x is None else x.clone() for x in pieces])
        model.close()
    for x, y in zip(*found, strict=True):
        assert x is y is None or torch.equal(x, y)


# What goes wrong on one rank


@pytest.mark.parametrize("where", ["forward", "backward", "the reference"])
@STAGES
@world(2, by="process")
def test_an_error_on_one_rank_is_raised_on_all(mesh: Mesh, stage: int, where: str) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, lr=0.1)
    square(model, rows_of(mesh.rank, "before")).backward()
    failed = 0 if where == "the reference" else 1
    told = rf"^rank {failed}: planted[^\n]*\nrank {failed} raised ValueError in the outcome of "
    match = "^planted" if mesh.rank == failed else told

    def trial() -> None:
        with pytest.raises(ValueError, match=match):
            model.verify(rows_of(mesh.rank), failing(mesh.rank, where))

    assert_untouched(model, optimizer, trial)
    assert model.verify(rows_of(mesh.rank), square).ok
    optimizer.step()
    model.close()


@STAGES
@world(2)
def test_a_hook_that_fails_in_the_middle_of_backward_is_named_on_all(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage, units=[])
    assert model.verify(rows_of(mesh.rank), square).ok

    def fail(gradient: Tensor) -> None:
        if mesh.rank == 1:
            raise ValueError("planted in a hook")

    handle = model.layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="planted in a hook"):
        model.verify(rows_of(mesh.rank), square)
    handle.remove()
    assert model.verify(rows_of(mesh.rank), square).ok
    model.close()


@STAGES
@world(2)
def test_after_a_backward_that_raised_there_is_no_gradient_as_ever(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage)
    handle = model.layers[0].weight.register_hook(partial(_refuse, mesh))
    with pytest.raises(ValueError, match="planted"):
        square(model, rows_of(mesh.rank)).backward()
    handle.remove()
    assert model.verify(rows_of(mesh.rank), square).ok
    assert all(p.grad is None for p in model.parameters())
    model.close()


def _refuse(mesh: Mesh, gradient: Tensor) -> None:
    raise ValueError(f"planted on rank {mesh.rank}")


@STAGES
def test_inside_a_declared_step_it_is_refused(stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), world_of_one(), stage)
    leaves = model.micro_batches(2)
    next(leaves)
    with pytest.raises(ValueError, match="between two steps"):
        model.verify(rows_of(0), square)
    leaves.close()
    model.close()


# A module's own attribute of that name


class OwnMethod(Wide):
    def verify(self, x: int) -> int:
        return x + 1


class OwnModule(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.verify = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.verify(super().forward(x))


@STAGES
def test_a_module_keeps_a_verify_of_its_own(stage: int) -> None:
    for kind in (OwnMethod, OwnModule):
        module = filled(kind())
        before = module.verify
        model: Any = fully_shard(module, world_of_one(), stage)
        assert isinstance(model, FullySharded) and model.verify == before
        assert model.sharding.verify(rows_of(0), square).ok
        model.close()
        assert type(module) is kind
