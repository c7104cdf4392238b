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
from functools import cached_property

import torch
from torch import Tensor

from instep.memory import align_bytes, allocate
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket, Bundle, Slot, num_real, wire_dtype
from instep.reduce.exchange import OrderedAllReduce, mean_scale
from instep.reduce.header import Header
from instep.reduce.node_format import NodeFormat, Stretch
from instep.reduce.transport import add_up
from instep.reduce.tree import Node, plan_sum
from instep.shard.round_plan import Round
from instep.shard.shard_groups import ShardRanks
from instep.shard.transfer import all_to_all
from instep.shard.unit import Unit

NUM_BUFFERS = 2  # for units on their way: one is filled while the other is read


class SlicedBucket(Bundle):
    """The gradients of the parameters of one ``unit``, of which this rank keeps its slice.

    At construction: no memory. In a step: partial sums are ``kept``, ``num_kept`` of them now; the last one,
    number 0, becomes the reduced gradient, in the dtype of the weights in ``reduced``.

    Micro-batches are sent from the buffers ``staged``, used in turns: n, n + 1, n, ... Where ranks can reach
    into each other's memory, ``staged_by_rank[n]`` are every rank's buffers number n.

    Args:
        positions: of the unit's parameters, in the module.
    """

    staged: list[Tensor]
    staged_by_rank: list[list[Tensor]] | None

    def __init__(
        self, unit: Unit, index: int, positions: Sequence[int], ranks: ShardRanks, nodes: NodeFormat
    ) -> None:
        self._factor = factor = 2 if unit.dtype.is_complex else 1
        slots = [
            Slot(position, offset * factor, num_real(p), p.shape, p.dtype.is_complex)
            for position, offset, p in zip(positions, unit.layout.offsets, unit.whole, strict=True)
        ]
        super().__init__(index, slots, wire_dtype(unit.dtype), unit.device, ranks.shard_group)
        self.unit, self.num_kept = unit, 0
        self.slice_length = unit.layout.slice_length * factor
        self.first = self.group.rank * self.slice_length  # of this rank's slice, its first element
        self.nodes = nodes.of_bucket(
            self.stretches, self.slice_length, self.group.size, self.dtype, self.device
        )
        self.across = (
            None if ranks.replicate_group is None else self._make_across(ranks.replicate_group, nodes)
        )
        self._memory: list[Tensor] = []
        self.kept: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}

    @cached_property
    def reduced(self) -> Tensor:
        """The reduced gradient, (slice_length,)."""
        kept, dtype = self.keep(0), self.unit.dtype.to_real()
        if dtype == self.dtype:
            return kept
        with torch.inference_mode(False):
            return torch.zeros(self.slice_length, dtype=dtype, device=self.device)

    @cached_property
    def pieces(self) -> list[Tensor]:
        """The reduced gradient of this rank's shard of each slot, in its dtype and shape."""
        with torch.inference_mode(False):
            own = self.reduced
            return self.unit.shards_in(own if self._factor == 1 else torch.view_as_complex(own.view(-1, 2)))

    def begin_nodes(self, *key: int) -> None:
        super().begin_nodes(*key)
        if self.across is not None:
            self.across.begin_nodes(*key)

    @property
    def num_elements(self) -> int:
        return self.unit.layout.num_elements * self._factor

    def views(self, buffer: Tensor) -> list[Tensor]:
        address = buffer.data_ptr()
        if address not in self._views:
            flat = [buffer[slot.offset : slot.offset + slot.length] for slot in self.slots]
            if self._factor == 2:
                flat = [torch.view_as_complex(x.view(-1, 2)) for x in flat]
            self._views[address] = [x.view(slot.shape) for x, slot in zip(flat, self.slots, strict=True)]
        return self._views[address]

    def keep(self, number: int) -> Tensor:
        """Memory for partial sum ``number``; somewhat more where it is cut for the exchange of replicas."""
        across, align = self.across, align_bytes(self.device)
        while len(self.kept) <= number:
            if across is None:
                segment = allocate(self.slice_length * self.dtype.itemsize, align, self.device)
                memory = segment.elements(self.dtype).zero_()
            elif self.kept:
                memory = across.group.allocate(across.nbytes, align, self.device).elements(self.dtype).zero_()
            else:
                memory = across.home
            self._memory.append(memory)
            self.kept.append(memory[: self.slice_length])
        return self.kept[number]

    def to_exchange(self, nodes: Sequence[Node], num_leaves: int) -> Bucket:
        """The slice as a bucket of its own, with the kept sums, of ``nodes``, for roots; to be reduced."""
        assert self.across is not None
        self.keep(0)  # a shard group without micro-batches receives
        self.across.counter.reset(num_leaves)
        self.across.counter.roots = list(zip(nodes, self._memory, strict=False))
        return self.across

    def _make_across(self, replicate_group: Group, nodes: NodeFormat) -> Bucket:
        slot = Slot(0, 0, self.slice_length, torch.Size([self.slice_length]))
        parts = []  # of each parameter, what is in this rank's slice, and where in it
        for x in self.stretches:
            begin = max(x.offset, self.first)
            end = min(x.offset + x.length, self.first + self.slice_length)
            if begin < end:
                parts.append(Stretch(x.parameter, begin - self.first, end - begin, begin - x.offset))
        kind = self.dtype, self.device, replicate_group
        return Bucket(self.index, [slot], *kind, nodes_format=nodes, parts=parts)


def allocate_staging(buckets: Sequence[SlicedBucket], group: Group, num_buffers: int) -> list[Tensor]:
    """Give ``buckets``, which share it, memory for their way. Collective: ranks show it to each other.

    Returns all of it, on this rank.
    """
    memory: list[Tensor] = []
    for device in dict.fromkeys(bucket.device for bucket in buckets):
        own = [bucket for bucket in buckets if bucket.device == device]
        nbytes, align = max(bucket.nbytes for bucket in own), align_bytes(device)
        segments = [group.allocate(nbytes, align, device).tensor for _ in range(num_buffers)]
        shown = group.map_all(segments, "the exchange of staging memory") if group.size > 1 else [segments]
        memory += segments
        with torch.inference_mode(False):  # it is kept
            for bucket in own:
                bucket.staged = [x[: bucket.nbytes].view(bucket.dtype) for x in segments]
                bucket.staged_by_rank = shown and [
                    [x[: bucket.nbytes].view(bucket.dtype) for x in by_rank]
                    for by_rank in zip(*shown, strict=True)
                ]
    return memory


class ReduceScatter(OrderedAllReduce):
    """Brings slices to their owners, one unit after the other, always from the same thread."""

    def run_round(
        self, bucket: SlicedBucket, number: int, header: Header, turn: Round, by_group: Sequence[range] | None
    ) -> None:
        """Add this rank's slice of a round's micro-batches, which are in staging buffer ``number``.

        In the last round the sum, over all shard groups, becomes the mean; ``by_group`` are their leaves.

        Raises:
            Desync, PeerLost, ValueError: as ``OrderedAllReduce.run``.
        """
        name = f"the exchange of unit {header.bucket} in round {header.round}"
        headers = self.exchange_headers(bucket, header, name)
        scale = None if by_group is None else mean_scale(headers, self.data_ranks)
        across = bucket.across
        with self.recorder.span(
            "exchange", lane="communication", num_bytes=bucket.nodes.wire_bytes, bucket=header.bucket
        ):
            if turn.senders:
                self._take(bucket, number, turn, None if across else scale, name)
            if by_group is None or scale is None:
                return
            if across is not None:
                plan = plan_sum(by_group, header.num_leaves)
                roots = bucket.to_exchange(turn.nodes, header.num_leaves)
                self._transport_of(across.group).reduce(roots, plan, scale, name)
                bucket.num_kept = 1
            if bucket.reduced is not bucket.kept[0]:
                bucket.reduced.copy_(bucket.kept[0])

    def _take(self, bucket: SlicedBucket, number: int, turn: Round, scale: float | None, name: str) -> None:
        """Add this rank's slice of the micro-batches of its shard group."""
        if bucket.staged_by_rank is None:
            _add_up(bucket, self._receive_slices(bucket, number, turn, name), turn, scale)
            return
        shown, end = bucket.staged_by_rank[number], bucket.first + bucket.slice_length
        values = [shown[sender][bucket.first : end] for sender in turn.senders]
        for value, leaf in zip(values, turn.leaves, strict=True):
            bucket.nodes.round(value, (leaf, leaf + 1), bucket.first)
        _add_up(bucket, values, turn, scale)
        bucket.group.barrier(name)

    def _receive_slices(self, bucket: SlicedBucket, number: int, turn: Round, name: str) -> list[Tensor]:
        """This rank's slice of every sender's micro-batch, by message, in the format of nodes."""
        group, nodes = bucket.group, bucket.nodes
        size, rank, length = group.size, group.rank, nodes.wire_length
        received = self.transport.scratch.take(len(turn.senders) * length, nodes.wire_dtype, bucket.device)
        splits = [length if r in turn.senders else 0 for r in range(size)]
        own_splits, message = [0] * size, received[:0]
        if rank in turn.senders:
            staged, leaf = bucket.staged[number], turn.leaves[turn.senders.index(rank)]
            nodes.round(staged, (leaf, leaf + 1))
            own_splits, message = [length] * size, nodes.encode(staged)
        all_to_all(group, received, message, splits, own_splits, name)
        parts_of = received.split(splits)
        return [nodes.decode(parts_of[sender], bucket.first) for sender in turn.senders]


def _add_up(bucket: SlicedBucket, values: Sequence[Tensor], turn: Round, scale: float | None) -> None:
    """Make the sums of ``turn``; with a ``scale`` there is one, of all, and becomes the mean.

    In their order: where a sum is written, a value may lie that only sums up to this one need.
    """
    values = [*bucket.kept[: bucket.num_kept], *values]
    for number, plan in enumerate(turn.sums):
        home = bucket.keep(number)
        if plan.adds or values[plan.root] is not home:
            add_up(values, plan, 1.0 if scale is None else scale, [home], bucket.nodes, bucket.first)
    bucket.num_kept = len(turn.sums)
