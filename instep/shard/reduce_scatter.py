"""The reduce-scatter of one micro-batch per rank of one unit: every slice goes to its owner, who adds it up.

    rank 0: micro-batch 4   | a0 | a1 |     rank 0 has the sum of micro-batches 0 to 3 of slice 0; a0, b0 come
    rank 1: micro-batch 5   | b0 | b1 |     rank 1 has the sum of micro-batches 0 to 3 of slice 1; a1, b1 come

No rank keeps a whole gradient. A unit's are copied out of ``.grad`` into staging memory, twice the size
of the largest unit, and are gone from there when their owners have taken their slices:

    .grad of unit 7  -->  | staging 0 |  -->  slice 0 to rank 0, slice 1 to rank 1      unit 6 waits in
    .grad of unit 6  -->  | staging 1 |                                                 the other one

Where ranks can reach into each other's staging memory (backend "shm") nothing is sent: the owner reads the
slices where they lie, and a barrier says that it has. Else every rank sends each other rank one slice. Bytes
that a rank sends for a unit of S bytes: S (W-1)/W per micro-batch, half of an all-reduce, in one step after
the one for the headers.

Where there are several shard groups, each with micro-batches of its own, the owners of the same slice, a
replicate group, add up theirs after the last round, in the order of the tree too: a slice is to them what a
bucket is to replicas. Headers go to all ranks, in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from instep.events import Recorder
from instep.memory import PIECE_BYTES, align_bytes, allocate
from instep.native.library import core
from instep.net.process_group import Group
from instep.reduce.add_up import add_up
from instep.reduce.buckets import Bucket, Bundle, Slot, num_real, wire_dtype
from instep.reduce.exchange import OrderedAllReduce, mean_scale
from instep.reduce.header import Header
from instep.reduce.node_format import IN_FLOAT32, NodeFormat, Stretch
from instep.reduce.tree import Node, Sum, plan_sum
from instep.shard.round_plan import Round
from instep.shard.shard_groups import ShardRanks
from instep.shard.transfer import all_to_all
from instep.shard.unit import Unit
from instep.state.homes import part_shape

NUM_BUFFERS = 2  # for units on their way: one is filled while the other is read


class Staging:
    """Memory for ``buckets`` on their way, used in turns: buffer n, n + 1, n, ...

    At construction, collective: the ranks show it to each other, if they can.
    """

    def __init__(self, buckets: Sequence[SlicedBucket], group: Group) -> None:
        self.num_buffers = NUM_BUFFERS if group.size > 1 else 1
        self._group = group
        self._mine: dict[torch.device, list[Tensor]] = {}
        self._shown: dict[torch.device, list[list[Tensor]] | None] = {}
        for device in dict.fromkeys(bucket.device for bucket in buckets):
            nbytes = max(bucket.nbytes for bucket in buckets if bucket.device == device)
            segments = [
                group.allocate(nbytes, align_bytes(device), device).tensor for _ in range(self.num_buffers)
            ]
            self._mine[device] = segments
            shown = (
                group.map_all(segments, "the exchange of staging memory") if group.size > 1 else [segments]
            )
            self._shown[device] = shown
        self._parts: dict[tuple[int, int], Tensor] = {}
        self._parts_by_rank: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def segments(self) -> list[Tensor]:
        """All of it, on this rank."""
        return [x for own in self._mine.values() for x in own]

    def buffer(self, number: int, bucket: SlicedBucket) -> Tensor:
        """This rank's buffer ``number``, for one micro-batch of ``bucket``."""
        key = number, bucket.index
        if key not in self._parts:
            self._parts[key] = _part(self._mine[bucket.device][number], bucket)
        return self._parts[key]

    def by_rank(self, number: int, bucket: SlicedBucket) -> list[Tensor] | None:
        """Every rank's buffer ``number``, where this rank can reach them."""
        shown = self._shown[bucket.device]
        if shown is None:
            return None
        key = number, bucket.index
        if key not in self._parts_by_rank:
            self._parts_by_rank[key] = [_part(own[number], bucket) for own in shown]
        return self._parts_by_rank[key]


def _part(memory: Tensor, bucket: SlicedBucket) -> Tensor:
    with torch.inference_mode(False):  # it is kept
        return memory[: bucket.nbytes].view(bucket.dtype)


@dataclass
class SlicedBucket(Bundle):
    """The gradients of the parameters of one ``unit``, of which this rank keeps its slice.

    At construction: no memory. In a step: partial sums are ``kept``, ``num_kept`` of them now; the last one,
    number 0, becomes the reduced gradient, in the dtype of the weights in ``reduced``.
    """

    unit: Unit
    value_dtype: torch.dtype
    replicate_group: Group | None = None  # None where there is one shard group
    nodes_format: NodeFormat = IN_FLOAT32
    num_kept: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        layout = self.unit.layout
        self._factor = 2 if self.value_dtype.is_complex else 1
        self.slice_length = layout.slice_length * self._factor
        self.nodes = self.nodes_format.of_bucket(
            self.stretches, self.slice_length, layout.num_ranks, self.dtype, self.device
        )
        self._across = None if self.replicate_group is None else self._make_across(self.replicate_group)
        self._memory: list[Tensor] = []
        self.kept: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}
        held_at = {id(x.parameter): x for x in self.unit.held}
        self._held = [held_at.get(id(p)) for p in self.unit.parameters]
        self._pieces: list[Tensor] = []

    @cached_property
    def reduced(self) -> Tensor:
        """The reduced gradient, (slice_length,)."""
        real = self.value_dtype.to_real() if self.value_dtype.is_complex else self.value_dtype
        kept = self.keep(0)
        if real == self.dtype:
            return kept
        with torch.inference_mode(False):
            return torch.zeros(self.slice_length, dtype=real, device=self.device)

    @staticmethod
    def of(
        unit: Unit,
        index: int,
        positions: Sequence[int],
        group: Group,
        replicate_group: Group | None = None,
        nodes: NodeFormat = IN_FLOAT32,
    ) -> SlicedBucket:
        """A bucket for ``unit``, whose parameters have these ``positions`` in the module."""
        value_dtype = unit.dtype
        factor = 2 if value_dtype.is_complex else 1
        slots = [
            Slot(position, offset * factor, num_real(p), p.shape, p.dtype.is_complex)
            for position, offset, p in zip(positions, unit.layout.offsets, unit.whole, strict=True)
        ]
        dtype = wire_dtype(value_dtype)
        how = value_dtype, replicate_group, nodes
        return SlicedBucket(index, slots, dtype, unit.device, group, unit, *how)

    def begin_nodes(self, *key: int) -> None:
        super().begin_nodes(*key)
        if self._across is not None:
            self._across.begin_nodes(*key)

    @property
    def first(self) -> int:
        """Of this rank's slice, its first element in the bucket."""
        return self.group.rank * self.slice_length

    @property
    def num_elements(self) -> int:
        return self.unit.layout.num_elements * self._factor

    def views(self, buffer: Tensor) -> list[Tensor]:
        address = buffer.data_ptr()
        if address not in self._views:
            self._views[address] = [self._view(buffer, slot) for slot in self.slots]
        return self._views[address]

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's slice of a whole ``buffer``."""
        return buffer[self.first : self.first + self.slice_length]

    def pieces(self) -> list[Tensor]:
        """The reduced gradient of this rank's shard of each slot, in its dtype and shape."""
        if not self._pieces:
            with torch.inference_mode(False):
                layout = self.unit.layout
                for held, offset, shape in zip(self._held, layout.offsets, self.unit.shapes, strict=True):
                    first, last = (0, 0) if held is None else (held.first, held.last)
                    at = 0 if held is None else offset + first - self.group.rank * layout.slice_length
                    flat = self.reduced[at * self._factor : (at + last - first) * self._factor]
                    if self._factor == 2:
                        flat = torch.view_as_complex(flat.view(-1, 2))
                    self._pieces.append(flat.view(part_shape(shape, 0) if held is None else held.held_shape))
        return self._pieces

    def keep(self, number: int) -> Tensor:
        """Memory for partial sum ``number``."""
        while len(self.kept) <= number:
            self._memory.append(self._allocate())
            self.kept.append(self._memory[-1][: self.slice_length])
        return self.kept[number]

    def to_exchange(self, nodes: Sequence[Node], num_leaves: int) -> Bucket:
        """The slice as a bucket of its own, with the kept sums, of ``nodes``, for roots; to be reduced."""
        assert self._across is not None
        self.keep(0)  # a shard group without micro-batches receives
        self._across.counter.reset(num_leaves)
        self._across.counter.roots = list(zip(nodes, self._memory, strict=False))
        return self._across

    def _make_across(self, replicate_group: Group) -> Bucket:
        slot = Slot(0, 0, self.slice_length, torch.Size([self.slice_length]))
        return Bucket(
            self.index,
            [slot],
            self.dtype,
            self.device,
            replicate_group,
            nodes_format=self.nodes_format,
            parts=[part for x in self.stretches if (part := self._part_of(x)) is not None],
        )

    def _part_of(self, x: Stretch) -> Stretch | None:
        """What of ``x`` is in this rank's slice, and where in it."""
        begin = max(x.offset, self.first)
        end = min(x.offset + x.length, self.first + self.slice_length)
        if begin >= end:
            return None
        return Stretch(x.parameter, begin - self.first, end - begin, begin - x.offset)

    def _allocate(self) -> Tensor:
        """Memory for a slice, of which some more is needed where it is cut for the exchange of replicas."""
        align = align_bytes(self.device)
        if self._across is None or self.replicate_group is None:
            segment = allocate(self.slice_length * self.dtype.itemsize, align, self.device)
        elif self._memory:
            segment = self.replicate_group.allocate(self._across.nbytes, align, self.device)
        else:
            return self._across.home
        return segment.elements(self.dtype).zero_()

    def _view(self, buffer: Tensor, slot: Slot) -> Tensor:
        flat = buffer[slot.offset : slot.offset + slot.length]
        if slot.is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.view(slot.shape)


class ReduceScatter(OrderedAllReduce):
    """Brings slices to their owners, one unit after the other, always from the same thread."""

    staging: Staging

    def __init__(self, ranks: ShardRanks, recorder: Recorder, *, max_parameters: int) -> None:
        super().__init__(ranks.whole, recorder, ordered=True, max_parameters=max_parameters)
        self._shard_group = ranks.shard_group
        self._across = None
        if ranks.replicate_group is not None:
            self._across = OrderedAllReduce(ranks.replicate_group, recorder, ordered=True, max_parameters=0)

    def run_round(
        self,
        bucket: SlicedBucket,
        number: int,
        header: Header,
        turn: Round,
        by_group: Sequence[range],
        *,
        is_last: bool,
    ) -> None:
        """Add this rank's slice of a round's micro-batches, which are in staging buffer ``number``.

        In the last round the sum, over all shard groups, becomes the mean; ``by_group`` are their leaves.

        Raises:
            Desync, PeerLost, ValueError: as ``OrderedAllReduce.run``.
        """
        name = f"the exchange of unit {header.bucket} in round {header.round}"
        headers = self.exchange_headers(bucket, header, name)
        scale = mean_scale(headers, self.data_ranks) if is_last else None
        with self.recorder.span(
            "exchange", lane="communication", num_bytes=bucket.nodes.wire_bytes, bucket=header.bucket
        ):
            if turn.senders:
                self._take(bucket, number, turn, None if self._across else scale, name)
            if self._across is not None and scale is not None:
                self._add_replicas(self._across, bucket, header.num_leaves, turn, by_group, scale, name)

    def _take(self, bucket: SlicedBucket, number: int, turn: Round, scale: float | None, name: str) -> None:
        """Add this rank's slice of the micro-batches of its shard group."""
        shown = self.staging.by_rank(number, bucket)
        if shown is None:
            values = self._receive_slices(bucket, number, turn, name)
        else:
            values = [bucket.own(shown[sender]) for sender in turn.senders]
            for value, leaf in zip(values, turn.leaves, strict=True):
                bucket.nodes.round(value, (leaf, leaf + 1), bucket.first)
        _add_up(bucket, values, turn, scale)
        if shown is not None:
            self._shard_group.barrier(name)

    def _add_replicas(
        self,
        across: OrderedAllReduce,
        bucket: SlicedBucket,
        num_leaves: int,
        turn: Round,
        by_group: Sequence[range],
        scale: float,
        name: str,
    ) -> None:
        """The mean over all shard groups, from the roots that each has of this slice."""
        plan = plan_sum(by_group, num_leaves)
        across.transport.reduce(bucket.to_exchange(turn.nodes, num_leaves), plan, scale, name)
        if bucket.reduced is not bucket.kept[0]:
            bucket.reduced.copy_(bucket.kept[0])
        bucket.num_kept = 1

    def _receive_slices(self, bucket: SlicedBucket, number: int, turn: Round, name: str) -> list[Tensor]:
        """This rank's slice of every sender's micro-batch, by message, in the format of nodes."""
        group, nodes = self._shard_group, bucket.nodes
        size, rank, length = group.size, group.rank, nodes.wire_length
        received = self.transport.scratch.take(len(turn.senders) * length, nodes.wire_dtype, bucket.device)
        splits = [length if r in turn.senders else 0 for r in range(size)]
        own_splits, message = [0] * size, received[:0]
        if rank in turn.senders:
            staged, leaf = self.staging.buffer(number, bucket), turn.leaves[turn.senders.index(rank)]
            nodes.round(staged, (leaf, leaf + 1))
            own_splits, message = [length] * size, nodes.encode(staged)
        all_to_all(group, received, message, splits, own_splits, name)
        parts_of = received.split(splits)
        return [nodes.decode(parts_of[sender], bucket.first) for sender in turn.senders]


def _add_up(bucket: SlicedBucket, values: Sequence[Tensor], turn: Round, scale: float | None) -> None:
    """Make the sums of ``turn``; with a ``scale`` the root is all, and its mean the reduced gradient.

    The last sum is written where it is kept: what is kept of before stays at its number, so no other one is
    read from there. The native core, where it is there, makes a single one in one pass over memory.
    """
    before = bucket.num_kept
    sums = [*bucket.kept[:before], *values]
    homes = {value: bucket.keep(d) for d, value in enumerate(turn.kept)}
    bucket.num_kept = len(turn.kept)
    one_sum = len(homes) == 1 and not bucket.nodes.rounds
    if one_sum and (scale is None or bucket.reduced is bucket.kept[0]) and core() is not None:
        plan = Sum((), turn.adds, turn.sums, turn.kept[0])
        add_up(sums, plan, 1.0 if scale is None else scale, [bucket.kept[0]], bucket.nodes, bucket.first)
        return
    moved = {value for value in homes if value >= before}
    targets = [sums[left] for left, _ in turn.adds]
    if turn.adds and (last := turn.adds[-1][0]) in moved:
        targets[-1] = homes[last]
        moved.remove(last)
    most = PIECE_BYTES // bucket.dtype.itemsize
    for start in range(0, bucket.slice_length, most):
        piece = slice(start, min(start + most, bucket.slice_length))
        terms = [x[piece] for x in sums]
        for (left, right), node, target in zip(turn.adds, turn.sums, targets, strict=True):
            terms[left] = bucket.nodes.add(
                terms[left], terms[right], node, bucket.first + start, out=target[piece]
            )
        for value, home in homes.items():
            if scale is not None and scale != 1.0:
                torch.mul(terms[value], scale, out=home[piece])
            elif value in moved:
                home[piece].copy_(terms[value])
            if scale is not None and bucket.reduced is not home:
                bucket.reduced[piece].copy_(home[piece])
