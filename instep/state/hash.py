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

import torch
from torch import Tensor

from instep.errors import CheckpointRejected
from instep.memory import as_bytes
from instep.net.process_group import Group
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.shards import Shard, numbers
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
        self._held = [[x for x in shards if x.order is not None] for shards in by_rank]
        places = (f"rank {rank}" for rank in ranks or range(len(by_rank)))
        self._tensors = assemble(dict(zip(places, self._held, strict=True)), error)
        self._numbers, before = dict[str, int](), 0  # of each tensor's first block, among all
        for name, stored in self._tensors.items():
            self._numbers[name], before = before, before - -stored.numel // BLOCK_ELEMENTS
        self.cut = {x.name for shards in self._held for x in shards if x.cuts_blocks}
        holders = {
            name: [rank for rank, shards in enumerate(self._held) if any(x.name == name for x in shards)]
            for name in self.cut
        }
        self.hashed = [
            [y for x in shards if (y := self._run(x, rank, holders)) is not None]
            for rank, shards in enumerate(self._held)
        ]

    def _run(self, x: Shard, rank: int, holders: dict[str, list[int]]) -> Shard | None:
        """The run of blocks of the tensor of ``x`` that ``rank`` hashes."""
        if x.name not in self.cut:
            return x
        i, num, numel = holders[x.name].index(rank), len(holders[x.name]), math.prod(x.shape)
        count = -(-numel // BLOCK_ELEMENTS)
        first, last = (min(j * count // num * BLOCK_ELEMENTS, numel) for j in (i, i + 1))
        return x._replace(first=first, last=last, box=None) if first < last else None

    def complete(
        self, group: Group, own: Sequence[Shard], ranges: Ranges = lambda x: [(x.first, x.last)]
    ) -> list[Shard]:
        """The shards that this rank hashes, with values. Collective if shards cut blocks.

        For cut tensors only the elements in ``ranges`` of the whole tensor are exchanged.
        """
        known = {x.name: x for x in own}
        if not self.cut:
            return [known[x.name] for x in self.hashed[group.rank]]
        runs = [[x for x in shards if x.name in self.cut] for shards in self.hashed]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        sent = [nothing]
        for theirs in runs:
            of = [(known[x.name], ends) for x in theirs if x.name in known for ends in ranges(x)]
            parts = [as_bytes(x.part(*x.within(*ends)).tensor).cpu() for x, ends in of]
            sent.append(torch.cat([nothing, *parts]))
        come: list[tuple[Shard, Tensor]] = []  # runs, and which of their elements come, from rank to rank
        lengths = []
        for held in self._held:
            its = {x.name: x for x in held}
            of = [
                (x, its[x.name].within(*ends))
                for x in runs[group.rank]
                if x.name in its
                for ends in ranges(x)
            ]
            lengths.append(sum((end - begin) * x.dtype.itemsize for x, (begin, end) in of))
            come += [(x, numbers(x.shape, its[x.name].box, *ends) - x.first) for x, ends in of]
        out = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        group.all_to_all(out, torch.cat(sent), lengths, [len(part) for part in sent[1:]], CUT_BLOCKS)
        for x in runs[group.rank]:
            values = torch.zeros(x.last - x.first, dtype=x.dtype, device="cpu")
            known[x.name] = x._replace(tensor=values)
        parts = list(out.split([len(at) * x.dtype.itemsize for x, at in come]))
        for (x, at), data in zip(come, parts, strict=True):
            width = x.dtype.itemsize  # bytes, because not all dtypes can be indexed
            known[x.name].tensor.view(torch.uint8).view(-1, width)[at] = data.view(-1, width)
        return [known[x.name] for x in self.hashed[group.rank]]

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

        def own(mine: Sequence[Shard]) -> bytes:
            return "".join(_crc(x, ends) for x in mine for ends in ranges(x)).encode()

        def ranges(x: Shard) -> Iterator[tuple[int, int]]:
            for block in self._table.due(x, step, every):
                yield block * BLOCK_ELEMENTS, min((block + 1) * BLOCK_ELEMENTS, x.last)

        told = self._exchange(owned, own, ranges)
        return self._table.samples(told, step, every)

    def _exchange(
        self,
        owned: Sequence[Shard],
        own: Callable[[Sequence[Shard]], bytes],
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


def bare(name: str) -> str:
    """The name of a tensor of the state in the hash: without its kind."""
    return name.partition(":")[2] or name


def _crc(x: Shard, ends: tuple[int, int]) -> str:
    return f"{zlib.crc32(canonical_bytes(x.part(*ends).tensor)):08x}"
