"""Wrong numbers on purpose: what bad memory or arithmetic does to a tensor, for those who must notice it.

``flip_bit`` and ``poison`` write past autograd's version counter, as broken memory would: torch sees
nothing. ``poisoned`` leaves all tensors alone and makes a backward go wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def flip_bit(tensor: Tensor, index: int = 0, bit: int = 20) -> None:
    """Flip one ``bit``, counted from the lowest, of element ``index`` of ``tensor``, in place.

    Elements are counted in logical order. In a float32, bits 0 to 22 are the fraction, 23 to 30 the
    exponent, 31 is the sign.

    Raises:
        ValueError: there is no such element or bit.
    """
    width = tensor.element_size()
    if width not in INTEGERS or not 0 <= bit < 8 * width:
        raise ValueError(f"bit {bit}: expected one of the {8 * width} bits of a {tensor.dtype}, at most 64")
    mask = 1 << bit
    if bit == 8 * width - 1:
        mask = -mask  # the sign bit of two's complement
    _element(tensor, index).view(INTEGERS[width]).bitwise_xor_(mask)


def poison(tensor: Tensor, index: int = 0) -> None:
    """Make element ``index`` of ``tensor``, in logical order, nan, in place.

    Raises:
        ValueError: there is no such element, or its dtype has no nan.
    """
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise ValueError(f"expected floating-point or complex numbers, got {tensor.dtype}, which has no nan")
    _element(tensor, index).fill_(torch.nan)


def poisoned(loss: Tensor, parameter: Tensor) -> Tensor:
    """``loss``, with the same value, of which the gradient by ``parameter`` will be nan."""
    poison_term: Tensor = _Poison.apply(parameter)
    return loss + poison_term.to(loss.dtype)


class _Poison(torch.autograd.Function):
    """Zero, with nan for a gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        (parameter,) = ctx.saved_tensors
        return torch.full_like(parameter, torch.nan)


def _element(tensor: Tensor, index: int) -> Tensor:
    """Element ``index`` as a view without dimensions that shares memory, but no version, with ``tensor``."""
    if not 0 <= index < tensor.numel():
        raise ValueError(f"index {index}: expected one of the {tensor.numel()} elements")
    position = []
    for size in reversed(tensor.shape):
        index, along = divmod(index, size)
        position.append(along)
    return tensor.data[tuple(reversed(position))]
