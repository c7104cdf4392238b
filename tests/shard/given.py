"""Parameters and gradients made of numbers, for optimizers without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.parity import numbers

SHAPES = ((5, 4096), (4099,), (7,), (131, 77), (), (0, 3), (3 * 4096 + 13,), (33,))


def parameters(
    shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """The same on every rank and in every call."""
    return [
        nn.Parameter(numbers(*shape, key=f"value {i}", dtype=torch.float32).to(dtype))
        for i, shape in enumerate(shapes)
    ]


def set_gradients(parameters: Sequence[Tensor], step: int) -> None:
    """Whole gradients, as if reduced: the same on every rank."""
    for i, p in enumerate(parameters):
        p.grad = numbers(*p.shape, key=f"gradient {i} of step {step}").to(p.dtype)


def steps(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], count: int, first: int = 0) -> None:
    """``count`` steps with the gradients of steps ``first``, ``first + 1``, ..."""
    for step in range(first, first + count):
        set_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()
