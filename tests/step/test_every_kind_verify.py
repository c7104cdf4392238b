"""``verify`` of every kind: right gradients pass, planted faults are named, training goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.errors import InstepError
from instep.mesh.mesh import Mesh
from tests.kinds import (
    KINDS,
    STAGES,
    WIDTH,
    WRAPPERS,
    Program,
    assert_same_state,
    close,
    net,
    on_every_kind,
    rows,
    square,
    state_of,
)
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import Tied, Twice, gpt
from tests.shard.trained import low


def verified(model: Any, mesh: Mesh, loss: Any = square, key: str = "verify") -> Any:
    """The report of ``model`` on a batch that depends on the rank, or of a pipeline on its micro-batches."""
    if isinstance(model, instep.Pipeline):
        square_of = lambda output, micro_batch: output.square().mean()  # noqa: E731
        return model.verify(square_of, lambda micro_batch: rows(f"{key} {micro_batch.index}"))
    return model.verify(rows(f"{key} on rank {mesh.rank}"), loss)


def once(kind: str, module: nn.Module, mesh: Mesh, batch: Any, loss: Any, **options: Any) -> Any:
    model, optimizer = KINDS[kind].make(filled(module), mesh, wrap=options)
    report = model.verify(batch, loss)
    close(optimizer, model)
    return report


@on_every_kind(2)
def test_right_gradients_pass(mesh: Mesh, kind: str) -> None:
    names = [name for name, _ in net().named_parameters()]
    model, optimizer = KINDS[kind].make(filled(net()), mesh)
    report = verified(model, mesh)
    report.raise_for_error()
    assert sorted(row.name for row in report.rows) == sorted(names) and report.world_size == 2
    assert all(row.error < 1e-6 for row in report.rows)
    assert str(report).startswith(f"all {len(names)} gradients on 2 ranks ({report.strategy}, ordered)")
    close(optimizer, model)


@on_every_kind(4, STAGES, dp=2, shard=2)
def test_shard_groups_pass(mesh: Mesh, kind: str) -> None:
    report = once(kind, net(), mesh, rows(f"on rank {mesh.rank}"), square)
    assert report.ok and report.world_size == 4


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, -2), batch["targets"].flatten())


def tokens(rank: int, *shape: int, vocabulary: int) -> dict[str, Tensor]:
    found = (numbers(*shape, key=f"tokens of {rank}").abs() * 1000).long() % vocabulary
    return {"tokens": found, "targets": found.flip(-1)}


@on_every_kind(2, WRAPPERS, by="process")
def test_a_transformer_with_dropout_passes(mesh: Mesh, kind: str) -> None:
    batch = tokens(mesh.rank, 2, 8, vocabulary=17)
    once(kind, gpt(dropout=0.2), mesh, batch, next_token).raise_for_error()


@on_every_kind(2, WRAPPERS)
def test_tied_frozen_and_unused_parameters_pass(mesh: Mesh, kind: str) -> None:
    report = once(kind, Tied(), mesh, tokens(mesh.rank, 4, vocabulary=11), next_token)
    assert report.ok and {row.name for row in report.rows} == {
        "tokens.weight",
        "middle.weight",
        "middle.bias",
    }
    batch = [numbers(4, 6, key=f"on rank {mesh.rank}"), mesh.rank == 1]
    report = once(kind, Twice(), mesh, batch, lambda model, batch: model(*batch).square().mean())
    assert report.ok
    assert {row.name for row in report.rows if row.note} == {"never.weight", "never.bias"}


@on_every_kind(3, WRAPPERS)
def test_batches_of_different_sizes_pass_and_count_as_one_per_rank(mesh: Mesh, kind: str) -> None:
    batch = numbers(mesh.rank + 1, WIDTH, key=f"on rank {mesh.rank}")
    assert once(kind, net(), mesh, batch, square).ok


@on_every_kind(2, STAGES)
def test_forwards_in_bfloat16_pass(mesh: Mesh, kind: str) -> None:
    assert once(kind, net(), mesh, rows(f"on {mesh.rank}"), low, compute_dtype=torch.bfloat16).ok


class Spoiled(torch.autograd.Function):
    """The identity, with a gradient times ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | None) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.factor is None:
            raise ValueError("planted in backward")
        return gradient * ctx.factor, None


class Faulty(nn.Linear):
    """Its weight's gradient is wrong by ``factor`` in the next forward, that of the distributed step."""

    factor: float | None = 1.0

    def forward(self, x: Tensor) -> Tensor:
        factor, self.factor = self.factor, 1.0
        return F.linear(x, Spoiled.apply(self.weight, factor), self.bias)


FAULTS = {
    "world size": (2.0, "2.000 = world size", "scale neither it nor .grad"),
    "averaged twice": (0.5, "0.500 = 1 / world size", "scale neither it nor .grad"),
    "a hook": (3.0, "3.000", "look for a hook on the parameter"),
    "turned round": (-1.0, "-1.000", "look for a hook on the parameter"),
    "lost": (0.0, "0.000: missing", "a gradient is lost before the exchange"),
}


@on_every_kind(2, WRAPPERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_is_named_with_its_ratio_and_cause(mesh: Mesh, kind: str, fault: str) -> None:
    factor, text, cause = FAULTS[fault]
    model, _ = KINDS[kind].make(filled(nn.Sequential(net(), Faulty(WIDTH, WIDTH))), mesh)
    model.get_submodule("1").factor = factor
    report = verified(model, mesh)
    bad = [row for row in report.rows if not row.ok]
    assert [(row.name, row.ratio_text()) for row in bad] == [("1.weight", text)] and cause in report.cause
    assert bad[0] == report.rows[0] and "! 1.weight" in str(report)
    with pytest.raises(InstepError, match=r"^1 of 8 gradients on 2 ranks .*'1\.weight' on rank \d"):
        report.raise_for_error()
    close(model)


@on_every_kind(2, WRAPPERS)
def test_a_loss_that_differs_between_ranks_is_found(mesh: Mesh, kind: str) -> None:
    report = verified(*wrapped(kind, mesh), lambda model, x: square(model, x + mesh.rank))
    assert not report.ok and "not the same function twice" in report.cause


def wrapped(kind: str, mesh: Mesh) -> tuple[Any, Mesh]:
    return KINDS[kind].make(filled(net()), mesh)[0], mesh


class Noisy(nn.Module):
    """With random numbers, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(dropout=0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return self.net(x)


def trained(mesh: Mesh, kind: str, trial: Callable[[Any], object]) -> tuple[Any, ...]:
    """The state after plain and declared steps, with ``trial(model)`` between any two lines."""
    torch.manual_seed(5)
    model, optimizer = KINDS[kind].make(filled(Noisy()), mesh, wrap={"seed": 3})
    trial(model)
    for number in range(2):
        square(model, rows(f"{number} first on {mesh.rank}")).backward()
        trial(model)
        with model.no_sync():
            square(model, rows(f"{number} kept on {mesh.rank}")).backward()
        trial(model)
        square(model, rows(f"{number} last on {mesh.rank}")).backward()
        trial(model)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    trial(model)
    Program(kind).backward(model, 2)
    trial(model)
    optimizer.step()
    found = state_of(model, optimizer), torch.get_rng_state(), model.step_mode
    assert not any(module.training for module in model.modules())
    close(optimizer, model)
    return found


@on_every_kind(2, WRAPPERS, by="process")
def test_training_goes_on_as_if_there_had_been_no_trial(mesh: Mesh, kind: str) -> None:
    without = trained(mesh, kind, lambda model: None)
    verifying = trained(mesh, kind, lambda model: verified(model, mesh).raise_for_error())
    assert_same_state(verifying[0], without[0])
    assert torch.equal(verifying[1], without[1]) and verifying[2] == without[2] == "declared"


@on_every_kind(2, WRAPPERS)
def test_a_graph_from_before_can_still_be_walked_backwards(mesh: Mesh, kind: str) -> None:
    norms = []
    for trial in (False, True):
        model, _ = wrapped(kind, mesh)
        loss = square(model, rows(f"before on {mesh.rank}"))
        if trial:
            verified(model, mesh).raise_for_error()
        loss.backward()
        norms.append(instep.clip_grad_norm_(model.parameters(), 1e9))
        close(model)
    assert torch.equal(*norms)


def failing(rank: int, where: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss that fails once: in forward or backward on rank 1, or in the reference on rank 0."""
    calls: list[None] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(None)
        if (rank, where, len(calls)) in ((1, "forward", 1), (0, "the reference", 3)):
            raise ValueError(f"planted in {where}")
        value = square(model, batch)
        return Spoiled.apply(value, None) if rank == 1 and where == "backward" else value

    return loss


@on_every_kind(2, WRAPPERS)
@pytest.mark.parametrize("where", ["forward", "backward", "the reference"])
def test_an_error_on_one_rank_is_raised_on_all_and_changes_nothing(mesh: Mesh, kind: str, where: str) -> None:
    model, optimizer = KINDS[kind].make(filled(net()), mesh)
    square(model, rows(f"before on {mesh.rank}")).backward()
    norm = instep.clip_grad_norm_(model.parameters(), 1e9)
    failed = 0 if where == "the reference" else 1
    match = "^planted" if mesh.rank == failed else rf"^rank {failed}: planted"
    with pytest.raises(ValueError, match=match):
        verified(model, mesh, failing(mesh.rank, where))
    assert torch.equal(instep.clip_grad_norm_(model.parameters(), 1e9), norm)
    assert verified(model, mesh).ok
    optimizer.step()
    close(optimizer, model)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_inside_a_declared_step_it_is_refused(kind: str) -> None:
    model, mesh = wrapped(kind, world_of_one())
    leaves = model.micro_batches(2)
    next(leaves)
    with pytest.raises(ValueError, match="between two steps"):
        verified(model, mesh)
    leaves.close()
    close(model)
