"""Data sets whose samples are the rows of tensors, copied into fresh memory.

A micro-batch that is a *view* of a larger tensor begins wherever its rows happen to lie, and the CPU's matrix
kernels take another path when their input is not at a 16-byte boundary: the same numbers then give other
bits, depending on which rank computed which slice. A copy of its own always begins at a 64-byte boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "Pairs",
    "take_rows",
]


def take_rows(source: Tensor, indices: Sequence[int]) -> Tensor:
    """``source[indices]`` along dim 0 in memory of its own; ``IndexError`` for an index below 0 or too large.

    Shapes: ``(num_rows, ...)`` gives ``(len(indices), ...)``, contiguous, of the same dtype.
    """
    num_rows = source.shape[0]
    for index in indices:
        if not 0 <= index < num_rows:
            raise IndexError(f"expected 0 <= index < {num_rows} samples, got {index}")
    return source.index_select(0, torch.tensor(indices, dtype=torch.int64, device=source.device))


class Pairs:
    """Row i of ``inputs``, of shape (N, ...), belongs to row i of ``targets``, of shape (N, ...).

    Raises ``ValueError`` if the two have unequal lengths.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets):
            raise ValueError(
                f"expected as many targets as inputs, got {len(inputs)} inputs and {len(targets)} targets: "
                "pass two tensors whose rows belong together"
            )
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples, (len(indices), ...) each, in this order, in fresh memory."""
        return take_rows(self.inputs, indices), take_rows(self.targets, indices)
