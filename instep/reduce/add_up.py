"""Adds slices of roots in the order of the sum tree, in the format of its nodes.

The plan fixes the order of every element, so neither the length of a piece nor the rank that adds it changes
the bits. The native core makes one pass over memory; without it torch's functions give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES
from instep.native.library import NO_SCALE, TIMES, core
from instep.reduce.node_format import BucketNodes
from instep.reduce.tree import Sum

_NATIVE = (torch.float32, torch.float64)
_address = Tensor.data_ptr


def add_up(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    homes: Sequence[Tensor],
    nodes: BucketNodes,
    first: int = 0,
    read_only: Collection[int] = (),
) -> None:
    """Write the sum of ``values`` by ``plan``, times ``scale``, to each of ``homes``.

    All tensors are flat, of one dtype and length. A home may be one of the values. All values may be
    overwritten but those at the positions ``read_only``. They are elements ``first`` and following of a
    bucket with ``nodes``.
    """
    native = None if nodes.rounds else core()
    if native is not None and _is_native(values, homes):
        length, itemsize = values[0].numel(), values[0].dtype.itemsize
        finish = (NO_SCALE, 1.0) if scale == 1.0 else (TIMES, scale)
        from_, to = tuple(map(_address, values)), tuple(map(_address, homes))
        if native.add_up(from_, plan.adds, plan.root, to, length, itemsize, finish=finish):
            return
    root = values[plan.root]
    others = [home for home in homes if plan.root in read_only or home.data_ptr() != root.data_ptr()]
    # In pieces, so that partial sums stay in the cache; on a GPU in one call per add.
    most = PIECE_BYTES // root.dtype.itemsize if root.is_cpu else max(1, len(root))
    for start in range(0, len(root), most):
        terms = [value[start : start + most] for value in values]
        terms = [term.clone() if i in read_only else term for i, term in enumerate(terms)]
        for (left, right), node in zip(plan.adds, plan.sums, strict=True):
            nodes.add(terms[left], terms[right], node, first + start)
        if scale != 1.0:
            terms[plan.root].mul_(scale)
        for home in others:
            home[start : start + most].copy_(terms[plan.root])


def _is_native(values: Sequence[Tensor], homes: Sequence[Tensor]) -> bool:
    for x in (*values, *homes):
        if not (x.is_cpu and x.is_contiguous()):
            return False
    return values[0].dtype in _NATIVE


def add_up_to_send(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    nodes: BucketNodes,
    first: int = 0,
    slot: Tensor | None = None,
) -> Tensor:
    """The sum of ``values``, a slice, encoded for the all-gather, in ``slot`` if given.

    A rounded sum travels unscaled; ``nodes.decode_mean`` scales it.
    """
    root = values[plan.root]
    if nodes.rounds:
        add_up(values, plan, 1.0, [root], nodes, first)
        return nodes.encode(root, first, slot)
    slot = root if slot is None else slot
    add_up(values, plan, scale, [slot], nodes, first)
    return slot
