"""Shards: which elements of which tensor of the state this rank holds, and which other ranks hold them too.

Everything that training carries from step to step is a list of shards and some JSON. Hash, snapshot,
checkpoint and comparison of replicas see nothing else: they never ask which class made a state, or how the
state is divided.

    rank 0 holds    | weight        | bias | moment 0..1 |             holders of weight: 0, 1
    rank 1 holds    | weight        | bias |     moment 2..3 |         holders of moment 0..1: 0
    rank 0 writes   | wei           |      | moment 0..1 |             what several ranks hold is written in
    rank 1 writes   |    ght        | bias |     moment 2..3 |         equal runs, each element once

A shard is a box of a tensor (start and stop per dim) and, inside the box, a flat range of elements in logical
order. ``box=None`` is the whole tensor.

    | . . . . |                        | . . a a |
    | . . a a |    box: None           | . . a a |    box: (0, 3), (2, 4): half the columns
    | a a a a |    elements 6 to 12    | . . a a |    elements 0 to 6 of the box

A box with one more dim than the tensor cuts a fused weight, of which the first dim has equal parts: of the
query, key and value rows of (12, K), ((0, 3), (0, 2), (0, K)) is the first half of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from instep.net.process_group import Group
from instep.reduce.blocks import BLOCK_ELEMENTS

Shape: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[tuple[int, int], ...]
Order: TypeAlias = tuple[int, str]
Json: TypeAlias = Any

MODEL, OPTIMIZER, OBJECT = "model:", "optimizer:", "object:"
KINDS = (MODEL, OPTIMIZER, OBJECT)
ELSEWHERE = torch.empty(0, device="meta")  # the values of a shard that another rank or a file has


class Shard(NamedTuple):
    """Elements ``first`` to ``last`` (exclusive), in logical order, of ``box`` of one tensor of the state.

    ``name`` begins with one of ``KINDS``; ``shape`` is that of the whole tensor. ``order`` is the place in
    the state's hash, which each rank knows without the other ranks' tensors (the place of the parameter or
    buffer in the module, and for moments the key); None: not hashed. ``tensor`` is the live memory
    (``held_shape``). ``holders`` are the ranks that hold these very elements, by their place in the group
    that trains together.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    first: int
    last: int
    order: Order | None = (0, "")
    box: Box | None = None
    tensor: Tensor = ELSEWHERE
    holders: tuple[int, ...] = (0,)

    @staticmethod
    def whole(name: str, x: Tensor, holders: tuple[int, ...] = (0,), order: Order | None = (0, "")) -> Shard:
        """All of ``x``."""
        return Shard(name, tuple(x.shape), x.dtype, 0, x.numel(), order, None, x.detach(), holders)

    @property
    def layout(self) -> tuple[object, ...]:
        """The shard without values and holders, to compare."""
        return self[:7]

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == math.prod(self.shape)

    @property
    def cuts_blocks(self) -> bool:
        """Whether the shard has only a part of some canonical block of the tensor."""
        on_edges = not self.first % BLOCK_ELEMENTS and (
            not self.last % BLOCK_ELEMENTS or self.last == math.prod(self.shape)
        )
        return self.box is not None or not on_edges

    @property
    def blocks(self) -> range:
        """The canonical blocks that the flat range touches."""
        return range(self.first // BLOCK_ELEMENTS, -(-self.last // BLOCK_ELEMENTS))

    def part(self, first: int, last: int) -> Shard:
        """Elements ``first`` to ``last`` of the box, which are in this shard."""
        if (first, last) == (self.first, self.last):
            return self
        inside = elements(self.tensor, first - self.first, last - self.first)
        return self._replace(first=first, last=last, tensor=inside)

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The elements of the box that are in this shard and in ``first`` to ``last`` of the whole tensor."""
        begin, end = (count_before(self.shape, self.box, number) for number in (first, last))
        begin, end = max(begin, self.first), min(end, self.last)
        return begin, max(begin, end)


def owned(shards: Iterable[Shard], rank: int) -> Iterator[Shard]:
    """The shards that ``rank`` writes and hashes for all holders: over all ranks each element exactly once.

    Each holder has a run of blocks, of equal length. Holders take turns with the first run, or one rank would
    have all small tensors.
    """
    for shard in shards:
        if rank not in shard.holders:
            continue
        num, turn = len(shard.holders), (shard.order or (0, ""))[0]
        i = (shard.holders.index(rank) + turn) % num
        begin, count = shard.blocks.start, len(shard.blocks)
        first, last = begin + i * count // num, begin + (i + 1) * count // num
        if first < last:
            yield shard.part(max(first * BLOCK_ELEMENTS, shard.first), min(last * BLOCK_ELEMENTS, shard.last))
        elif not count and i == 0:
            yield shard  # without elements, and still a tensor of the state


def without_ties(shards: Iterable[Shard], ties: Mapping[str, str]) -> list[Shard]:
    """The shards that are stored: a tied tensor under its first name only."""
    return [x for x in shards if not (x.name.startswith(MODEL) and x.name.removeprefix(MODEL) in ties)]


def grid(shape: Shape, box: Box) -> Shape:
    """The dims that ``box`` cuts: the tensor's, of a fused one with the number of its parts before them."""
    if len(box) == len(shape):
        return shape
    parts = box[0][1]
    return (parts, shape[0] // parts, *shape[1:])


def in_box(x: Tensor, box: Box) -> Tensor:
    """The elements of ``box`` of ``x``, which has the dims that the box cuts (``grid``): a view."""
    for dim, (start, stop) in enumerate(box):
        x = x.narrow(dim, start, stop - start)
    return x


def held_shape(shape: Shape, first: int, last: int, box: Box | None = None) -> Shape:
    """The shape of a shard's tensor: the box where it is all of the box, else flat."""
    of_box = shape if box is None else tuple(stop - start for start, stop in box)
    return of_box if last - first == math.prod(of_box) else (last - first,)


def count_before(shape: Shape, box: Box | None, number: int) -> int:
    """How many elements of ``box`` come before element ``number`` of the whole tensor, in logical order."""
    if box is None:
        return number
    count, stride, inside = 0, math.prod(shape), math.prod(stop - start for start, stop in box)
    for size, (start, stop) in zip(grid(shape, box), box, strict=True):
        stride, inside = stride // size, inside // (stop - start)
        at, number = divmod(number, stride)
        count += min(max(at - start, 0), stop - start) * inside
        if not start <= at < stop:
            break
    return count


def numbers(shape: Shape, box: Box | None, first: int, last: int) -> Tensor:
    """The numbers in the whole tensor of elements ``first`` to ``last`` of ``box``; they ascend."""
    left = torch.arange(first, last, device="cpu")
    if box is None:
        return left
    found, stride = torch.zeros_like(left), 1
    for size, (start, stop) in zip(reversed(grid(shape, box)), reversed(box), strict=True):
        found += (left % (stop - start) + start) * stride
        left, stride = left // (stop - start), stride * size
    return found


def elements(x: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of ``x`` in logical order, flat: a view if it is contiguous."""
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    return torch.cat([x.new_empty(0), *(part.reshape(-1) for part in _parts(x, start, stop))])


def put_elements(x: Tensor, start: int, values: Tensor) -> None:
    """Write the flat ``values`` to the elements of ``x`` from ``start`` on, in logical order."""
    parts = list(_parts(x, start, start + values.numel()))
    for part, own in zip(parts, values.split([part.numel() for part in parts]), strict=True):
        part.copy_(own.view(part.shape))


def put_box(
    out: Tensor, first: int, data: Tensor, shape: Shape, box: Box | None, begin: int, end: int
) -> None:
    """Write ``data``, the bytes of elements ``begin`` to ``end`` of ``box``, to ``out``, flat elements of the
    whole tensor from ``first`` on."""
    whole = torch.empty(shape if box is None else grid(shape, box), device="meta")
    parts = list(_parts(whole if box is None else in_box(whole, box), begin, end))
    width, flat = out.itemsize, out.view(torch.uint8)
    for part, own in zip(parts, data.split([part.numel() * width for part in parts]), strict=True):
        strides = *(stride * width for stride in part.stride()), 1
        place = flat.as_strided((*part.shape, width), strides, (part.storage_offset() - first) * width)
        place.copy_(own.view(place.shape))


def _parts(x: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views of ``x`` that hold the elements ``start`` to ``stop``, in logical order: a few per dim.

    | . . . . |
    | . . a a |      a, c: parts of a row, cut in the same way
    | b b b b |      b: whole rows, in one view
    | c . . . |
    """
    if start == stop:
        return
    if x.is_contiguous():
        yield x.view(-1)[start:stop]
        return
    row = x.numel() // len(x)
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # none, and both ends in one
        yield from _parts(x[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _parts(x[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield x[first:last]
    if last * row < stop:
        yield from _parts(x[last], 0, stop - last * row)


class State(Protocol):
    """What training carries from step to step, as one rank holds it.

    ``group`` are the ranks that have to come together for all of it: this one alone where it holds
    everything.
    """

    group: Group

    def owned(self) -> list[Shard]:
        """The live tensors that this rank writes for ``group``, those of the hash in its order."""

    def ties(self) -> Mapping[str, str]:
        """Further names of tensors of the model, each with the first one."""

    def frozen(self) -> list[str]:
        """The names of frozen parameters."""

    def options(self) -> Json:
        """What of it is no tensor, as this rank knows it."""
