"""Do the ranks still hold the same model, and do they have the gradient that one process computes?"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import bits, numbers

Loss = Callable[[nn.Module, int], Tensor]
"""The loss of a model on the data of one rank."""


def samples(rank: int, key: str = "samples") -> Tensor:
    return numbers(4, 6, key=f"{key} of rank {rank}")


def square(model: nn.Module, rank: int) -> Tensor:
    return model(samples(rank)).square().mean()


def equal_everywhere(mesh: Mesh, tensors: Iterable[Tensor | None]) -> bool:
    """Whether all ranks pass the same bits. Collective."""
    mine = hashlib.sha256()
    for x in tensors:
        mine.update(b"none" if x is None else bits(x).numpy().tobytes())
    return len(set(mesh.world.group.all_gather_bytes(mine.digest(), "the comparison of a test"))) == 1


@contextmanager
def failing_at(parameter: Tensor, error: type[Exception]) -> Iterator[None]:
    """While this lasts, a backward that comes to ``parameter`` raises ``error``."""

    def give_up(gradient: Tensor) -> None:
        raise error("the gradient is not a number")

    hook = parameter.register_hook(give_up)
    try:
        yield
    finally:
        hook.remove()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def mean_gradients(module: nn.Module, loss: Loss, size: int = 2) -> list[Tensor]:
    """The mean over ``size`` ranks of the gradients of ``loss``, by autograd in this process alone."""
    alone = copy.deepcopy(module)
    parameters = [p for p in alone.parameters() if p.requires_grad]
    by_rank = [
        torch.autograd.grad(loss(alone, rank), parameters, allow_unused=True, materialize_grads=True)
        for rank in range(size)
    ]
    return [sum(parts) / size for parts in zip(*by_rank, strict=True)]


def assert_mean_gradients(mesh: Mesh, module: nn.Module, loss: Loss) -> None:
    """Every trainable parameter has the mean over the ranks of ``mesh``, the same bits on all."""
    expected = mean_gradients(module, loss, mesh.world.size)
    ours = [p.grad for p in module.parameters() if p.requires_grad]
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(y) if x is None else x, y)
    assert equal_everywhere(mesh, ours)


def assert_backwards(mesh: Mesh, model: DataParallel, loss: Loss = square, *, times: int = 1) -> None:
    """So many steps of the plain loop, without an optimizer: each gives the mean of its gradients alone."""
    for _ in range(times):
        model.zero_grad()
        loss(model, mesh.rank).backward()
        assert_mean_gradients(mesh, model.module, loss)
