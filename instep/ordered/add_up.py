"""Sums of roots: slices that lie side by side, added in the order of the sum tree.

The order is the plan's, elementwise, so neither the length of a piece nor who adds it has a say in the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES
from instep.ordered.tree import Sum


def add_up(values: Sequence[Tensor], plan: Sum, scale: float, homes: Sequence[Tensor]) -> None:
    """Each of ``homes`` becomes the sum of ``values`` in the order of ``plan``, times ``scale``.

    All are flat, of one dtype and one length; a home may be one of the values, which may all be overwritten.
    Piece by piece, so that partial sums stay in the cache.
    """
    root = values[plan.root]
    others = [home for home in homes if home.data_ptr() != root.data_ptr()]
    most = PIECE_BYTES // root.dtype.itemsize
    for start in range(0, len(root), most):
        terms = [value[start : start + most] for value in values]
        for left, right in plan.adds:
            torch.add(terms[left], terms[right], out=terms[left])
        if scale != 1.0:
            terms[plan.root].mul_(scale)
        for home in others:
            home[start : start + most].copy_(terms[plan.root])
