"""The collectives: how bytes get from every rank to every rank that needs them.

*Through the shared segment*: each rank copies its tensor into its half, and the others read it there, in
pieces that fit into a half, one round per piece. So the segment stays in the processors' caches, and only the
tensors themselves travel to and from main memory. Bytes written to and read from the segment by one rank,
W ranks, x of S bytes: broadcast S at the root, S read by each other one; all-gather S, WS; all-to-all S, S;
reduce-scatter S, S; all-reduce S, WS at once, or S, (2 - 1/W) S by slices, which takes a round more.

*In place*, for sums, means and products of float32 and float64 in memory that all ranks have mapped: every
rank adds its slice.

    rank 0's tensor   | slice 0 | slice 1 |        rank 0 reads slice 0 of both, adds, writes it to both;
    rank 1's tensor   | slice 0 | slice 1 |        rank 1 does the same with slice 1

Nothing is copied in or out: W S bytes are read and W S written in all, the minimum for a result that every
rank holds. Two rounds: "my numbers are there", "my slice is done".

*Sums* (products, minima, ...) are made in the order of the ranks, rank 0's addend first, on whichever rank:
the same bits on every rank and in every run. Half-precision numbers are added in float32 and rounded once at
the end.

Sums, means and products of float32 and float64 are made in C, in smaller pieces of which two are in flight
(``native/core.c``).

Tensors are flat bytes (``arguments.writable``). Lists have one entry per group rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from instep.errors import Desync
from instep.memory import as_bytes
from instep.mesh.axes import round_up
from instep.native import library as native
from instep.shm.call import NOWHERE, Location, describe_call
from instep.shm.group_segment import HALF_BYTES, LINE
from instep.shm.heap import Heap
from instep.shm.rounds import Rounds

# Up to here every rank adds everything: one round, where slices take two.
AT_ONCE_BYTES = 32 << 10
# Of pieces that the native core makes.
AT_ONCE_SLOT_BYTES, SLICES_SLOT_BYTES = 512 << 10, 1 << 20
NATIVE = {"sum": native.ADD, "avg": native.ADD, "product": native.MULTIPLY}
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_NAMES = {getattr(dist.ReduceOp, name.upper()): name for name in COMBINE}


@dataclass
class Operation:
    """An operation on ``count`` elements of ``dtype`` per rank; its first round compares the ranks' calls."""

    rounds: Rounds
    heap: Heap
    name: str
    label: str  # in errors
    dtype: Any = ""
    count: int = 0
    reduction: str = ""
    root: int = -1
    location: Location = NOWHERE  # of this rank's tensor
    timeout_s: float | None = None
    locations: list[Location] = field(default_factory=list)  # of the ranks' tensors, after the first round

    def announce(self) -> None:
        """Announce the call to the other ranks, for the next round."""
        call = describe_call(self.name, self.dtype, self.count, self.reduction, self.root)
        self.rounds.announce(call, self.label, self.location)

    def synchronize(self) -> None:
        """Post the next round and wait until all ranks have."""
        if not self.locations:
            self.announce()
        self.rounds.synchronize(self.label, self.timeout_s)
        if not self.locations:
            self.locations = self.rounds.require_agreement(self.label)


def pieces(
    op: Operation, rows: Sequence[Tensor], num_rows: int, nbytes: int
) -> Iterator[tuple[slice, Callable[[int, int], Tensor]]]:
    """One round per piece of tensors of ``nbytes`` bytes, ``num_rows`` of which share a half.

    Writes this rank's ``rows``, and yields the slice of each tensor that the round carries, and ``read``:
    ``read(r, i)`` is that piece of row i of rank r.
    """
    rounds, most = op.rounds, HALF_BYTES // num_rows // LINE * LINE
    for start in range(0, max(nbytes, 1), most):
        piece = slice(start, min(start + most, nbytes))
        for i, row in enumerate(rows):
            part = row[piece]
            rounds.mine()[i * most :][: len(part)].copy_(part)
        op.synchronize()

        def read(rank: int, i: int, length: int = piece.stop - start) -> Tensor:
            return rounds.theirs(rank)[i * most :][:length]

        yield piece, read


def broadcast(op: Operation, outs: Sequence[Tensor]) -> None:
    """The tensor of the root overwrites that of every rank."""
    is_root = op.rounds.rank == op.root
    for piece, read in pieces(op, outs if is_root else (), 1, len(outs[0])):
        if not is_root:
            outs[0][piece].copy_(read(op.root, 0))


def all_gather(op: Operation, outs: Sequence[Tensor], *, x: Tensor) -> None:
    """``outs[r]`` receives the ``x`` of rank r. Ranks without ``outs`` only send.

    What all ranks have in shared memory is read there, after the round that carries the first piece.
    """
    own = as_bytes(x)
    results = {
        r: out for r, out in enumerate(_rows(outs, op.rounds.size)) if out.data_ptr() != own.data_ptr()
    }
    for piece, read in pieces(op, [own], 1, x.nbytes):
        if piece.stop < x.nbytes and NOWHERE not in op.locations:
            for rank, result in results.items():
                result.copy_(op.heap.map_peer(rank, op.locations[rank], op.label))
            op.synchronize()
            return
        for rank, result in results.items():
            result[piece].copy_(read(rank, 0))


def scatter(op: Operation, outs: Sequence[Tensor], *, xs: Sequence[Tensor]) -> None:
    """The tensor of rank r receives ``xs[r]`` of the root; the others pass no ``xs``."""
    for piece, read in pieces(op, [as_bytes(x) for x in xs], op.rounds.size, len(outs[0])):
        outs[0][piece].copy_(read(op.root, op.rounds.rank))


def all_to_all(
    op: Operation, outs: Sequence[Tensor], *, xs: Sequence[Tensor], splits: Sequence[list[int]] = ()
) -> None:
    """``outs[s]`` of rank d receives ``xs[d]`` of rank s; the lengths of the pairs may differ.

    With ``splits``, in bytes, both are one tensor: how it is cut for outputs, and for inputs.

    Raises:
        Desync: a rank expects another length than is sent to it; raised on every rank alike.
    """
    size, ranks, xs = op.rounds.size, op.rounds.ranks, [as_bytes(x) for x in xs]
    if splits:
        outs, xs = outs[0].split(splits[0]), xs[0].split(splits[1])
    own = torch.tensor([[len(x) for x in xs], [len(out) for out in outs]], device="cpu")
    table = own.new_empty(size, 2, size)  # by rank: bytes sent to each, bytes expected of each
    all_gather(op, [as_bytes(table)], x=own)
    for source, to in (table[:, 0] != table[:, 1].T).nonzero().tolist():
        raise Desync(
            f"all_to_all: rank {ranks[source]} sends {table[source, 0, to]} bytes to rank {ranks[to]}, which "
            f"expects {table[to, 1, source]}: what is an input split on one rank is an output split on "
            "another. Nothing was written"
        )
    for piece, read in pieces(op, xs, size, int(table.max())):
        for rank, out in enumerate(outs):
            part = out[piece]
            part.copy_(read(rank, op.rounds.rank)[: len(part)])


def reduce_scatter(op: Operation, outs: Sequence[Tensor], *, xs: Sequence[Tensor]) -> None:
    """The tensor of rank r receives the sum over all ranks of their ``xs[r]``."""
    size, rank = op.rounds.size, op.rounds.rank
    for piece, read in pieces(op, _rows([as_bytes(x) for x in xs], size), size, len(outs[0])):
        addends = [read(r, rank).view(op.dtype) for r in range(size)]
        combine(addends, op.reduction, outs[0][piece].view(op.dtype))


def all_reduce(op: Operation, outs: Sequence[Tensor]) -> None:
    """The tensor becomes the sum over the ranks; with a root, there alone."""
    rounds, (x,) = op.rounds, outs
    if op.location != NOWHERE:
        op.synchronize()
        if NOWHERE not in op.locations:
            _reduce_in_place(op)
            return
    if is_native(op.dtype, op.reduction, rounds.size):
        _reduce_natively(op, x)
        return
    for piece, read in pieces(op, outs, 1, len(x)):
        if op.root in (-1, rounds.rank):
            addends = [read(r, 0).view(op.dtype) for r in range(rounds.size)]
            combine(addends, op.reduction, x[piece].view(op.dtype))


def is_native(dtype: torch.dtype, reduction: str, size: int) -> bool:
    """Whether the native core makes the sum. (Minima of NaNs differ with torch's vector units.)"""
    return dtype in (torch.float32, torch.float64) and reduction in NATIVE and size <= native.MOST_RANKS


def _reduce_natively(op: Operation, x: Tensor) -> None:
    """In pieces whose rounds and sums are made in C; above 32 KiB by slices."""
    rounds, view, core = op.rounds, op.rounds.reduction, op.rounds.shared.core
    at_once = rounds.size <= 2 or len(x) <= AT_ONCE_BYTES
    view.type, view.how = native.TYPES[op.dtype.itemsize], NATIVE[op.reduction]
    view.finish, view.number = _finish(op)
    view.root, view.x, view.nbytes, view.by_slices = op.root, x.data_ptr(), len(x), not at_once
    view.slot_bytes = min(AT_ONCE_SLOT_BYTES if at_once else SLICES_SLOT_BYTES, HALF_BYTES // 2)
    view.compare = not op.locations
    found = native.SHARED
    while found == native.SHARED:
        view.rounds, view.at, view.stage = rounds.number, 0, 0
        if view.compare:
            op.announce()
        while (found := core.all_reduce(view, rounds.slice_ns(op.timeout_s))) == native.MISSING:
            rounds.await_all(op.label, view.rounds + view.at + 1, op.timeout_s)
        rounds.number = view.rounds
        if found == native.DIFFERENT:
            rounds.require_agreement(op.label)
        if found not in (native.THERE, native.SHARED):
            raise RuntimeError(f"{op.label}: the native core refused the reduction (code {found})")
        view.compare = False  # SHARED: a rank with its tensor in shared memory came without data
    if not x.is_inference():
        increment_version(x)


def _reduce_in_place(op: Operation) -> None:
    """The tensors at ``op.locations`` become their sum, after the first round."""
    rounds, size, itemsize = op.rounds, op.rounds.size, op.dtype.itemsize
    found = [op.heap.map_peer(r, place, op.label) for r, place in enumerate(op.locations)]
    own = own_slice(op.count, itemsize, rounds.rank, size)
    addresses = [x.data_ptr() + own.start * itemsize for x in found]
    pairs, length = tuple((0, rank) for rank in range(1, size)), own.stop - own.start
    how, finish = NATIVE[op.reduction], _finish(op)
    if not rounds.shared.core.add_up(addresses, pairs, 0, addresses, length, itemsize, how, finish):
        raise MemoryError(f"{op.label}: no memory is left to add {size} tensors")
    op.synchronize()


def _finish(op: Operation) -> tuple[int, float]:
    return (native.DIVIDED, float(op.rounds.size)) if op.reduction == "avg" else (native.NO_SCALE, 1.0)


def own_slice(num_elements: int, itemsize: int, rank: int, size: int) -> slice:
    """The slice of ``rank``; together they are everything, and no two share a cache line."""
    length = round_up(-(-num_elements * itemsize // size), LINE) // itemsize
    start = min(rank * length, num_elements)
    return slice(start, min(start + length, num_elements))


def map_all(op: Operation, tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
    """All ranks' ``tensors``, by rank, mapped into this process; None if one of them is private memory.

    Ranks may have different numbers of tensors, of any lengths, in one dtype.
    """
    rounds, places = op.rounds, [op.heap.address_of(x) for x in tensors]
    words = torch.tensor([len(places), *(word for place in places for word in place)], device="cpu")
    rounds.mine()[: words.nbytes].copy_(as_bytes(words))
    op.synchronize()
    by_rank = []
    for half in (rounds.theirs(rank).view(torch.int64) for rank in range(rounds.size)):
        table = half[1 : 1 + 4 * int(half[0])].view(-1, 4).tolist()
        by_rank.append([Location(*place) for place in table])
    if any(NOWHERE in places for places in by_rank):
        return None
    found = [
        [op.heap.map_peer(r, place, op.label).view(op.dtype) for place in places]
        for r, places in enumerate(by_rank)
    ]
    op.synchronize()  # no rank frees its tensors before all have mapped them
    return found


def reduction_name(opts: Any) -> str:
    """The name in ``COMBINE`` of the reduction in torch's options, by default a sum.

    Raises:
        TypeError: it is none of these.
    """
    if opts is None:
        return "sum"
    name = next((name for known, name in _NAMES.items() if opts.reduceOp == known), None)
    if name is None:
        raise TypeError(f"shm: expected a reduction out of {', '.join(COMBINE)}, got {opts.reduceOp}")
    return name


def combine(parts: Sequence[Tensor], name: str, out: Tensor) -> None:
    """``out`` = parts[0] o parts[1] o ..., all of one shape (n,) and dtype, in memory apart from ``out``."""
    wide = WIDER.get(out.dtype, out.dtype)
    total = out if wide is out.dtype else torch.empty_like(out, dtype=wide)
    total.copy_(parts[0])
    for part in parts[1:]:
        COMBINE[name](total, part.to(wide), out=total)
    if name == "avg":  # integers are cut off towards zero
        total.div_(len(parts), rounding_mode=None if wide.is_floating_point or wide.is_complex else "trunc")
    if total is not out:
        out.copy_(total)


def _rows(xs: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """``xs``, or if they are one tensor for all ranks its part of each."""
    return xs[0].view(size, -1).unbind() if len(xs) == 1 else xs
