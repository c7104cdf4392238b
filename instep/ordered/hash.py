"""One hash of all that training carries from step to step, however it is divided among ranks.

``state_sha256`` is the SHA-256 over, for parameters, persistent buffers, then optimizer moments by name,
and the step: name, dtype, shape, and the SHA-256 of each canonical block. A rank that has a block can hash
it, so a sharded state has the hash of a replicated one. It depends on the kind of CPU and on the builds of
the libraries, as the bits do: compare hashes of one machine.

``SharedHash`` forms it from what each rank owns, one rank or all: S bytes of state take S / W bytes of
hashing per rank, then 32 bytes per block of 4096 elements travel, 0.2 % of S.

Hashing the whole state takes longer than a small step. Instead the blocks of all tensors are numbered
through, and after step t those are hashed whose number b has (b + t) % k == 0:

    k = 3      b   0  1  2  3  4  5  6
    step 3         x        x        x
    step 4               x        x
    step 5            x        x

After k steps each block has had its turn, so a flipped bit that stays is found within k steps, at 1/k of the
price. CRC-32 is enough for that: it sees every change within 32 bits in a row, so of one element, and takes a
third of the time of SHA-256; against an adversary there is ``state_sha256``.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.errors import CheckpointRejected
from instep.memory import as_bytes
from instep.mesh.process_group import Group
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.shards import Row, Shard
from instep.ordered.stored import StoredTensor, assemble, rows_from_json, rows_to_json

Entry = tuple[str, Tensor]
Described = tuple[str, str, Sequence[int], bytes]
"""An entry's name, dtype as torch writes it, shape, and the SHA-256 of each of its blocks in a row."""
DIGEST_BYTES = 32
BEAT_BLOCKS = 64  # 1 MiB of float32
SHORT = 16  # hex digits of a hash that need not withstand an adversary
CRC_DIGITS = 8  # hexadecimal
Span = tuple[int, int, int, str, int]
"""The number of the first block among all, how many blocks there are, the shard's place among those of its
rank, the tensor's name, and the number of the first block in it."""
Sampled = tuple[str, int, str]
"""A tensor's name, the number of a block in it, and its CRC-32 in hex."""
TABLE = "the table of who holds what of the state"
HASHES = "the exchange of hashes of the state"
LIMIT_BYTES = 1 << 30
MARK_BYTES = 16


def canonical_bytes(x: Tensor) -> memoryview:
    """The bytes of ``x`` in logical order, all NaNs as one: a view where ``x`` is contiguous and on CPU."""
    x = x.detach().cpu()
    if x.is_floating_point() and _may_have_nan(x):
        x = torch.where(torch.isnan(x), torch.nan, x)
    return as_bytes(x).numpy().data


def _may_have_nan(x: Tensor) -> bool:
    if x.itemsize == 1:  # float8 has no sum
        return bool(torch.isnan(x).any())
    return math.isnan(x.sum().item())  # in a third of the time; so is inf - inf


def block_digests(x: Tensor) -> Iterator[bytes]:
    """SHA-256 of every block of ``x`` in logical order; all NaNs count as one."""
    data = canonical_bytes(x)
    width = BLOCK_ELEMENTS * x.element_size()
    for start in range(0, len(data), width):
        yield hashlib.sha256(data[start : start + width]).digest()


def state_entries(module: nn.Module, optimizer: Optimizer | None = None) -> list[Entry]:
    """Parameters, persistent buffers, moments, each with its name, in the order of the manifest.

    Registration order; tied parameters once. A moment is called "moment/parameter name".
    """
    parameters = list(module.named_parameters())
    entries: list[Entry] = [(name, p) for name, p in parameters]
    entries += persistent_buffers(module)
    if optimizer is not None:
        for name, p in parameters:
            moments = optimizer.state.get(p, {})
            entries += [
                (f"{key}/{name}", moments[key]) for key in sorted(moments) if torch.is_tensor(moments[key])
            ]
    return entries


def persistent_buffers(module: nn.Module) -> list[Entry]:
    """The buffers that a state dict carries, by name, in registration order."""
    buffers = list(module.named_buffers())
    kept = module.state_dict(keep_vars=True) if buffers else {}
    return [(name, b) for name, b in buffers if name in kept]


def state_sha256(entries: Iterable[Entry], step: int) -> str:
    """Hex digest of ``entries`` after ``step`` optimizer steps."""
    return state_digests(entries, step)[0]


def state_digests(entries: Iterable[Entry], step: int) -> tuple[str, dict[str, str]]:
    """``state_sha256`` and, by name, what ``entry_digests`` gives: every block is hashed once."""
    return described_digests(_described(entries), step)


def entry_digests(entries: Iterable[Entry]) -> dict[str, str]:
    """16 hex digits of each entry's SHA-256, by its name: which part of a state is another."""
    return {one[0]: _short(_to_hash(one)) for one in _described(entries)}


def described_digests(described: Iterable[Described], step: int) -> tuple[str, dict[str, str]]:
    """``state_digests`` of entries whose blocks are hashed already."""
    whole, parts = hashlib.sha256(f"instep state 1 step {step}\n".encode()), {}
    for one in described:
        data = _to_hash(one)
        whole.update(data)
        parts[one[0]] = _short(data)
    return whole.hexdigest(), parts


def whole_sha256(described: Iterable[Described], step: int) -> str:
    """``state_sha256`` of entries whose blocks are hashed already."""
    return described_digests(described, step)[0]


def described(name: str, x: Tensor) -> Described:
    """``x`` with its blocks hashed, after which it is not needed any more."""
    return name, str(x.dtype), x.shape, b"".join(block_digests(x))


def _described(entries: Iterable[Entry]) -> Iterator[Described]:
    return (described(name, x) for name, x in entries)


def _to_hash(described: Described) -> bytes:
    """What a hash has to know of an entry."""
    name, dtype, shape, digests = described
    return json.dumps([name, dtype, list(shape)]).encode() + b"\n" + digests


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:SHORT]


class SharedHash:
    """The hashes of a state that the ranks of ``group`` hold together, each what it owns of it (``owned``).

    Which rank answers for what stands in a table, which is the same on all ranks and changes only with the
    shards, as when the first step makes the moments. So the table is kept, and with each message comes a mark
    of what its rank owns: if one is another than when the table was made, all make it again.

    ``enter`` is told the phases that this rank enters: "hash" and "gather"; ``beat`` that it goes on hashing.

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
        self._marks: list[bytes] = []  # by rank, of what the table was made from
        self._mine: Sequence[Shard] = ()  # what this rank has owned in the call before
        self._layout: Sequence[tuple[object, ...]] = ()  # of what this rank owned when it was described
        self._described = self._mark = b""
        self._spans: list[list[Span]] = []  # by rank, in the order of their numbers
        self._begins: list[list[int]] = []  # of each span
        self._num_blocks = 0  # of all ranks
        self._table: dict[str, StoredTensor] = {}
        self._by_rank: list[list[Row]] = []

    def digests(self, owned: Sequence[Shard], step: int) -> tuple[str, dict[str, str]]:
        """``state_digests`` of what all ranks own together. Collective."""
        mine = [shard for shard in owned if shard.order is not None]
        told = self._told(mine, lambda: own_digests(mine, self._beat))
        return described_digests(_put_together(self._table, self._by_rank, told), step)

    def samples(self, owned: Sequence[Shard], step: int, every: int) -> list[Sampled]:
        """``sampled_blocks`` of what all ranks own together. Collective."""
        mine = [shard for shard in owned if shard.order is not None]
        told = self._told(mine, lambda: self._own_samples(mine, step, every))
        found = []
        for rank, data in enumerate(told):
            for i, (number, _, name, block) in enumerate(self._due(rank, step, every)):
                crc = data[i * CRC_DIGITS : (i + 1) * CRC_DIGITS].decode()
                found.append((number, (bare(name), block, crc)))
        return [sampled for _, sampled in sorted(found)]

    def _own_samples(self, mine: Sequence[Shard], step: int, every: int) -> bytes:
        due = self._due(self._group.rank, step, every)
        return "".join(_crc(mine[place], block) for _, place, _, block in due).encode()

    def _due(self, rank: int, step: int, every: int) -> Iterator[tuple[int, int, str, int]]:
        """The blocks of ``rank`` whose turn it is: number, place among its shards, name, number in that.

        Most tensors have none: it is looked for the tensors of the blocks, and not for the blocks of each.
        """
        spans, begins = self._spans[rank], self._begins[rank]
        for number in _turns(0, self._num_blocks, step, every):
            i = bisect_right(begins, number) - 1
            begin, count, place, name, first = spans[i] if i >= 0 else (0, 0, 0, "", 0)
            if number < begin + count:
                yield number, place, name, first + number - begin

    def _told(self, mine: Sequence[Shard], own: Callable[[], bytes]) -> list[bytes]:
        """What each rank tells of its own, once all have the table of what they own now."""
        if not (self._mark and len(mine) == len(self._mine) and all(map(is_, mine, self._mine))):
            self._mine = mine
            layout = [shard[:5] for shard in mine]
            if layout != self._layout or not self._mark:
                self._layout, self._described = layout, json.dumps(rows_to_json(x.row for x in mine)).encode()
                self._mark = hashlib.sha256(self._described).digest()[:MARK_BYTES]
        known = self._marks[self._group.rank : self._group.rank + 1] == [self._mark]
        told = self._gather(self._mark + (own() if known else b""))
        marks = [data[:MARK_BYTES] for data in told]
        if marks != self._marks:
            self._make_table(marks)
            self._enter("hash")
            return self._gather(own())
        return [data[MARK_BYTES:] for data in told]

    def _make_table(self, marks: list[bytes]) -> None:
        everyone = self._group.all_gather_bytes(self._described, TABLE)
        by_rank = [rows_from_json(json.loads(data)) for data in everyone]
        named = {f"rank {rank}": its for rank, its in zip(self._group.ranks, by_rank, strict=True)}
        self._table = assemble(named, ValueError)
        numbers, before = dict[str, int](), 0
        for name, stored in self._table.items():
            numbers[name], before = before, before + stored.num_blocks
        self._spans = [
            sorted(
                (numbers[x.name] + x.first_block, x.num_blocks, place, x.name, x.first_block)
                for place, x in enumerate(rows)
            )
            for rows in by_rank
        ]
        self._begins = [[span[0] for span in spans] for spans in self._spans]
        self._by_rank, self._marks, self._num_blocks = by_rank, marks, before

    def _gather(self, mine: bytes) -> list[bytes]:
        self._enter("gather")
        return self._group.all_gather_bytes(mine, HASHES, limit=LIMIT_BYTES)


def own_digests(owned: Iterable[Shard], beat: Callable[[], None] = lambda: None) -> bytes:
    """The digests of all blocks of what a rank owns that the state's hash is over, in a row.

    ``beat`` is called every ``BEAT_BLOCKS``: progress is made.
    """
    found = []
    for shard in owned:
        if shard.order is None:
            continue
        for number, digest in enumerate(block_digests(shard.tensor)):
            if number % BEAT_BLOCKS == 0:
                beat()
            found.append(digest)
    return b"".join(found)


def shared_digests(
    by_rank: Sequence[Sequence[Row]], told: Sequence[bytes], step: int
) -> tuple[str, dict[str, str]]:
    """``state_digests`` of a state of which each rank owns its rows, and has told its ``own_digests``.

    Raises:
        CheckpointRejected: the rows are not those of one whole state, or a rank has told too little.
    """
    hashed = [[row for row in rows if row.order is not None] for rows in by_rank]
    table = assemble({str(rank): rows for rank, rows in enumerate(hashed)})
    return described_digests(_put_together(table, hashed, told), step)


def _put_together(
    table: Mapping[str, StoredTensor], by_rank: Sequence[Sequence[Row]], told: Sequence[bytes]
) -> Iterator[Described]:
    """The tensors of the state with their digests, which each rank tells in the order of its rows."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    for rows, data in zip(by_rank, told, strict=True):
        at = 0
        for row in rows:
            end = at + row.num_blocks * DIGEST_BYTES
            found.setdefault(row.name, []).append((row.first, data[at:end]))
            at = end
        if at != len(data):
            raise CheckpointRejected(
                f"expected {at} bytes of digests, got {len(data)}: take another checkpoint"
            )
    for name, stored in table.items():
        in_order = sorted(found[name], key=lambda each: each[0])
        yield bare(name), str(stored.dtype), stored.shape, b"".join(data for _, data in in_order)


def sampled_blocks(entries: Iterable[Entry], step: int, every: int) -> list[Sampled]:
    """The blocks of ``entries`` whose turn it is after ``step``; each has one in ``every`` steps.

    Nothing is read or copied but these blocks (of a tensor that is not contiguous, the rows they lie in).
    """
    if every < 1:
        raise ValueError(f"expected every >= 1, got {every}: a block has its turn each so many steps")
    found, before = [], 0  # ``before``: number of blocks in the tensors so far
    for name, x in entries:
        shard = Shard.whole(name, x)
        found += [
            (name, block, _crc(shard, block)) for block in _turns(before, shard.num_blocks, step, every)
        ]
        before += shard.num_blocks
    return found


def bare(name: str) -> str:
    """The name of a tensor of the state as the hash has it: without its kind."""
    return name.partition(":")[2] or name


def _turns(number: int, count: int, step: int, every: int) -> range:
    """Of ``count`` blocks, the first of which has the ``number``, those whose turn it is."""
    return range(-(step + number) % every, count, every)


def _crc(shard: Shard, block: int) -> str:
    return f"{zlib.crc32(canonical_bytes(shard.blocks(block, block + 1))):08x}"
