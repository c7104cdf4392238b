"""Executes a rank's steps of a schedule: the one place where algorithms use memory and messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.schedule import Piece, Schedule, edges
from instep.net.messages import Messages, flat


def perform(
    schedule: Schedule,
    x: Tensor | Sequence[Tensor],
    messages: Messages,
    root: int = 0,
    out: Sequence[Tensor] | None = None,
) -> None:
    """Run ``schedule`` on ``x`` in place; all ranks call it, with equally many elements.

    ``x`` is a tensor of any shape, or its W parts, part j of the same length on every rank. Rank 0 of the
    schedule is rank ``root``, and so on around. With ``out``, W parts of any length, received parts land
    there, and this rank's own too (all-to-all). An algorithm that adds needs scratch for a step's receives.

    Raises:
        ValueError: a tensor that is not contiguous, or not in CPU memory.
        PeerLost: a rank missed the deadline, or its connection closed.
    """
    size = messages.size
    own_parts = [flat(one) for one in ([x] if isinstance(x, Tensor) else x)]
    targets = own_parts
    if out is not None:
        targets = [flat(one) for one in out]
        targets[messages.rank].copy_(own_parts[messages.rank])
    scratch = own_parts[0].new_empty(0)  # one for all steps
    for step in schedule((messages.rank - root) % size, size):
        sources = [(source + root) % size for source, _ in step.receives]
        own = [_at(targets, piece) for _, piece in step.receives]
        received = own
        if step.then == "in rank order":
            received = [torch.empty_like(x) for x in own]
        elif step.then != "copy" and own:
            if scratch.numel() < own[0].numel():
                scratch = torch.empty_like(own[0])
            received = [scratch[: own[0].numel()]]
        messages.together(
            [(_at(own_parts, piece), (to + root) % size) for to, piece in step.sends],
            list(zip(received, sources, strict=True)),
        )
        match step.then:
            case "own + received":
                own[0].add_(received[0])
            case "received + own":
                torch.add(received[0], own[0], out=own[0])
            case "in rank order" if own:  # ((x0 + x1) + x2) + ...
                addends = dict(zip(sources, received, strict=True)) | {messages.rank: own[0]}
                first, *others = [addends[rank] for rank in sorted(addends)]
                for addend in others:
                    first.add_(addend)
                if first is not own[0]:
                    own[0].copy_(first)


def _at(parts: Sequence[Tensor], piece: Piece) -> Tensor:
    """A view of ``piece``: one of the given parts, or cut from the one tensor."""
    if len(parts) == piece.of:
        return parts[piece.first]
    at = edges(parts[0].numel(), piece.of)
    return parts[0][at[piece.first] : at[piece.end]]
