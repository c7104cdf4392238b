"""The micro-batches of a step by their place in the stream, whichever rank computes them.

With G micro-batches ("leaves") of m samples to a step, the stream is dealt out as

    position   0 .. m-1 | m .. 2m-1 | ...               | G*m .. G*m+m-1 | ...
               step 0                                   | step 1
               leaf 0   | leaf 1    | ... | leaf G-1    | leaf 0         | ...

so the samples of a leaf follow from (seed, step, leaf) alone. A rank needs no position of its own, and after
a restart or resize the step says where to go on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.data.order import sample_at

__all__ = ["micro_batch_indices", "next_tokens"]


def micro_batch_indices(
    num_samples: int, *, step: int, leaf: int, num_leaves: int, micro_size: int, seed: int
) -> list[int]:
    """The samples of micro-batch ``leaf`` of ``step``, in their order; ``ValueError`` for a place outside."""
    if micro_size < 1:
        raise ValueError(f"expected micro_size >= 1, got {micro_size}")
    if step < 0:
        raise ValueError(f"expected step >= 0, got {step}: steps are counted from 0")
    if not 0 <= leaf < num_leaves:
        raise ValueError(f"expected 0 <= leaf < num_leaves({num_leaves}), got {leaf}: count leaves from 0")
    start = (step * num_leaves + leaf) * micro_size
    return [sample_at(position, num_samples, seed) for position in range(start, start + micro_size)]


def next_tokens(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``windows`` (B, T + 1) into inputs and targets, (B, T) each: a target is the next token.

    Both are copies. ``.contiguous()`` would not do: of a single window both halves already are contiguous,
    and it would return views, the second one token off the alignment that the bits rest on.
    """
    if windows.dim() != 2 or windows.shape[1] < 2:
        raise ValueError(f"expected windows of shape (B, T + 1) with T >= 1, got {tuple(windows.shape)}")
    inputs, targets = windows[:, :-1], windows[:, 1:]
    fresh = torch.contiguous_format
    return inputs.clone(memory_format=fresh), targets.clone(memory_format=fresh)
