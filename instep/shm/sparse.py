"""The all-reduce of sparse tensors: everybody gathers everybody's entries, and adds those of equal place."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.shm.call import Call
from instep.shm.collectives import Turn, all_gather
from instep.shm.tensors import dtype_name


def all_reduce(turn: Turn, x: Tensor) -> None:
    """``x`` (COO) becomes the sum over the ranks, coalesced.

    Three gathers: how many entries, their places, their values; padded to the longest.
    """
    own = x.detach().coalesce()
    size = turn.rounds.size
    counts = _gather(turn, torch.tensor([own._nnz()], device="cpu"), size)
    longest = max(int(count) for count in counts)

    def padded(part: Tensor) -> Tensor:
        whole = part.new_zeros((longest, *part.shape[1:]))
        whole[: len(part)] = part
        return whole

    places = _gather(_next(turn, own.indices()), padded(own.indices().T.contiguous()), size)
    values = _gather(_next(turn, own.values()), padded(own.values()), size)
    entries = range(size)
    total = torch.sparse_coo_tensor(
        torch.cat([places[r][: int(counts[r])] for r in entries]).T,
        torch.cat([values[r][: int(counts[r])] for r in entries]),
        x.shape,
    ).coalesce()
    if turn.call.reduction == "avg":
        total = total / size
    x.copy_(total)  # not of a detached alias: that one would get the new entries alone


def _gather(turn: Turn, x: Tensor, size: int) -> list[Tensor]:
    outs = [torch.empty_like(x) for _ in range(size)]
    all_gather(turn, outs, x)
    return outs


def _next(turn: Turn, x: Tensor) -> Turn:
    return Turn(turn.rounds, Call("all_gather", dtype_name(x)), turn.label, timeout_s=turn.timeout_s)
