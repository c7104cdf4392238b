"""The collectives on ordinary tensors: copied into the room, read from there by whoever needs them.

All of them walk through their tensors in pieces that fit into a half, one round per piece, so the room's
memory stays in the processors' caches and only the tensors themselves travel to and from main memory.

Bytes written to and read from the room by one rank, W ranks, x of S bytes: broadcast S at the root, S read by
each other one; all-gather S, WS; all-to-all S, S; reduce-scatter S, S; all-reduce S, WS at once, or
S, (2 - 1/W) S by slices, which takes a round more.

Tensors are flat and contiguous. Lists have one entry per group rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from instep.errors import Desync
from instep.shm.call import NOWHERE, Call, Location
from instep.shm.room import HALF_BYTES, LINE, WORD
from instep.shm.rounds import Rounds
from instep.shm.sums import combine
from instep.shm.tensors import flat_bytes

# Up to here every rank adds everything: one round, where slices take two.
AT_ONCE_BYTES = 32 << 10


class Turn:
    """One operation's rounds: in the first the ranks compare what they are about to do."""

    def __init__(
        self,
        rounds: Rounds,
        call: Call,
        label: str,
        location: Location = NOWHERE,
        timeout_s: float | None = None,
    ) -> None:
        self.rounds = rounds
        self.call = call
        self.label = label
        self.timeout_s = timeout_s
        self.locations: list[Location] = []  # of the ranks' tensors, after the first round
        self.location = location

    def meet(self) -> None:
        """Come to the next round."""
        if self.locations:
            self.rounds.meet(self.label, self.timeout_s)
        else:
            self.locations = self.rounds.agree(self.call, self.label, self.location, self.timeout_s)

    def all_shared(self) -> bool:
        """Whether all ranks' tensors lie in memory that the others can map."""
        return NOWHERE not in self.locations

    def all_private(self) -> bool:
        """Whether none of them does."""
        return all(place == NOWHERE for place in self.locations)


def pieces(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``length`` into (start, end) no longer than ``most``; one empty piece if there is nothing."""
    for start in range(0, max(length, 1), most):
        yield start, min(start + most, length)


def barrier(turn: Turn) -> None:
    """Nobody returns before all have come."""
    turn.meet()


def broadcast(turn: Turn, x: Tensor, root: int) -> None:
    """``x`` (n,) of ``root`` overwrites everybody's."""
    rounds, data = turn.rounds, flat_bytes(x)
    for start, end in pieces(data.numel(), HALF_BYTES):
        if rounds.rank == root:
            rounds.mine()[: end - start].copy_(data[start:end])
        turn.meet()
        if rounds.rank != root:
            data[start:end].copy_(rounds.theirs(root)[: end - start])


def all_gather(turn: Turn, outs: Sequence[Tensor], x: Tensor) -> None:
    """``outs[r]`` (n,) receives the ``x`` (n,) of rank r. Ranks with no ``outs`` only give."""
    rounds, data = turn.rounds, flat_bytes(x)
    results = [flat_bytes(out) for out in outs]
    for start, end in pieces(data.numel(), HALF_BYTES):
        rounds.mine()[: end - start].copy_(data[start:end])
        turn.meet()
        for rank, result in enumerate(results):
            result[start:end].copy_(rounds.theirs(rank)[: end - start])


def scatter(turn: Turn, out: Tensor, xs: Sequence[Tensor], root: int) -> None:
    """``out`` (n,) of rank r receives ``xs[r]`` (n,) of ``root``; the others pass no ``xs``."""
    rounds, result = turn.rounds, flat_bytes(out)
    most = _share(rounds.size)
    parts = [flat_bytes(x) for x in xs]
    for start, end in pieces(result.numel(), most):
        for rank, part in enumerate(parts):
            rounds.mine()[rank * most :][: end - start].copy_(part[start:end])
        turn.meet()
        result[start:end].copy_(rounds.theirs(root)[rounds.rank * most :][: end - start])


def all_to_all(turn: Turn, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """``outs[s]`` of rank d receives ``xs[d]`` of rank s; the lengths of the pairs may differ.

    Raises:
        Desync: a rank expects another length than is sent to it; raised on every rank alike.
    """
    rounds, size = turn.rounds, turn.rounds.size
    parts, results = [flat_bytes(x) for x in xs], [flat_bytes(out) for out in outs]
    lengths = torch.tensor([[x.numel() for x in parts], [x.numel() for x in results]], device="cpu")
    start_of_data = 2 * size * WORD
    most = (HALF_BYTES - start_of_data) // size // LINE * LINE
    longest, start = 0, 0
    while start == 0 or start < longest:
        mine = rounds.mine()
        if start == 0:
            mine[:start_of_data].copy_(flat_bytes(lengths))
        for rank, part in enumerate(parts):
            piece = part[start : start + most]
            mine[start_of_data + rank * most :][: piece.numel()].copy_(piece)
        turn.meet()
        if start == 0:
            table = torch.stack(
                [rounds.theirs(r)[:start_of_data].view(torch.int64).view(2, size) for r in range(size)]
            )
            _require_equal(table[:, 0], table[:, 1].T, rounds.ranks)
            longest = int(table.max())
        for rank, result in enumerate(results):
            piece = result[start : start + most]
            piece.copy_(rounds.theirs(rank)[start_of_data + rounds.rank * most :][: piece.numel()])
        start += most


def reduce_scatter(turn: Turn, out: Tensor, xs: Sequence[Tensor], reduction: str) -> None:
    """``out`` (n,) of rank r receives the sum over all ranks of their ``xs[r]`` (n,)."""
    rounds, dtype = turn.rounds, out.dtype
    most = _share(rounds.size) // dtype.itemsize
    for start, end in pieces(out.numel(), most):
        mine = rounds.mine(dtype)
        for rank, x in enumerate(xs):
            mine[rank * most :][: end - start].copy_(x[start:end])
        turn.meet()
        place = slice(rounds.rank * most, rounds.rank * most + end - start)
        addends = [rounds.theirs(r, dtype)[place] for r in range(rounds.size)]
        combine(addends, reduction, out[start:end])


def all_reduce(turn: Turn, x: Tensor, reduction: str, root: int | None = None) -> None:
    """``x`` (n,) becomes the sum over the ranks; with a ``root``, there alone."""
    at_once = turn.rounds.size <= 2 or x.numel() * x.dtype.itemsize <= AT_ONCE_BYTES
    reduce = _reduce_at_once if at_once else _reduce_by_slices
    begins = not turn.locations
    # A rank whose tensor lies in shared memory came to the first round without data. It has the others begin
    # again, all of whom see where everybody's tensor lies.
    if not reduce(turn, x, reduction, root, begins):
        reduce(turn, x, reduction, root, False)


def _reduce_at_once(turn: Turn, x: Tensor, reduction: str, root: int | None, begins: bool) -> bool:
    """Every rank adds everything. False: nothing was done, because a rank came without data."""
    rounds, dtype = turn.rounds, x.dtype
    for start, end in pieces(x.numel(), HALF_BYTES // dtype.itemsize):
        rounds.mine(dtype)[: end - start].copy_(x[start:end])
        turn.meet()
        if begins and not turn.all_private():
            return False
        if root in (None, rounds.rank):
            addends = [rounds.theirs(r, dtype)[: end - start] for r in range(rounds.size)]
            combine(addends, reduction, x[start:end])
    return True


def _reduce_by_slices(turn: Turn, x: Tensor, reduction: str, root: int | None, begins: bool) -> bool:
    """Every rank adds one slice of a piece, and takes the other slices from those who added them.

    Both share a round: piece k is written beside the sums of piece k - 1. False: as above.
    """
    rounds, dtype = turn.rounds, x.dtype
    ranks = range(rounds.size)
    slice_bytes = HALF_BYTES // (rounds.size + 1) // LINE * LINE
    length, most = slice_bytes // dtype.itemsize, slice_bytes * rounds.size // dtype.itemsize
    before: list[Tensor] | None = None  # piece k - 1, by slice
    for start in range(0, x.numel() + most, most):
        piece = _slices(x[start : start + most], rounds.size, length) if start < x.numel() else None
        if piece is not None:
            for rank in ranks:
                if rank != rounds.rank:
                    rounds.mine(dtype)[rank * length :][: len(piece[rank])].copy_(piece[rank])
        turn.meet()
        if begins and not turn.all_private():
            return False
        if before is not None and root in (None, rounds.rank):
            for rank in ranks:
                before[rank].copy_(rounds.theirs(rank, dtype)[most:][: len(before[rank])])
        if piece is not None:
            own = piece[rounds.rank]
            place = slice(rounds.rank * length, rounds.rank * length + len(own))
            addends = [own if rank == rounds.rank else rounds.theirs(rank, dtype)[place] for rank in ranks]
            combine(addends, reduction, rounds.mine(dtype)[most:][: len(own)])
        before = piece
    return True


def _slices(piece: Tensor, size: int, length: int) -> list[Tensor]:
    """``size`` slices of ``length``, of which the last ones may be shorter, or empty."""
    return [piece[rank * length : (rank + 1) * length] for rank in range(size)]


def _share(size: int) -> int:
    """Bytes of a half for one of ``size`` ranks."""
    return HALF_BYTES // size // LINE * LINE


def _require_equal(sent: Tensor, expected: Tensor, ranks: Sequence[int]) -> None:
    """Both (size, size) in bytes, by sender and receiver."""
    wrong = (sent != expected).nonzero().tolist()
    if wrong:
        source, destination = wrong[0]
        raise Desync(
            f"all_to_all: rank {ranks[source]} sends {sent[source, destination]} bytes to rank "
            f"{ranks[destination]}, which expects {expected[source, destination]}: what is an input split on "
            "one rank is an output split on another. Nothing was written"
        )
