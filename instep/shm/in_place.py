"""Reducing where the numbers are: every rank adds its slice of memory that all of them have mapped.

    rank 0's tensor   | slice 0 | slice 1 |        rank 0 reads slice 0 of both, adds, writes it to both;
    rank 1's tensor   | slice 0 | slice 1 |        rank 1 does the same with slice 1

Nothing is copied in or out: S bytes per rank, W ranks, W S are read and W S written, in all. That is the
least there is for a result that every rank holds. Two rounds: "my numbers are there", "my slice is done".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES
from instep.shm.call import LOCATION_BYTES, NOWHERE, Location
from instep.shm.collectives import Turn, pieces
from instep.shm.heap import Heap
from instep.shm.room import LINE
from instep.shm.rounds import reaching
from instep.shm.sums import combine


def all_reduce(turn: Turn, heap: Heap, dtype: torch.dtype, reduction: str) -> None:
    """The tensors at ``turn.locations`` become their sum; the ranks have met once already."""
    rank, size = turn.rounds.rank, turn.rounds.size
    tensors = [_reach(turn, heap, r, place, dtype) for r, place in enumerate(turn.locations)]
    for piece in own_pieces(tensors[0].numel(), dtype.itemsize, rank, size):
        parts = [x[piece] for x in tensors]
        combine(parts, reduction, parts[0])
        for other in parts[1:]:
            other.copy_(parts[0])
    turn.meet()


def own_pieces(num_elements: int, itemsize: int, rank: int, size: int) -> Iterator[slice]:
    """The slice of ``rank``, in pieces: all slices together are everything, and share no cache line."""
    lines = -(-num_elements * itemsize // LINE)
    length = -(-lines // size) * LINE // itemsize
    start = min(rank * length, num_elements)
    own = min(length, num_elements - start)
    for begin, end in pieces(own, PIECE_BYTES // itemsize):
        yield slice(start + begin, start + end)


def expose(turn: Turn, heap: Heap, tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
    """All ranks' ``tensors``, by rank, as this rank reaches them; None if one of them is private memory.

    The ranks may have different numbers of them, of any length, in one dtype.
    """
    rounds = turn.rounds
    mine = [heap.locate(x) for x in tensors]
    data = len(mine).to_bytes(8, "little") + b"".join(place.to_bytes() for place in mine)
    rounds.mine()[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    turn.meet()
    everybody = [_read(rounds.theirs(r)) for r in range(rounds.size)]
    if any(place == NOWHERE for places in everybody for place in places):
        return None
    dtype = tensors[0].dtype
    return [[_reach(turn, heap, r, place, dtype) for place in places] for r, places in enumerate(everybody)]


def _reach(turn: Turn, heap: Heap, rank: int, place: Location, dtype: torch.dtype) -> Tensor:
    with reaching(turn.rounds.room, turn.rounds.peers, rank, turn.label):
        return heap.resolve(rank, place).view(dtype)


def _read(half: Tensor) -> list[Location]:
    count = int(half[:8].view(torch.int64))
    data = half[8 : 8 + count * LOCATION_BYTES].numpy().tobytes()
    return [Location.from_bytes(data[i * LOCATION_BYTES :]) for i in range(count)]
