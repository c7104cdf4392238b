"""``verify``: right gradients pass, and every planted fault is found and named, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from instep.errors import InstepError
from instep.mesh.mesh import Mesh
from instep.models.conv import SmallConvNet
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.verify.gradient_report import NOTHING, UNUSED
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import Dense, Images, Mixed, Segments, Tied, Twice, gpt
from tests.replicate.trials import (
    assert_untouched,
    by_name,
    failing,
    next_token,
    rows_of,
    square,
    square_of_both,
    tokens_of,
    verified,
)
from tests.world import world

# Right models


@world(2, by="process")
def test_a_transformer_with_dropout_passes(mesh: Mesh) -> None:
    report = verified(mesh, filled(gpt(dropout=0.2)), tokens_of(mesh.rank, 2, 8, vocabulary=17), next_token)
    assert report.ok and "all" in str(report)
    report.raise_for_error()
    assert all(row.error < 1e-6 and row.rank in (0, 1) for row in report.rows)


@world(2, by="process", backend="shm")
def test_batch_norm_and_reentrant_checkpoints_pass_on_shared_memory(mesh: Mesh) -> None:
    images = numbers(4, 3, 8, 8, key=f"images of {mesh.rank}")
    assert verified(mesh, filled(SmallConvNet()), images).ok
    x = rows_of(mesh.rank).requires_grad_()
    assert verified(mesh, filled(Segments(reentrant=True, dropout=0.3)), x).ok


@world(2)
def test_tied_frozen_and_unused_parameters_pass_without_a_warning(mesh: Mesh) -> None:
    report = verified(mesh, filled(Tied()), tokens_of(mesh.rank, 4, vocabulary=11), next_token)
    assert report.ok and set(by_name(report)) == {"tokens.weight", "middle.weight", "middle.bias"}
    report = verified(mesh, filled(Twice()), [rows_of(mesh.rank), mesh.rank == 1], square_of_both)
    assert report.ok
    notes = {name: row.note for name, row in by_name(report).items() if row.note}
    assert notes == {"never.weight": UNUSED, "never.bias": UNUSED}


@world(2)
def test_every_strategy_passes_ordered_or_not(mesh: Mesh) -> None:
    for strategy in STRATEGIES:
        for ordered in (True, False):
            report = verified(mesh, filled(Dense()), rows_of(mesh.rank), strategy=strategy, ordered=ordered)
            assert report.ok and (report.strategy, report.ordered) == (strategy, ordered)


@world(2)
def test_layouts_and_dtypes_of_all_kinds_pass(mesh: Mesh) -> None:
    assert verified(mesh, filled(Mixed()), rows_of(mesh.rank)).ok
    assert verified(mesh, filled(Images()), numbers(2, 3, 7, 7, key=f"images of {mesh.rank}")).ok


@world(3)
def test_batches_of_other_sizes_are_the_mean_of_the_ranks(mesh: Mesh) -> None:
    assert verified(mesh, filled(Dense()), rows_of(mesh.rank, count=mesh.rank + 1)).ok


@world(3, by="process")
def test_a_bare_process_group_of_some_ranks_names_them_globally(mesh: Mesh) -> None:
    group = dist.new_group([0, 2])
    if mesh.rank != 1:
        model = DataParallel(filled(Dense()), process_group=group)
        weight = model.module.layers[0].weight
        after_the_exchange(model, lambda: weight.grad.mul_(1 + mesh.rank))
        report = model.verify(rows_of(mesh.rank), square)
        assert [(row.name, row.rank) for row in report.rows if not row.ok] == [("layers.0.weight", 2)]
        model.close()
    dist.destroy_process_group(group)


def test_a_world_of_one_passes() -> None:
    report = verified(world_of_one(), filled(Dense()), rows_of(0))
    assert report.ok and report.world_size == 1


# Planted faults: the loss scales on the wrapped path, hooks act while the wrapper reduces


def on_the_wrapped_path(model: DataParallel, factor: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * (factor if model._reducer.plan is not None else 1)


@world(2)
def test_a_hook_that_scales_one_gradient_is_named(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    model.module.layers[3].weight.register_hook(on_the_wrapped_path(model, 3.0))
    report = model.verify(rows_of(mesh.rank), square)
    bad = [row for row in report.rows if not row.ok]
    assert [row.name for row in bad] == ["layers.3.weight"] and report.rows[0] == bad[0]
    assert (bad[0].error, bad[0].ratio) == (pytest.approx(2.0), pytest.approx(3.0))
    with pytest.raises(InstepError, match=r"1 of 6 gradients .* 'layers\.3\.weight' .* 3\.000.* hook"):
        report.raise_for_error()
    assert "! layers.3.weight" in str(report)
    model.close()


@world(2)
def test_a_gradient_that_is_not_averaged_is_called_world_size(mesh: Mesh) -> None:
    def summed(model: nn.Module, batch: Tensor) -> Tensor:
        return square(model, batch) * (mesh.world.size if isinstance(model, DataParallel) else 1)

    report = verified(mesh, filled(Dense()), rows_of(mesh.rank), summed)
    assert {row.ratio_text() for row in report.rows} == {"2.000 = world size"}
    with pytest.raises(InstepError, match=r"6 of 6 .* scale neither"):
        report.raise_for_error()


@world(2)
def test_a_gradient_that_is_averaged_twice_or_turned_round_is_called_so(mesh: Mesh) -> None:
    for factor, text in ((0.5, "0.500 = 1 / world size"), (-1.0, "-1.000: sign flipped")):
        model = DataParallel(filled(Dense()), process_group=mesh)
        model.module.layers[0].bias.register_hook(on_the_wrapped_path(model, factor))
        assert by_name(model.verify(rows_of(mesh.rank), square))["layers.0.bias"].ratio_text() == text
        model.close()


class Forgetful(Dense):
    """Leaves a layer's bias out of the graph while it is told to."""

    forget = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.forget:
            return super().forward(x)
        last = self.layers[5]
        return F.linear(self.layers[:5](x), last.weight, last.bias.detach())


@world(2)
def test_a_dropped_gradient_is_called_nothing(mesh: Mesh) -> None:
    model = DataParallel(filled(Forgetful()), process_group=mesh)

    def forgetful(called: nn.Module, batch: Tensor) -> Tensor:
        model.forget = called is model
        return square(called, batch)

    report = model.verify(rows_of(mesh.rank), forgetful)
    assert [row.name for row in report.rows if not row.ok] == ["layers.5.bias"]
    assert report.rows[0].note == NOTHING and report.rows[0].ratio == 0
    assert "is lost before the exchange" in report.cause
    model.close()


@world(2)
def test_a_parameter_that_differs_on_one_rank_is_named(mesh: Mesh) -> None:
    module = filled(Dense())
    with torch.no_grad():
        module.layers[3].bias.add_(float(mesh.rank))
    report = verified(mesh, module, rows_of(mesh.rank), init_sync=False)
    assert report.differing == ("'layers.3.bias' has other values on rank 1 than on rank 0",)
    assert not report.ok
    with pytest.raises(InstepError, match=r"different models: 'layers\.3\.bias' has other values on rank 1"):
        report.raise_for_error()


def after_the_exchange(model: DataParallel, change: Callable[[], None]) -> None:
    exchange = model._reducer.finish

    def finish() -> None:
        exchange()
        change()

    model._reducer.finish = finish  # type: ignore[method-assign]


@world(2)
def test_a_gradient_that_stayed_on_its_rank_is_called_its_own(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    weight = model.module.layers[0].weight
    local: list[Tensor] = []
    weight.register_hook(lambda gradient: local.append(gradient.clone()))
    after_the_exchange(model, lambda: setattr(weight, "grad", local[-1]))
    report = model.verify(rows_of(mesh.rank), square)
    assert by_name(report)["layers.0.weight"].note == "this rank's own"
    assert "never went through the exchange" in report.cause
    model.close()


@world(2, by="process")
def test_a_fault_on_one_rank_alone_is_found_on_all(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    weight = model.module.layers[0].weight
    after_the_exchange(model, lambda: weight.grad.mul_(1 + mesh.rank))
    report = model.verify(rows_of(mesh.rank), square)
    assert [(row.name, row.rank) for row in report.rows if not row.ok] == [("layers.0.weight", 1)]
    model.close()


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


# What goes wrong on one rank


@world(2, by="process")
@pytest.mark.parametrize("where", ["forward", "backward", "the reference"])
def test_an_error_on_one_rank_is_raised_on_all(mesh: Mesh, where: str) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    square(model, rows_of(mesh.rank)).backward()
    failed = 0 if where == "the reference" else 1
    told = rf"^rank {failed}: planted[^\n]*\nrank {failed} raised ValueError in the outcome of "
    match = "^planted" if mesh.rank == failed else told

    def trial() -> None:
        with pytest.raises(ValueError, match=match):
            model.verify(rows_of(mesh.rank), failing(mesh.rank, where))

    assert_untouched(model, trial)
    assert model.verify(rows_of(mesh.rank), square).ok
    square(model, rows_of(mesh.rank)).backward()
    model.close()


@world(2)
def test_a_hook_that_fails_in_the_middle_of_backward_is_named_on_all(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-6)
    assert model.verify(rows_of(mesh.rank), square).ok

    def fail(gradient: Tensor) -> None:
        if mesh.rank == 1:
            raise ValueError("planted in a hook")

    handle = model.module.layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="planted in a hook"):
        model.verify(rows_of(mesh.rank), square)
    handle.remove()
    assert model.verify(rows_of(mesh.rank), square).ok
    model.close()


# Losses


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


def test_no_scalar_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"got a tensor of shape \(4, 3\): pass loss="):
        verified(world_of_one(), filled(Losing("output")), rows_of(0), None)
    with pytest.raises(ValueError, match=r"scalar tensor with a gradient, got shape \(4, 3\)"):
        verified(world_of_one(), filled(Dense()), rows_of(0), lambda model, batch: model(batch))
