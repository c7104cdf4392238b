"""Where the gradients of a leaf lie while they travel, and the memory of what has arrived.

No rank keeps a whole gradient. A unit's are copied out of ``.grad`` into staging memory, twice the size
of the largest unit, and are gone from there when their owners have taken their slices:

    .grad of unit 7  -->  | staging 0 |  -->  slice 0 to rank 0, slice 1 to rank 1      unit 6 waits in
    .grad of unit 6  -->  | staging 1 |                                                 the other one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from instep.memory import align_bytes, allocate
from instep.mesh.group import Group
from instep.ordered.buckets import Bucket, Bundle, Slot, num_real, wire_dtype
from instep.ordered.tree import Node
from instep.shard.flat import Flat
from instep.shard.space import Held, Space
from instep.shard.unit import Unit

NUM_BUFFERS = 2


class Sliced(Flat):
    """Weights whole on every rank, gradients in slices, which ``gradient_source`` has."""

    gradient_source: Callable[[Held], Tensor | None] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.flat.dtype

    def gradient_of(self, held: Held) -> Tensor | None:
        return None if self.gradient_source is None else self.gradient_source(held)


Divided = Sliced | Unit
"""Parameters whose gradients are in slices; in the second case the weights are too."""


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
            shown = group.expose(segments, "the exchange of staging memory") if group.size > 1 else [segments]
            self._shown[device] = shown

    def buffer(self, number: int, bucket: SlicedBucket) -> Tensor:
        """This rank's buffer ``number``, for one leaf of ``bucket``."""
        return _part(self._mine[bucket.device][number], bucket)

    def by_rank(self, number: int, bucket: SlicedBucket) -> list[Tensor] | None:
        """Every rank's buffer ``number``, where this rank can reach them."""
        shown = self._shown[bucket.device]
        return None if shown is None else [_part(own[number], bucket) for own in shown]


def _part(memory: Tensor, bucket: SlicedBucket) -> Tensor:
    return memory[: bucket.nbytes].view(bucket.dtype)


@dataclass
class SlicedBucket(Bundle):
    """The gradients of the parameters of one ``space``, of which this rank keeps its slice.

    At construction: memory for one slice. In a step: partial sums are ``kept``, ``num_kept`` of them now; the
    last one, number 0, becomes the reduced gradient, in the dtype of the weights in ``reduced``.
    """

    space: Space
    rank: int
    value_dtype: torch.dtype
    column: Group | None = None  # the ranks that have the same slice
    num_kept: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        layout = self.space.layout
        self._factor = 2 if self.value_dtype.is_complex else 1
        self.slice_length = layout.slice_length * self._factor
        self._across = None if self.column is None else self._make_across(self.column)
        self._memory: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.keep(0)
        self.reduced = self.kept[0]
        real = self.value_dtype.to_real() if self.value_dtype.is_complex else self.value_dtype
        if real != self.dtype:
            self.reduced = torch.zeros(self.slice_length, dtype=real, device=self.device)
        self._views: dict[int, list[Tensor]] = {}
        self._offsets = {
            id(p): offset for p, offset in zip(self.space.parameters, layout.offsets, strict=True)
        }
        self._strides = [self.space.strides_of(p) for p in self.space.parameters]

    @staticmethod
    def of(
        space: Divided, index: int, positions: Sequence[int], rank: int, column: Group | None = None
    ) -> SlicedBucket:
        """A bucket for ``space``, whose parameters have these ``positions`` in the module."""
        value_dtype = space.dtype
        factor = 2 if value_dtype.is_complex else 1
        slots = [
            Slot(position, offset * factor, num_real(p), p.shape, p.is_complex())
            for position, offset, p in zip(positions, space.layout.offsets, space.parameters, strict=True)
        ]
        device = space.parameters[0].device
        return SlicedBucket(index, slots, wire_dtype(value_dtype), device, space, rank, value_dtype, column)

    @property
    def num_elements(self) -> int:
        return self.space.layout.num_elements * self._factor

    def views(self, buffer: Tensor) -> list[Tensor]:
        address = buffer.data_ptr()
        if address not in self._views:
            self._views[address] = [
                self._view(buffer, slot, strides)
                for slot, strides in zip(self.slots, self._strides, strict=True)
            ]
        return self._views[address]

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's slice of a whole ``buffer``."""
        return buffer[self.rank * self.slice_length : (self.rank + 1) * self.slice_length]

    def range_of(self, held: Held) -> slice:
        """Where the piece lies in the slice, in real elements."""
        offset = self._offsets[id(held.parameter)] - self.rank * self.space.layout.slice_length
        return slice((offset + held.first) * self._factor, (offset + held.last) * self._factor)

    def piece(self, held: Held) -> Tensor:
        """The reduced gradient of ``held.tensor``, in its dtype and shape."""
        flat = self.reduced[self.range_of(held)]
        if self._factor == 2:
            flat = torch.view_as_complex(flat.view(-1, 2))
        if not held.is_whole:
            return flat
        return flat.as_strided(held.parameter.shape, self.space.strides_of(held.parameter))

    def keep(self, number: int) -> Tensor:
        """Memory for partial sum ``number``."""
        while len(self.kept) <= number:
            self._memory.append(self._allocate())
            self.kept.append(self._memory[-1][: self.slice_length])
        return self.kept[number]

    def to_exchange(self, nodes: Sequence[Node], num_leaves: int) -> Bucket:
        """The slice as a bucket of its own, with the kept sums, of ``nodes``, for roots; to be reduced."""
        assert self._across is not None
        self._across.counter.reset(num_leaves)
        self._across.counter.roots = list(zip(nodes, self._memory, strict=False))
        return self._across

    def _make_across(self, column: Group) -> Bucket:
        slot = Slot(0, 0, self.slice_length, torch.Size([self.slice_length]))
        return Bucket(self.index, [slot], self.dtype, self.device, column.size, allocate=column.allocate)

    def _allocate(self) -> Tensor:
        """Memory for a slice, of which some more is needed where it is cut for the exchange of replicas."""
        align = align_bytes(self.device)
        if self._across is None or self.column is None:
            segment = allocate(self.slice_length * self.dtype.itemsize, align, self.device)
        elif self._memory:
            segment = self.column.allocate(self._across.nbytes, align, self.device)
        else:
            return self._across.home
        return segment.elements(self.dtype).zero_()

    def _view(self, buffer: Tensor, slot: Slot, strides: tuple[int, ...]) -> Tensor:
        flat = buffer[slot.offset : slot.offset + slot.length]
        if slot.is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.as_strided(slot.shape, strides)
