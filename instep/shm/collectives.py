"""The collectives: how numbers get from every rank to every rank that needs them.

*Through the shared segment*, for ordinary tensors: copied into the rank's half, read from there by each rank
that needs them. All of them walk through their tensors in pieces that fit into a half, one round per piece,
so the segment stays in the processors' caches and only the tensors themselves travel to and from main memory.
Bytes written to and read from the segment by one rank, W ranks, x of S bytes: broadcast S at the root, S read
by each other one; all-gather S, WS; all-to-all S, S; reduce-scatter S, S; all-reduce S, WS at once, or
S, (2 - 1/W) S by slices, which takes a round more.

*In place*, for tensors in memory that all ranks have mapped: every rank adds its slice.

    rank 0's tensor   | slice 0 | slice 1 |        rank 0 reads slice 0 of both, adds, writes it to both;
    rank 1's tensor   | slice 0 | slice 1 |        rank 1 does the same with slice 1

Nothing is copied in or out: S bytes per rank, W ranks, W S are read and W S written, in all. That is the
least there is for a result that every rank holds. Two rounds: "my numbers are there", "my slice is done".

*Sums* (products, minima, ...) are made in the order of the ranks: rank 0's addend comes first, then rank 1's,
and so on, on whichever rank and however fast: the same bits on every rank and in every run. Half-precision
numbers are added in float32 and rounded once at the end.

Sums, means and products of float32 and float64 are made in C, in smaller pieces of which two are under way
(``native/core.c``). All-reduces of other dtypes and operations add at once.

Tensors are flat and contiguous. Lists have one entry per group rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from instep.errors import Desync
from instep.memory import PIECE_BYTES, tensor_of
from instep.native.library import ADD, DIVIDED, MOST_RANKS, MULTIPLY, NO_SCALE, TYPES, Pairs
from instep.shm.arguments import dtype_name, flat_bytes
from instep.shm.call import LOCATION_BYTES, NOWHERE, Call, Location
from instep.shm.group_segment import HALF_BYTES, LINE, WORD
from instep.shm.heap import Heap
from instep.shm.rounds import Rounds, reaching

# Up to here every rank adds everything: one round, where slices take two.
AT_ONCE_BYTES = 32 << 10
# Of pieces that the native core makes.
AT_ONCE_SLOT_BYTES, SLICES_SLOT_BYTES = 512 << 10, 1 << 20
NATIVE = {"sum": ADD, "avg": ADD, "product": MULTIPLY}
NATIVE_DTYPES = (torch.float32, torch.float64)


class Operation:
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


def broadcast(op: Operation, x: Tensor, root: int) -> None:
    """``x`` (n,) of ``root`` overwrites that of every rank."""
    rounds, data = op.rounds, flat_bytes(x)
    for start, end in pieces(data.numel(), HALF_BYTES):
        if rounds.rank == root:
            rounds.mine()[: end - start].copy_(data[start:end])
        op.meet()
        if rounds.rank != root:
            data[start:end].copy_(rounds.theirs(root)[: end - start])


def all_gather(op: Operation, outs: Sequence[Tensor], x: Tensor) -> None:
    """``outs[r]`` (n,) receives the ``x`` (n,) of rank r. Ranks with no ``outs`` only give."""
    rounds, data = op.rounds, flat_bytes(x)
    results = [flat_bytes(out) for out in outs]
    for start, end in pieces(data.numel(), HALF_BYTES):
        rounds.mine()[: end - start].copy_(data[start:end])
        op.meet()
        for rank, result in enumerate(results):
            result[start:end].copy_(rounds.theirs(rank)[: end - start])


def scatter(op: Operation, out: Tensor, xs: Sequence[Tensor], root: int) -> None:
    """``out`` (n,) of rank r receives ``xs[r]`` (n,) of ``root``; the others pass no ``xs``."""
    rounds, result = op.rounds, flat_bytes(out)
    most = _share(rounds.size)
    parts = [flat_bytes(x) for x in xs]
    for start, end in pieces(result.numel(), most):
        for rank, part in enumerate(parts):
            rounds.mine()[rank * most :][: end - start].copy_(part[start:end])
        op.meet()
        result[start:end].copy_(rounds.theirs(root)[rounds.rank * most :][: end - start])


def all_to_all(op: Operation, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """``outs[s]`` of rank d receives ``xs[d]`` of rank s; the lengths of the pairs may differ.

    Raises:
        Desync: a rank expects another length than is sent to it; raised on every rank alike.
    """
    rounds, size = op.rounds, op.rounds.size
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
        op.meet()
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


def reduce_scatter(op: Operation, out: Tensor, xs: Sequence[Tensor], reduction: str) -> None:
    """``out`` (n,) of rank r receives the sum over all ranks of their ``xs[r]`` (n,)."""
    rounds, dtype = op.rounds, out.dtype
    most = _share(rounds.size) // dtype.itemsize
    for start, end in pieces(out.numel(), most):
        mine = rounds.mine(dtype)
        for rank, x in enumerate(xs):
            mine[rank * most :][: end - start].copy_(x[start:end])
        op.meet()
        place = slice(rounds.rank * most, rounds.rank * most + end - start)
        addends = [rounds.theirs(r, dtype)[place] for r in range(rounds.size)]
        combine(addends, reduction, out[start:end])


def all_reduce(op: Operation, x: Tensor, reduction: str, root: int | None = None) -> None:
    """``x`` (n,) becomes the sum over the ranks; with a ``root``, there alone."""
    if _is_native(x.dtype, reduction) and op.rounds.size <= MOST_RANKS:
        _reduce_natively(op, x, reduction, root)
        return
    # A rank whose tensor lies in shared memory came to the first round without data. It has the others begin
    # again, all of whom see where each tensor lies.
    if not _reduce_at_once(op, x, reduction, root, not op.locations):
        _reduce_at_once(op, x, reduction, root, False)


def _reduce_natively(op: Operation, x: Tensor, reduction: str, root: int | None) -> None:
    """The same in smaller pieces, whose rounds and sums are made in C; above 32 KiB by slices."""
    rounds, view, itemsize = op.rounds, op.rounds.reduction, x.dtype.itemsize
    at_once = rounds.size <= 2 or x.numel() * itemsize <= AT_ONCE_BYTES
    view.type, view.how = TYPES[itemsize], NATIVE[reduction]
    view.finish, view.number = _finish(reduction, rounds.size)
    view.root = -1 if root is None else root
    view.x, view.nbytes = x.data_ptr(), x.numel() * itemsize
    view.by_slices = not at_once
    view.slot_bytes = min(AT_ONCE_SLOT_BYTES if at_once else SLICES_SLOT_BYTES, HALF_BYTES // 2)
    view.compare = not op.locations
    while not rounds.reduce(op.call, op.label, op.timeout_s):
        view.compare = False  # a rank came without data: once more, all of them
    if not x.is_inference():
        increment_version(x)


def _reduce_at_once(op: Operation, x: Tensor, reduction: str, root: int | None, begins: bool) -> bool:
    """Every rank adds everything. False: nothing was done, because a rank came without data."""
    rounds, dtype = op.rounds, x.dtype
    for start, end in pieces(x.numel(), HALF_BYTES // dtype.itemsize):
        rounds.mine(dtype)[: end - start].copy_(x[start:end])
        op.meet()
        if begins and not op.all_private():
            return False
        if root in (None, rounds.rank):
            addends = [rounds.theirs(r, dtype)[: end - start] for r in range(rounds.size)]
            combine(addends, reduction, x[start:end])
    return True


def pieces(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``length`` into (start, end) no longer than ``most``; one empty piece if there is nothing."""
    for start in range(0, max(length, 1), most):
        yield start, min(start + most, length)


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


def all_reduce_in_place(op: Operation, heap: Heap, dtype: torch.dtype, reduction: str) -> None:
    """The tensors at ``op.locations`` become their sum; the ranks have met once already."""
    rank, size = op.rounds.rank, op.rounds.size
    own = own_slice(op.locations[0].nbytes // dtype.itemsize, dtype.itemsize, rank, size)
    if not _combined_natively(op, heap, own, dtype, reduction):
        tensors = [
            map_peer(op.rounds, heap, r, [x], dtype, op.label)[0][own] for r, x in enumerate(op.locations)
        ]
        for start, end in pieces(own.stop - own.start, PIECE_BYTES // dtype.itemsize):
            parts = [x[start:end] for x in tensors]
            combine(parts, reduction, parts[0])
            for other in parts[1:]:
                other.copy_(parts[0])
    op.meet()


def _combined_natively(op: Operation, heap: Heap, own: slice, dtype: torch.dtype, reduction: str) -> bool:
    """The same in one pass over memory; False: nothing was done."""
    native, size = op.rounds.shared.core, op.rounds.size
    if not _is_native(dtype, reduction) or size == 1:
        return False
    try:
        addresses = [
            heap.address(r, place) + own.start * dtype.itemsize for r, place in enumerate(op.locations)
        ]
    except OSError:
        return False  # who it was that could not be reached is said where tensors are
    pairs, length = _in_rank_order(size), own.stop - own.start
    finish = _finish(reduction, size)
    return native.add_up(addresses, pairs, 0, addresses, length, dtype.itemsize, NATIVE[reduction], finish)


@lru_cache(maxsize=64)
def _in_rank_order(size: int) -> Pairs:
    return tuple((0, rank) for rank in range(1, size))


def _finish(reduction: str, size: int) -> tuple[int, float]:
    return (DIVIDED, float(size)) if reduction == "avg" else (NO_SCALE, 1.0)


def _is_native(dtype: torch.dtype, reduction: str) -> bool:
    """Minima and maxima of numbers that are none have other bits in torch's vectors than beside them."""
    return dtype in NATIVE_DTYPES and reduction in NATIVE


def own_slice(num_elements: int, itemsize: int, rank: int, size: int) -> slice:
    """The slice of ``rank``: all slices together are everything, and share no cache line."""
    lines = -(-num_elements * itemsize // LINE)
    length = -(-lines // size) * LINE // itemsize
    start = min(rank * length, num_elements)
    return slice(start, min(start + length, num_elements))


def map_all(op: Operation, heap: Heap, tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
    """All ranks' ``tensors``, by rank, as this rank reaches them; None if one of them is private memory.

    The ranks may have different numbers of them, of any length, in one dtype.
    """
    mine = [heap.address_of(x) for x in tensors]
    data = len(mine).to_bytes(8, "little") + b"".join(place.to_bytes() for place in mine)
    told = tensor_of(data, torch.uint8)
    op.rounds.mine()[: len(told)].copy_(told)
    op.meet()
    by_rank = [_read(half) for half in op.rounds.everyones()]
    if any(NOWHERE in places for places in by_rank):
        return None
    dtype = tensors[0].dtype
    found = [map_peer(op.rounds, heap, r, places, dtype, op.label) for r, places in enumerate(by_rank)]
    op.meet()  # no rank frees its tensors before all have mapped them
    return found


def map_peer(
    rounds: Rounds, heap: Heap, rank: int, places: Sequence[Location], dtype: torch.dtype, label: str
) -> list[Tensor]:
    """What group rank ``rank`` has at ``places``, as this rank reaches it.

    Raises:
        PeerLost: it is gone, with its rank.
    """
    with reaching(rounds.shared, rounds.peers, rank, label):
        return [heap.resolve(rank, place).view(dtype) for place in places]


def _read(half: Tensor) -> list[Location]:
    count = int(half[:8].view(torch.int64))
    data = half[8 : 8 + count * LOCATION_BYTES].numpy().tobytes()
    return [Location.from_bytes(data[i * LOCATION_BYTES :]) for i in range(count)]


def all_reduce_sparse(op: Operation, x: Tensor) -> None:
    """``x`` (COO) becomes the sum over the ranks, coalesced.

    Every rank gathers all ranks' entries, and adds those of equal place. Three gathers: how many entries,
    their places, their values; padded to the longest.
    """
    own = x.detach().coalesce()
    size = op.rounds.size
    counts = _gather_all(op, torch.tensor([own._nnz()], device="cpu"), size)
    longest = max(int(count) for count in counts)

    def padded(part: Tensor) -> Tensor:
        whole = part.new_zeros((longest, *part.shape[1:]))
        whole[: len(part)] = part
        return whole

    places = _gather_all(_then(op, own.indices()), padded(own.indices().T.contiguous()), size)
    values = _gather_all(_then(op, own.values()), padded(own.values()), size)
    entries = range(size)
    total = torch.sparse_coo_tensor(
        torch.cat([places[r][: int(counts[r])] for r in entries]).T,
        torch.cat([values[r][: int(counts[r])] for r in entries]),
        x.shape,
    ).coalesce()
    if op.call.reduction == "avg":
        total = total / size
    x.copy_(total)  # not of a detached alias: that one would get the new entries alone


def _gather_all(op: Operation, x: Tensor, size: int) -> list[Tensor]:
    outs = [torch.empty_like(x) for _ in range(size)]
    all_gather(op, outs, x)
    return outs


def _then(op: Operation, x: Tensor) -> Operation:
    """The gather of ``x`` that follows ``op``."""
    return Operation(op.rounds, Call("all_gather", dtype_name(x)), op.label, timeout_s=op.timeout_s)


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


def reduction_name(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> str:
    """The name of a torch reduction in ``COMBINE``.

    Raises:
        TypeError: it is none of these, or not defined for ``dtype``.
    """
    name = next((name for known, name in _NAMES.items() if op == known), None)
    if name is None:
        raise TypeError(f"shm: expected a reduction out of {', '.join(COMBINE)}, got {op}")
    if name in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"shm: {name} is defined for integers and bool, got {dtype}")
    if name in ("min", "max") and dtype.is_complex:
        raise TypeError(f"shm: complex numbers have no {name}")
    if name == "avg" and dtype is torch.bool:
        raise TypeError("shm: the average of bool is not a bool")
    return name


def combine(parts: Sequence[Tensor], name: str, out: Tensor) -> None:
    """``out`` = parts[0] o parts[1] o ..., all of one shape (n,) and dtype; ``out`` may be one of them."""
    wide = WIDER.get(out.dtype)
    if len(parts) == 1 or wide is None:
        _fold(parts, name, out)
        return
    total = parts[0].to(wide)
    _fold([total, *(part.to(wide) for part in parts[1:])], name, total)
    out.copy_(total)


def _fold(parts: Sequence[Tensor], name: str, out: Tensor) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    function = COMBINE[name]
    # The first addend may be overwritten, but no later one before it has been read.
    total = out if all(out.data_ptr() != part.data_ptr() for part in parts[2:]) else torch.empty_like(out)
    function(parts[0], parts[1], out=total)
    for part in parts[2:]:
        function(total, part, out=total)
    if name == "avg":
        _mean(total, len(parts))
    if total is not out:
        out.copy_(total)


def _mean(total: Tensor, count: int) -> None:
    """Divide a sum of ``count`` addends; integers are cut off towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
