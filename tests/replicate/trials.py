"""Trial steps for ``verify``: batches that depend on the rank, losses, and one that fails on a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.verify.gradient_report import GradientRow, Report
from tests.parity import bits, numbers
from tests.replicate.nets import WIDTH

CPU = torch.device("cpu")


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def rows_of(rank: int, count: int = 4) -> Tensor:
    return numbers(count, WIDTH, key=f"verify on rank {rank}")


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["targets"].reshape(-1))


def tokens_of(rank: int, *shape: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = (numbers(*shape, key=f"tokens of {rank}").abs() * 1000).long() % vocabulary
    return {"tokens": tokens, "targets": tokens.flip(-1)}


def by_name(report: Report) -> dict[str, GradientRow]:
    return {row.name: row for row in report.rows}


def verified(mesh: Mesh, module: nn.Module, batch: Any, loss: Any = square, **options: Any) -> Report:
    model = DataParallel(module, process_group=mesh, **options)
    try:
        return model.verify(batch, loss)
    finally:
        model.close()


def square_of_both(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
    return model(*batch).square().mean()


def state(model: DataParallel) -> list[tuple[str, Tensor | None]]:
    module = model.module
    named = [*module.named_parameters(), *module.named_buffers()]
    kept = [(name, x.detach().clone()) for name, x in named]
    gradients = [(f"{name}.grad", p.grad) for name, p in module.named_parameters()]
    kept += [(name, None if x is None else x.clone()) for name, x in gradients]
    return [*kept, ("rng", torch.get_rng_state())]


def books(model: DataParallel) -> dict[str, Any]:
    reducer, backward = model._reducer, model._backward
    lists = {name: list(getattr(reducer, name)) for name in ("local", "_seen", "_expected", "_order")}
    names = ("steps", "exchanges", "given_up", "_reordered", "_warned_unused", "_next_order", "plan", "leaf")
    own = {name: getattr(reducer, name) for name in names}
    return lists | own | {"step": model.next_step, "contract": model.step_mode, "sync": backward.sync}


def assert_untouched(model: DataParallel, trial: Callable[[], object]) -> None:
    gradients = [p.grad for p in model.module.parameters()]
    before, books_before = state(model), copy.deepcopy(books(model))
    training = [module.training for module in model.module.modules()]
    trial()
    for (name, x), (_, y) in zip(state(model), before, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(bits(x), bits(y))), name
    assert books(model) == books_before
    assert training == [module.training for module in model.module.modules()]
    for gradient, parameter in zip(gradients, model.module.parameters(), strict=True):
        assert parameter.grad is gradient


class Raises(torch.autograd.Function):
    """Backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("planted in backward")


def failing(rank: int, where: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss that fails on rank 1: in forward, at the start of backward, in its middle, or afterwards."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if rank == 1 and where == "forward":
            raise ValueError("planted in forward")
        if rank == 0 and where == "the reference" and not isinstance(model, DataParallel):
            raise ValueError("planted in the reference")
        value = square(model, batch)
        return Raises.apply(value) if rank == 1 and where == "backward" else value

    return loss
