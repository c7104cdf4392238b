"""What stands in ``.grad`` where a rank has only pieces of the gradient: NaN, in no memory to speak of.

"Is there a gradient?" and ``zero_grad()`` mean what they always do, and whoever computes with it sees NaN
rather than numbers of one rank alone; writing to it raises, but for ``zero_`` and ``fill_``, which torch
allows: ``was_written`` tells.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Slices(Protocol):
    """Has the pieces of the gradients that ``placeholders`` stand for: some on this rank, some on others."""

    def square_sums(self, placeholders: Sequence[Tensor]) -> list[float]:
        """Sums of squares of all blocks of these gradients. Collective."""

    def scale(self, placeholders: Sequence[Tensor], factor: float) -> None:
        """Multiply this rank's pieces of these gradients."""


def placeholder(like: Tensor, slices: Slices) -> Tensor:
    """A gradient for the parameter ``like`` whose pieces ``slices`` has; it does not keep them alive."""
    x = torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(like.shape)
    marked: Any = x
    marked.instep_slices = weakref.ref(slices)
    return x


def was_written(stands_in: Tensor) -> bool:
    """Whether somebody has filled the one element of a placeholder; on a GPU nobody waits to know."""
    return stands_in.device.type == "cpu" and not bool(torch.isnan(stands_in.as_strided((), ())))


def slices_of(gradient: Tensor) -> Slices | None:
    """Who has the pieces that ``gradient`` stands for; None if it is a gradient itself."""
    reference = getattr(gradient, "instep_slices", None)
    found: Slices | None = None if reference is None else reference()
    return found
