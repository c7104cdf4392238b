"""Gradients on other ranks of a pipeline, as far as code asks for them: norms, scaling, ``zero_grad``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from instep.errors import Desync
from instep.events import PIPELINE, Recorder
from instep.memory import bytes_of, tensor_of
from instep.pipeline.home import PipelineHome
from instep.reduce.norm import block_square_sums
from instep.reduce.placeholder import placeholder, stands_in_elsewhere

GRADIENT_NORM = "the gradient norm"
NORM_BYTES = 1 << 32  # at most, of one rank's sums of blocks


class RemoteGradients:
    """The ``Slices`` of placeholders that stand for gradients on other ranks, of parameters of ``home``.

    ``recorder`` is told of the wait for the norm, which for a rank that has computed all is the drain.
    """

    where: ClassVar[str] = "on another rank"

    def __init__(self, home: PipelineHome, recorder: Recorder) -> None:
        self.home, self.recorder = home, recorder

    def stand_in(self) -> None:
        """A step has ended: parameters on other ranks have a gradient, too, there."""
        if self.home.group.size == 1:  # nobody is to be asked
            return
        for name, p in zip(self.home.names, self.home.parameters, strict=True):
            if p.requires_grad and not self.home.holds(p):
                p.grad = placeholder(p, self, name, p.dtype)
            elif p.requires_grad and p.grad is not None:
                stands_in_elsewhere(p.grad, self)

    def square_sums(self, placeholders: Sequence[Tensor], whole: Sequence[Tensor]) -> list[float]:
        """Sums of squares of all blocks of these gradients. Collective: 8 bytes per block."""
        group, parameters = self.home.group, self.home.parameters
        sums: dict[int, Tensor] = {}
        nothing = torch.empty(0, dtype=torch.float64, device="cpu")
        for i, p in enumerate(parameters):
            if self.home.holds(p) and p.grad is not None:
                sums[i] = block_square_sums(p.grad.to_dense() if p.grad.is_sparse else p.grad).cpu()
        counts = [x for i, its in sums.items() for x in (i, len(its))]
        told = [
            bytes_of(torch.tensor(counts, dtype=torch.int64, device="cpu")),
            bytes_of(torch.cat([nothing, *sums.values()])),
        ]
        with self.recorder.span(PIPELINE, lane="host"):
            numbers, values = (group.all_gather_bytes(x, GRADIENT_NORM, limit=NORM_BYTES) for x in told)
        asked = {id(x) for x in (*placeholders, *whole)}
        wanted = {i for i, p in enumerate(parameters) if id(p.grad) in asked}
        found: list[float] = []
        for its_numbers, its_values in zip(numbers, values, strict=True):
            at = iter(tensor_of(its_numbers, torch.int64).tolist())
            squares = iter(tensor_of(its_values, torch.float64).tolist())
            for i, count in zip(at, at, strict=True):
                its = [next(squares) for _ in range(count)]
                found += its if i in wanted else []
        return found

    def scale(self, placeholders: Sequence[Tensor], factor: float) -> None:
        """The ranks that have them do."""

    def unscale(
        self,
        placeholders: Sequence[Tensor],
        whole: Sequence[Tensor],
        found_inf: Tensor,
        inverse_scale: Tensor,
    ) -> None:
        """``found_inf`` becomes 1 on all ranks if it is 1 on one. Collective: some bytes.

        Raises:
            Desync: other ranks are asked of other gradients, or one rank has all of these and will not come.
        """
        asked = {id(x) for x in (*placeholders, *whole)}
        found = {i: p for i, p in enumerate(self.home.parameters) if id(p.grad) in asked}
        mine = bytes([int(found_inf)]) + hashlib.sha256(repr(list(found)).encode()).digest()
        told: Sequence[bytes] = ()
        if len({self.home.slices_with(p)[0] for p in found.values()}) > 1:
            told = self.home.group.all_gather_bytes(mine, "the check of gradients for what is not finite")
        if not told or any(data[1:] != mine[1:] for data in told):
            raise Desync(
                "ranks of a pipeline unscale gradients of different parameters: where one has all that an "
                "optimizer steps of a dtype, a GradScaler asks no other there. Make one optimizer of "
                "model.parameters(), with groups of parameters if they need options of their own"
            )
        found_inf.fill_(max(data[0] for data in told))

    def discard(self, placeholders: Sequence[Tensor]) -> None:
        """Their parameters have no gradient any more."""
        gone = set(map(id, placeholders))
        for p in self.home.parameters:
            if id(p.grad) in gone:
                p.grad = None

    def used(self, placeholders: Sequence[Tensor]) -> None:
        """An optimizer finds nothing to step here."""
        self.discard(placeholders)
