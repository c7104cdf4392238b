"""What ranks have of a gradient, beside that of one process, which the first of them has computed.

The reference goes to all ranks, one parameter at a time, so that whatever each has of the gradient is looked
at, all of it or a piece, and only figures come back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from instep.memory import as_bytes
from instep.net.process_group import Group
from instep.reduce.buckets import wire_dtype
from instep.state.homes import shape_of
from instep.verify.gradient_report import GradientFigures, Reference, joined
from instep.verify.subject import GradientPiece

# Relative to the norm of a gradient: what other kernels, threads or orders of sums may make of it.
TOLERANCES = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOLERANCE = 1e-5  # of float32

Ours = list[tuple[GradientPiece, Tensor | None]]
"""What this rank has of the gradient after the exchange."""


@dataclass
class Mean:
    """One parameter's gradient in one process, as far as it has been computed; on the first rank.

    ``add`` those of its parts, each of a rank's batch or of a micro-batch; then ``divide``.
    """

    total: Tensor | None = None
    rank_norm: float = 0.0
    own: bool = False

    def add(self, gradient: Tensor | None) -> None:
        """In double precision."""
        if gradient is not None:
            x = wide(gradient)
            self.rank_norm += norm(x)
            self.total = x if self.total is None else self.total.add_(x)

    def divide(self, by: int) -> None:
        """All parts are added, which are ``by`` ranks, or items."""
        self.rank_norm /= by
        if self.total is not None:
            self.total.div_(by)


class GradientComparison:
    """Of the gradients of ``parameters``, by ``names``, among the ranks of ``group``.

    This rank has copy number ``copy`` of them, or pieces of it. ``rtol`` is the error that is allowed,
    relative to the norm of each; None: by its dtype, and at least ``floor``.
    """

    def __init__(
        self,
        group: Group,
        copy: int,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        rtol: float | None,
        floor: float,
    ) -> None:
        self.group, self.copy, self.names, self.parameters = group, copy, names, parameters
        self.rtol, self.floor = rtol, floor

    def of(self, ours: Ours, means: Sequence[Mean]) -> tuple[list[Reference], list[list[GradientFigures]]]:
        """The references, and figures by copy of the gradient and parameter; ``means`` count on the first
        rank. Collective."""
        told = [asdict(self._described(i, mean)) for i, mean in enumerate(means) if self.group.rank == 0]
        text = self.group.all_gather_bytes(json.dumps(told).encode(), "the figures of the reference")[0]
        references = [Reference(**fields) for fields in json.loads(text)]
        return references, self._compared(ours, means, references)

    def tolerance(self, i: int) -> float:
        """That of parameter ``i``."""
        if self.rtol is not None:
            return self.rtol
        return max(TOLERANCES.get(self.parameters[i].dtype, TOLERANCE), self.floor)

    def _described(self, i: int, mean: Mean) -> Reference:
        return Reference(
            self.names[i],
            mean.total is not None,
            0.0 if mean.total is None else norm(mean.total),
            mean.rank_norm,
            self.tolerance(i),
            torch.finfo(wire_dtype(self.parameters[i].dtype)).eps,
            mean.own,
        )

    def _compared(
        self, ours: Ours, means: Sequence[Mean], references: Sequence[Reference]
    ) -> list[list[GradientFigures]]:
        mine: dict[int, GradientFigures] = {}
        pieces = {piece.position: (piece, gradient) for piece, gradient in ours}
        for i, (mean, reference) in enumerate(zip(means, references, strict=True)):
            expected = self._told(i, mean, reference)  # one parameter at a time
            if i in pieces:
                mine[i] = self._figures(*pieces[i], expected)
        said = json.dumps([self.copy, {i: asdict(found) for i, found in mine.items()}])
        everyone = self.group.all_gather_bytes(said.encode(), "the figures of all ranks")
        copies: dict[int, list[dict[str, dict[str, Any]]]] = {}
        for text in everyone:
            number, figures = json.loads(text)
            copies.setdefault(number, []).append(figures)
        return [
            [
                joined([GradientFigures(**figures[str(i)]) for figures in parts if str(i) in figures])
                for i in range(len(references))
            ]
            for _, parts in sorted(copies.items())
        ]

    def _told(self, i: int, mean: Mean, reference: Reference) -> Tensor:
        """The reference of parameter i, which the first rank has in ``mean``. Collective."""
        parameter = self.parameters[i]
        if mean.total is None:
            dtype = _wide_dtype(parameter)
            expected = torch.zeros(shape_of(parameter), dtype=dtype, device=parameter.device)
        else:
            expected = mean.total
        if reference.present and expected.numel():
            operation = f"the broadcast of the reference of {reference.name!r}"
            self.group.broadcast(as_bytes(expected), operation)
        return expected

    def _figures(self, piece: GradientPiece, mine: Tensor | None, expected: Tensor) -> GradientFigures:
        r = piece.of(expected)
        d = torch.zeros_like(r) if mine is None else wide(mine)
        product = torch.vdot(d.reshape(-1), r.reshape(-1)).real.item()
        return GradientFigures(self.group.global_rank, mine is not None, norm(d - r), norm(d), product)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.dtype.is_complex else torch.float64


def wide(x: Tensor) -> Tensor:
    """``x`` as a dense copy in double precision."""
    x = x.detach()
    return (x.to_dense() if x.is_sparse else x).to(_wide_dtype(x), copy=True).contiguous()


def norm(x: Tensor) -> float:
    """Of all elements."""
    return float(torch.linalg.vector_norm(x))
