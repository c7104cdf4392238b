"""A data set of inputs and targets that are held as two tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.data.rows import take_rows

__all__ = ["Pairs"]


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
