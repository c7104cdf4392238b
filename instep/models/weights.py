"""Initial values of one parameter that depend on nothing but a generator."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fill_normal"]


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill ``parameter`` in place from N(0, std**2).

    The numbers are drawn into a new contiguous float32 tensor on the generator's device and then copied:
    drawn in place, a transposed layout would get them in another order, and a GPU another stream.
    """
    device = generator.device
    drawn = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.float32)
    parameter.copy_(drawn.mul_(std))
