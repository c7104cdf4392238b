"""``DataParallel.verify`` on models, losses and groups of all sorts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.verify.gradient_report import Report
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import WIDTH, Dense, Segments, conv_net
from tests.world import world


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def rows_of(rank: int) -> Tensor:
    return numbers(4, WIDTH, key=f"verify on rank {rank}")


def verified(mesh: Mesh, module: nn.Module, batch: Any, loss: Any = square, **options: Any) -> Report:
    model = DataParallel(module, process_group=mesh, **options)
    try:
        return model.verify(batch, loss)
    finally:
        model.close()


@world(2, by="process", backend="shm")
def test_batch_norm_dropout_and_reentrant_checkpoints_pass(mesh: Mesh) -> None:
    images = numbers(4, 3, 8, 8, key=f"images of {mesh.rank}")
    assert verified(mesh, filled(conv_net()), images).ok
    x = rows_of(mesh.rank).requires_grad_()
    assert verified(mesh, filled(Segments(reentrant=True, dropout=0.3)), x).ok


@world(2)
def test_every_strategy_passes_ordered_or_not(mesh: Mesh) -> None:
    for strategy in STRATEGIES:
        for ordered in (True, False):
            report = verified(mesh, filled(Dense()), rows_of(mesh.rank), strategy=strategy, ordered=ordered)
            assert report.ok and (report.strategy, report.ordered) == (strategy, ordered)


@world(3, by="process")
def test_a_bare_process_group_of_some_ranks_names_them_globally(mesh: Mesh) -> None:
    group = dist.new_group([0, 2])
    if mesh.rank != 1:
        module = filled(Dense())
        with torch.no_grad():
            module.layers[3].bias.add_(mesh.rank)
        report = verified(group, module, rows_of(mesh.rank), init_sync=False)
        assert report.differing == ("'layers.3.bias' has other values on rank 2 than on rank 0",)
    dist.destroy_process_group(group)


@world(2, by="process")
def test_random_numbers_from_elsewhere_are_suspected(mesh: Mesh) -> None:
    other = torch.Generator().manual_seed(mesh.rank)

    def noisy(model: nn.Module, batch: Tensor) -> Tensor:
        return square(model, batch * torch.rand(batch.shape, generator=other))

    report = verified(mesh, filled(Dense()), rows_of(mesh.rank), noisy)
    assert not report.ok and "random numbers from outside" in report.cause


@world(2)
def test_a_loss_that_is_not_finite_is_no_fault_of_the_ranks(mesh: Mesh) -> None:
    report = verified(mesh, filled(Dense()), rows_of(mesh.rank) * torch.inf)
    assert not report.ok and "not finite" in report.cause


@world(2)
def test_a_gradient_that_was_never_exchanged_is_still_refused_afterwards(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        square(model, rows_of(mesh.rank)).backward()
    assert model.verify(rows_of(mesh.rank), square).ok
    with pytest.raises(RuntimeError, match="never exchanged"):
        optimizer.step()
    model.close()


class Losing(nn.Module):
    """Computes its own loss, and returns it in one of the usual forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = Dense(), form

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.inner(x)
        loss = out.square().mean() if y is None else F.mse_loss(out, y)
        forms = {"scalar": loss, "dict": {"loss": loss}, "object": SimpleNamespace(loss=loss)}
        return forms.get(self.form, out)


@pytest.mark.parametrize("form", ["scalar", "dict", "object"])
def test_a_model_may_compute_its_own_loss(form: str) -> None:
    x, y = rows_of(0), numbers(4, 3, key="targets")
    for batch in (x, [x, y], {"x": x, "y": y}):
        assert verified(world_of_one(), filled(Losing(form)), batch, None).ok


REFUSED: dict[str, tuple[nn.Module, Any, float | None, str]] = {
    "no loss": (Losing("output"), None, None, r"got shape \(4, 3\): pass loss=lambda"),
    "no scalar": (
        Dense(),
        lambda model, batch: model(batch),
        None,
        r"got shape \(4, 3\): let loss be the mean",
    ),
    "no gradient": (Dense(), lambda model, batch: torch.ones(()), None, "scalar tensor with a gradient"),
    "tolerance": (Dense(), square, 0.0, "rtol: expected a positive number, got 0.0"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_gradient_to_compare_is_refused_with_the_way_out(kind: str) -> None:
    module, loss, rtol, message = REFUSED[kind]
    model = DataParallel(filled(module), process_group=world_of_one())
    with pytest.raises(ValueError, match=message):
        model.verify(rows_of(0), loss, rtol=rtol)
    model.close()
