"""Sums of roots: slices side by side, added in the order of the sum tree, in the format of its nodes.

The order is the plan's, elementwise, so neither the length of a piece nor who adds it has a say in the bits:
the native core makes them in one pass over memory, and where there is none torch's functions make the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES
from instep.native.library import NO_SCALE, TIMES, core
from instep.ordered.node_format import BucketNodes
from instep.ordered.tree import Sum

_NATIVE = (torch.float32, torch.float64)
_address = Tensor.data_ptr


def add_up(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    homes: Sequence[Tensor],
    nodes: BucketNodes,
    first: int = 0,
    kept: Collection[int] = (),
) -> None:
    """Each of ``homes`` becomes the sum of ``values`` in the order of ``plan``, times ``scale``.

    All are flat, of one dtype and one length; a home may be one of the values, which may all be overwritten
    but for those at the positions ``kept``. They are elements ``first`` and following of a bucket with
    ``nodes``.
    """
    native = None if nodes.rounds else core()
    if native is None or not _can_be_native(values, homes):
        _in_pieces(values, plan, scale, homes, nodes, first, kept)
        return
    length, itemsize = values[0].numel(), values[0].dtype.itemsize
    finish = (NO_SCALE, 1.0) if scale == 1.0 else (TIMES, scale)
    from_, to = tuple(map(_address, values)), tuple(map(_address, homes))
    if not native.add_up(from_, plan.adds, plan.root, to, length, itemsize, finish=finish):
        _in_pieces(values, plan, scale, homes, nodes, first, kept)


def _can_be_native(values: Sequence[Tensor], homes: Sequence[Tensor]) -> bool:
    for x in (*values, *homes):
        if not (x.is_cpu and x.is_contiguous()):
            return False
    return values[0].dtype in _NATIVE


def _in_pieces(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    homes: Sequence[Tensor],
    nodes: BucketNodes,
    first: int,
    kept: Collection[int],
) -> None:
    """Piece by piece, so that partial sums stay in the cache; a device takes all of them in one call each."""
    root = values[plan.root]
    others = [home for home in homes if plan.root in kept or home.data_ptr() != root.data_ptr()]
    most = PIECE_BYTES // root.dtype.itemsize if root.is_cpu else max(1, len(root))
    for start in range(0, len(root), most):
        terms = [value[start : start + most] for value in values]
        terms = [term.clone() if i in kept else term for i, term in enumerate(terms)]
        for (left, right), node in zip(plan.adds, plan.sums, strict=True):
            nodes.add(terms[left], terms[right], node, first + start)
        if scale != 1.0:
            terms[plan.root].mul_(scale)
        for home in others:
            home[start : start + most].copy_(terms[plan.root])


def add_up_to_send(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    nodes: BucketNodes,
    first: int = 0,
    slot: Tensor | None = None,
) -> Tensor:
    """The sum of ``values``, a slice, as it travels to all: in ``slot``, if there is one.

    What is rounded travels before it is scaled; ``nodes.decode_mean`` does the rest.
    """
    root = values[plan.root]
    if nodes.rounds:
        add_up(values, plan, 1.0, [root], nodes, first)
        return nodes.encode(root, first, slot)
    slot = root if slot is None else slot
    add_up(values, plan, scale, [slot], nodes, first)
    return slot
