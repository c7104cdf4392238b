"""Does a rank's steps of a schedule: the one place where algorithms meet memory and messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.messages import Messages, edges, flat
from instep.comm.schedule import WHOLE, Piece, Schedule, Then, part


def perform(schedule: Schedule, x: Tensor | Sequence[Tensor], messages: Messages, root: int = 0) -> None:
    """Run ``schedule`` on ``x`` in place; all ranks call it, with as many elements.

    ``x`` is a tensor of any shape, or its W parts, part j of the same length on every rank. What the schedule
    calls rank 0 is rank ``root``, and so on around. An algorithm that adds needs scratch for what a step
    receives.

    Raises:
        ValueError: a tensor whose memory is not its content in a row, or not on the CPU.
        PeerLost: a rank did not come before the deadline, or its connection closed.
    """
    size = messages.size
    places = _Places(x)
    sums: dict[Piece, _InRankOrder] = {}
    for step in schedule((messages.rank - root) % size, size):
        sources = [(source + root) % size for source, _ in step.receives]
        homes = [places.at(piece) for _, piece in step.receives]
        received = [places.landing(home, step.then) for home in homes]
        messages.together(
            [(places.at(piece), (to + root) % size) for to, piece in step.sends],
            list(zip(received, sources, strict=True)),
        )
        for own, came, source, (_, piece) in zip(homes, received, sources, step.receives, strict=True):
            match step.then:
                case "own + received":
                    own.add_(came)
                case "received + own":
                    torch.add(came, own, out=own)
                case "in rank order":
                    sums.setdefault(piece, _InRankOrder(own, messages)).add(source, came)


class _Places:
    """Where pieces of x lie, and where what is received lands."""

    def __init__(self, x: Tensor | Sequence[Tensor]) -> None:
        parts = [flat(one) for one in ([x] if isinstance(x, Tensor) else x)]
        self._views = {part(index, len(parts)): own for index, own in enumerate(parts)}
        self._scratch = parts[0].new_empty(0)

    def at(self, piece: Piece) -> Tensor:
        """The elements of ``piece``, a view: one of the parts that were given, or cut from the one tensor."""
        if piece not in self._views:
            x = self._views[WHOLE]
            at = edges(x.numel(), piece.of)
            self._views[piece] = x[at[piece.first] : at[piece.end]]
        return self._views[piece]

    def landing(self, home: Tensor, then: Then) -> Tensor:
        """Memory for what is to become part of ``home``: itself, or scratch, the same for every step."""
        if then == "copy":
            return home
        if then == "in rank order":  # what comes before its turn has to stay
            return torch.empty_like(home)
        if self._scratch.numel() < home.numel():
            self._scratch = torch.empty_like(home)
        return self._scratch[: home.numel()]


class _InRankOrder:
    """((x0 + x1) + x2) + ... in ``own``, in whatever order the addends come; ``own`` is this rank's."""

    def __init__(self, own: Tensor, messages: Messages) -> None:
        self._own, self._size = own, messages.size
        self._waiting = {messages.rank: own}
        self._total: Tensor | None = None
        self._next = 0

    def add(self, rank: int, addend: Tensor) -> None:
        self._waiting[rank] = addend
        while (following := self._waiting.pop(self._next, None)) is not None:
            self._total = following if self._total is None else self._total.add_(following)
            self._next += 1
        if self._next == self._size and self._total is not None and self._total is not self._own:
            self._own.copy_(self._total)
