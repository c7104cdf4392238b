"""Compares the gradient of a distributed step with that of one process.

    rank 0    distributed step -> d     l0 ... lW-1 -> r      |d - r|, |d|, |r|
    rank 1    distributed step -> d     l0 ... lW-1 -> r      |d - r|, |d|, |r|      only figures travel

Every rank computes the whole reference r by itself: no rank has to trust a sum of another one, a forward that
depends on the rank shows, and modules that gather their weights do so on all ranks, in the same order. Of r a
rank adds up only the pieces of the gradient that it has, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from instep.errors import InstepError
from instep.net.agree import all_or_none
from instep.net.process_group import Group
from instep.reduce.buckets import wire_dtype
from instep.state.hash import tensor_digest
from instep.verify.gradient_report import GradientFigures, Report, Tolerance, make_report
from instep.verify.subject import GradientPiece, Value

# Relative to the norm of a gradient: what other kernels, threads or orders of sums may make of it.
TOLERANCES = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOLERANCE = 1e-5  # of float32
ERRORS = (ValueError, TypeError, RuntimeError, InstepError)

Part = tuple[str, Callable[[], tuple[int, Sequence[Tensor | None]]]]
"""One part of the reference: its name, and what computes its weight and the gradient of every parameter."""


def compare(
    group: Group,
    parameters: Mapping[str, Tensor],
    copy: int,
    pieces: Sequence[GradientPiece],
    values: Iterable[Value],
    step: Callable[[], object],
    parts: Iterable[Part],
    *,
    rtol: float | None,
    floor: float,
    strategy: str,
    ordered: bool,
) -> Report:
    """Run ``step``, compute the reference from ``parts``, the same on all ranks, and compare. Collective.

    This rank has copy number ``copy`` of the gradient of ``parameters``, the trainable ones by name, or its
    ``pieces`` of that copy, and ``values`` of a model. ``rtol`` is the allowed error, relative to the norm of
    each gradient; None: by its dtype, and at least ``floor``.

    Raises:
        ValueError, TypeError, RuntimeError, InstepError: a part raised on one rank; all ranks name it.
    """
    differing = differing_values(values, group)
    step()
    ours = [piece.gradient() for piece in pieces]
    totals: list[Tensor | None] = [None] * len(pieces)
    norms, total_weight = [0.0] * len(pieces), 0
    for _, compute in parts:  # each pipeline has its own
        weight, gradients = all_or_none(group, "computing gradients again", compute, errors=ERRORS)
        total_weight += weight
        for i, piece in enumerate(pieces):
            gradient = gradients[piece.position]
            if gradient is not None:
                x = _wide(piece.of(gradient))
                norms[i] += _norm(x)
                total = totals[i]
                totals[i] = x if total is None else total.add_(x)
    rank, scale = group.global_rank, total_weight or 1
    figures = [_figures(rank, *each, scale) for each in zip(ours, totals, norms, strict=True)]
    text = json.dumps([copy, [piece.position for piece in pieces], figures])
    copies: dict[int, dict[int, list[GradientFigures]]] = {}
    for found in group.all_gather_bytes(text.encode(), "the figures of all ranks"):
        number, positions, rows = json.loads(found)
        for position, row in zip(positions, rows, strict=True):
            copies.setdefault(number, {}).setdefault(position, []).append(GradientFigures(*row))
    tolerances = []
    for name, p in parameters.items():
        relative = max(TOLERANCES.get(p.dtype, TOLERANCE), floor) if rtol is None else rtol
        tolerances.append(Tolerance(name, relative, torch.finfo(wire_dtype(p.dtype)).eps))
    by_copy = [[pieces[i] for i in range(len(tolerances))] for _, pieces in sorted(copies.items())]
    return make_report(
        tolerances, by_copy, group.size, strategy=strategy, ordered=ordered, differing=differing
    )


def _figures(
    rank: int, mine: Tensor | None, total: Tensor | None, norms: float, scale: int
) -> GradientFigures:
    zero = torch.zeros(1, dtype=torch.float64)
    d = zero if mine is None else _wide(mine)
    r = zero if total is None else total.div_(scale)
    product = 0.0 if mine is None or total is None else torch.vdot(d.flatten(), r.flatten()).real.item()
    return GradientFigures(rank, _norm(d - r), _norm(d), _norm(r), norms / scale, product)


def differing_values(values: Iterable[Value], group: Group) -> list[str]:
    """The ``values`` with other bits on one rank than on another, in words. Collective.

    A piece of a value is compared with the same piece on other ranks, if there are any.
    """
    mine = [(x.name, x.first, tensor_digest(x.tensor).hex()) for x in values]
    everyone = group.all_gather_bytes(json.dumps(mine).encode(), "the comparison of values")
    found: dict[tuple[str, int], dict[int, str]] = {}  # by name and first element: digests by rank
    for rank, data in zip(group.ranks, everyone, strict=True):
        for name, first, digest in json.loads(data):
            found.setdefault((name, first), {})[rank] = digest
    lines = []
    for (name, _), digests in found.items():
        rank, expected = next(iter(digests.items()))
        if differ := [str(other) for other, digest in digests.items() if digest != expected]:
            lines.append(f"{name!r} has other values on rank {', '.join(differ)} than on rank {rank}")
    return lines


def _wide(x: Tensor) -> Tensor:
    """``x`` as a dense copy in double precision."""
    x = x.detach()
    dtype = torch.complex128 if x.dtype.is_complex else torch.float64
    return (x.to_dense() if x.is_sparse else x).to(dtype, copy=True).contiguous()


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))
