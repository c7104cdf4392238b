"""One hash of the whole training state, however it is divided among ranks.

``state_sha256`` is the SHA-256 over, for parameters, persistent buffers, then optimizer moments by name,
and the step: name, dtype, shape, and the SHA-256 of each canonical block. Any rank that holds a block can
hash it, so a sharded state has the same hash as a replicated one. Like the bits, the hash depends on the kind
of CPU and on the library builds: compare hashes from one machine.

``SharedHash`` computes it from the shards that each rank owns. A state of S bytes costs S / W bytes of
hashing per rank and an exchange of 32 bytes per block of 4096 elements, 0.2 % of S. If shards cut blocks
(boxes of a matrix), the ranks first send those elements to the ranks that hash the blocks.

Hashing the whole state takes longer than a small step. Instead the blocks of all tensors are numbered, and
after step t those are hashed whose number b has (b + t) % k == 0:

    k = 3      b   0  1  2  3  4  5  6
    step 3         x        x        x
    step 4               x        x
    step 5            x        x

After k steps every block has been hashed once, so a persistent bit flip is found within k steps, at 1/k of
the cost. CRC-32 is enough for that: it detects every change within 32 consecutive bits, hence in one element,
in a third of the time of SHA-256. Against an adversary use ``state_sha256``.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest

import torch
from torch import Tensor

from instep.errors import CheckpointRejected
from instep.memory import as_bytes
from instep.net.process_group import Group
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.shards import Shard, put_box
from instep.state.stored import assemble, shards_from_json, shards_to_json

Described = tuple[str, str, Sequence[int], bytes]
"""A tensor's name, dtype as torch writes it, shape, and the SHA-256 of each of its blocks in a row."""
DIGEST_BYTES = 32
BEAT_BLOCKS = 64  # 1 MiB of float32
SHORT = 16  # hex digits of a hash that need not withstand an adversary
CRC_DIGITS = 8  # hexadecimal
Sampled = tuple[str, int, str]
"""A tensor's name, the number of a block in it, and its CRC-32 in hex."""
Ranges = Callable[[Shard], Iterable[tuple[int, int]]]
TABLE = "the table of who holds what of the state"
CUT_BLOCKS = "the exchange of blocks that shards cut"
HASHES = "the exchange of hashes of the state"
LIMIT_BYTES = 1 << 30
ROUND_BYTES = 4 << 20  # of elements of cut blocks that a rank receives at once


def canonical_bytes(x: Tensor) -> memoryview:
    """The bytes of ``x`` in logical order, all NaNs as one: a view where ``x`` is contiguous and on CPU."""
    x = x.detach().cpu()
    # The sum shows a NaN in a third of the time, and may show inf - inf; float8 has no sum.
    if x.is_floating_point() and torch.isnan(x if x.itemsize == 1 else x.sum()).any():
        x = torch.where(torch.isnan(x), torch.nan, x)
    return as_bytes(x).numpy().data


def block_digests(x: Tensor, beat: Callable[[], None] = lambda: None) -> bytes:
    """SHA-256 of every block of ``x`` in logical order, in a row; all NaNs count as one.

    ``beat`` is called every ``BEAT_BLOCKS``, to report progress.
    """
    data, found = canonical_bytes(x), []
    width = BLOCK_ELEMENTS * x.element_size()
    for number, start in enumerate(range(0, len(data), width)):
        if number % BEAT_BLOCKS == 0:
            beat()
        found.append(hashlib.sha256(data[start : start + width]).digest())
    return b"".join(found)


def tensor_digest(x: Tensor) -> bytes:
    """SHA-256 over dtype, shape and blocks of one tensor."""
    return hashlib.sha256(json.dumps([str(x.dtype), list(x.shape)]).encode() + block_digests(x)).digest()


def described(name: str, x: Tensor) -> Described:
    """``x`` with its blocks hashed, after which its values are no longer needed."""
    return name, str(x.dtype), x.shape, block_digests(x)


def state_digests(tensors: Iterable[Described], step: int) -> tuple[str, dict[str, str]]:
    """``state_sha256`` of ``tensors`` after ``step`` optimizer steps, and 16 hex digits of each by name."""
    whole, parts = hashlib.sha256(f"instep state 1 step {step}\n".encode()), {}
    for name, dtype, shape, digests in tensors:
        data = json.dumps([name, dtype, list(shape)]).encode() + b"\n" + digests
        whole.update(data)
        parts[name] = hashlib.sha256(data).hexdigest()[:SHORT]
    return whole.hexdigest(), parts


class HashTable:
    """Assigns the blocks of a state to the ranks that hash them; ``by_rank`` has the shards of each rank.

    A rank hashes its own shards. If shards of a tensor cut blocks, each rank that holds a part of the tensor
    hashes a run of its blocks, after an exchange of the missing elements (``complete``).

    Raises:
        error: the shards do not form one complete state.
    """

    def __init__(
        self,
        by_rank: Sequence[Sequence[Shard]],
        ranks: Sequence[int] = (),
        error: type[Exception] = CheckpointRejected,
    ) -> None:
        self._held = [{x.name: x for x in shards if x.order is not None} for shards in by_rank]
        places = (f"rank {rank}" for rank in ranks or range(len(by_rank)))
        held = {place: [*its.values()] for place, its in zip(places, self._held, strict=True)}
        self._tensors = assemble(held, error)
        self._numbers, before = dict[str, int](), 0  # of each tensor's first block, among all
        for name, stored in self._tensors.items():
            self._numbers[name], before = before, before - -stored.numel // BLOCK_ELEMENTS
        cut = {x.name for its in self._held for x in its.values() if x.cuts_blocks}
        self.cut = {name: self._runs(name) for name in self._tensors if name in cut}  # by name, by rank
        self.hashed = [
            [x for x in its.values() if x.name not in cut]
            + [runs[rank] for runs in self.cut.values() if runs[rank].first < runs[rank].last]
            for rank, its in enumerate(self._held)
        ]

    def _runs(self, name: str) -> list[Shard]:
        """The run of blocks of a cut tensor that each rank hashes, perhaps none."""
        holders = [name in its for its in self._held]
        x = next(its[name] for its in self._held if name in its)
        numel = math.prod(x.shape)
        count, edges = -(-numel // BLOCK_ELEMENTS), [0, *accumulate(holders)]
        ends = [min(edge * count // edges[-1] * BLOCK_ELEMENTS, numel) for edge in edges]
        return [x._replace(first=first, last=last, box=None) for first, last in pairwise(ends)]

    def complete(
        self, group: Group, own: Iterable[Shard], ranges: Ranges = lambda x: [(x.first, x.last)]
    ) -> Iterator[Shard]:
        """The shards that this rank hashes, with values, those of cut tensors in pieces. Collective if shards
        cut blocks, until the last one.

        Of cut tensors only ``ranges`` of the whole tensor are exchanged, about ``ROUND_BYTES`` per rank at a
        time: this is the memory that an exchange takes, however large the state is.
        """
        known = {x.name: x for x in own}
        yield from (known[x.name] for x in self.hashed[group.rank] if x.name not in self.cut)
        for pieces in self._rounds(ranges):
            yield from self._completed(group, known, pieces)

    def _rounds(self, ranges: Ranges) -> Iterator[list[list[Shard]]]:
        """The pieces that each rank hashes after each exchange; all ranks find the same."""
        pieces: list[list[Shard]] = [[] for _ in self._held]
        num_bytes = 0
        for runs in self.cut.values():
            for at_once in zip_longest(*(_pieces(x, ranges) for x in runs)):
                for its, x in zip(pieces, at_once, strict=True):
                    if x is not None:
                        its.append(x)
                        num_bytes += (x.last - x.first) * x.dtype.itemsize
                if num_bytes >= ROUND_BYTES * len(pieces):
                    yield pieces
                    pieces, num_bytes = [[] for _ in pieces], 0
        if num_bytes:
            yield pieces

    def _completed(
        self, group: Group, own: dict[str, Shard], pieces: Sequence[Sequence[Shard]]
    ) -> Iterator[Shard]:
        """This rank's ``pieces`` with values, from what ranks have ``own``. Collective."""
        sent = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        to, source = [], []
        for theirs in pieces:
            of = [(own[x.name], x) for x in theirs if x.name in own]
            parts = [as_bytes(has.part(*has.within(x.first, x.last)).tensor).cpu() for has, x in of]
            sent += parts
            to.append(sum(map(len, parts)))
        come = []  # what of each piece comes from a rank, from rank to rank
        for held in self._held:
            of = [(held[x.name], x) for x in pieces[group.rank] if x.name in held]
            its = [(x, has.box, *has.within(x.first, x.last)) for has, x in of]
            source.append(sum((end - begin) * x.dtype.itemsize for x, _, begin, end in its))
            come += its
        out = torch.empty(sum(source), dtype=torch.uint8, device="cpu")
        group.all_to_all(out, torch.cat(sent), source, to, CUT_BLOCKS)
        del sent
        whole = [
            x._replace(tensor=torch.empty(x.last - x.first, dtype=x.dtype, device="cpu"))
            for x in pieces[group.rank]
        ]
        tensors = {(x.name, x.first): x.tensor for x in whole}
        parts = out.split([(end - begin) * x.dtype.itemsize for x, _, begin, end in come])
        for (x, box, begin, end), data in zip(come, parts, strict=True):
            put_box(tensors[x.name, x.first], x.first, data, x.shape, box, begin, end)
        yield from whole

    def digests(self, told: Sequence[bytes], step: int) -> tuple[str, dict[str, str]]:
        """``state_digests`` of the state, from the ``own_digests`` of each rank."""
        found: dict[str, list[tuple[int, bytes]]] = {}
        for shards, data in zip(self.hashed, told, strict=True):
            begin = 0
            for x in shards:
                end = begin + len(x.blocks) * DIGEST_BYTES
                found.setdefault(x.name, []).append((x.first, data[begin:end]))
                begin = end
            if begin != len(data):
                raise CheckpointRejected(
                    f"expected {begin} bytes of digests, got {len(data)}: take another checkpoint"
                )
        return state_digests(
            (
                (bare(name), str(x.dtype), x.shape, b"".join(data for _, data in sorted(found[name])))
                for name, x in self._tensors.items()
            ),
            step,
        )

    def due(self, x: Shard, step: int, every: int) -> range:
        """The blocks of ``x`` that are sampled at ``step``."""
        blocks = x.blocks
        return blocks[-(step + self._numbers[x.name] + blocks.start) % every :: every]

    def samples(self, told: Sequence[bytes], step: int, every: int) -> list[Sampled]:
        """The sampled blocks in order, from the CRCs of each rank."""
        found = []
        for shards, data in zip(self.hashed, told, strict=True):
            due = ((x.name, block) for x in shards for block in self.due(x, step, every))
            for i, (name, block) in enumerate(due):
                crc = data[i * CRC_DIGITS : (i + 1) * CRC_DIGITS].decode()
                found.append((self._numbers[name] + block, (bare(name), block, crc)))
        return [sampled for _, sampled in sorted(found)]


class SharedHash:
    """Hashes a state that is divided among the ranks of ``group``; each rank passes the shards it owns.

    All ranks keep the same ``HashTable``. It is rebuilt when the shards of any rank have changed, for example
    when the first step creates the moments; every message carries a flag for that.

    ``enter`` is called with the phases that this rank enters, "hash" and "gather", and ``beat`` to report
    progress.

    Raises:
        ValueError: in each call, on every rank, if what they own is not one whole state.
    """

    def __init__(
        self,
        group: Group,
        enter: Callable[[str], None] = lambda phase: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._group, self._enter, self._beat = group, enter, beat
        self._layout: list[tuple[object, ...]] | None = None  # of this rank's shards in the table
        self._table = HashTable([()] * group.size)

    def digests(self, owned: Sequence[Shard], step: int) -> tuple[str, dict[str, str]]:
        """The hash of all that the ranks own together, and 16 hex digits of each tensor. Collective."""
        told = self._exchange(owned, lambda mine: own_digests(mine, self._beat))
        return self._table.digests(told, step)

    def samples(self, owned: Sequence[Shard], step: int, every: int) -> list[Sampled]:
        """The CRCs of the blocks sampled after ``step``, one in ``every``. Collective.

        Only these blocks are read (of a tensor that is not contiguous, their rows).
        """

        def own(mine: Iterable[Shard]) -> bytes:
            return "".join(_crc(x, ends) for x in mine for ends in ranges(x)).encode()

        def ranges(x: Shard) -> Iterator[tuple[int, int]]:
            for block in self._table.due(x, step, every):
                yield block * BLOCK_ELEMENTS, min((block + 1) * BLOCK_ELEMENTS, x.last)

        told = self._exchange(owned, own, ranges)
        return self._table.samples(told, step, every)

    def _exchange(
        self,
        owned: Sequence[Shard],
        own: Callable[[Iterable[Shard]], bytes],
        ranges: Ranges = lambda x: [(x.first, x.last)],
    ) -> list[bytes]:
        """``own(shards it hashes)`` of every rank, after rebuilding an outdated table."""
        mine = [x for x in owned if x.order is not None]
        layout = [x.layout for x in mine]
        known, at_once = layout == self._layout, not self._table.cut
        told = self._gather(bytes([known]) + (own(mine) if known and at_once else b""))
        if not all(data[0] for data in told):
            message = json.dumps(shards_to_json(mine)).encode()
            everyone = self._group.all_gather_bytes(message, TABLE)
            by_rank = [shards_from_json(json.loads(data)) for data in everyone]
            self._table, self._layout = HashTable(by_rank, self._group.ranks, ValueError), layout
            self._enter("hash")
        elif at_once:
            return [data[1:] for data in told]
        return self._gather(own(self._table.complete(self._group, mine, ranges)))

    def _gather(self, mine: bytes) -> list[bytes]:
        self._enter("gather")
        return self._group.all_gather_bytes(mine, HASHES, limit=LIMIT_BYTES)


def own_digests(hashed: Iterable[Shard], beat: Callable[[], None] = lambda: None) -> bytes:
    """The concatenated digests of all blocks of ``hashed``."""
    return b"".join(block_digests(x.tensor, beat) for x in hashed)


def _pieces(x: Shard, ranges: Ranges) -> Iterator[Shard]:
    """The elements of a run that are in ``ranges``, at most ``ROUND_BYTES`` in each piece."""
    length = ROUND_BYTES // x.dtype.itemsize // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    for begin, end in ranges(x) if x.first < x.last else ():
        for first in range(begin, end, length):
            yield x._replace(first=first, last=min(first + length, end))


def bare(name: str) -> str:
    """The name of a tensor of the state in the hash: without its kind."""
    return name.partition(":")[2] or name


def _crc(x: Shard, ends: tuple[int, int]) -> str:
    return f"{zlib.crc32(canonical_bytes(x.part(*ends).tensor)):08x}"
