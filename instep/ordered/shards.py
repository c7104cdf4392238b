"""Shards: which elements of which tensor of the state this rank holds, and which other ranks hold them too.

Everything that training carries from step to step is a list of shards and some JSON. Hash, snapshot,
checkpoint and comparison of replicas see these and nothing else: they never ask which class made a state, or
how it is divided.

    rank 0 holds    | weight        | bias | moment 0..1 |             holders of weight: 0, 1
    rank 1 holds    | weight        | bias |     moment 2..3 |         holders of moment 0..1: 0
    rank 0 writes   | wei           |      | moment 0..1 |             of what several hold each writes an
    rank 1 writes   |    ght        | bias |     moment 2..3 |         equal run of blocks, each element once

Edges inside a tensor lie on its canonical blocks (``instep.ordered.blocks``), so that what is formed per
block, hashes and norms, can be formed by the rank that has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from instep.mesh.process_group import Group
from instep.ordered.blocks import BLOCK_ELEMENTS

Shape: TypeAlias = tuple[int, ...]
Order: TypeAlias = tuple[int, str]
Json: TypeAlias = Any

MODEL, OPTIMIZER, OBJECT = "model:", "optimizer:", "object:"
KINDS = (MODEL, OPTIMIZER, OBJECT)


class Shard(NamedTuple):
    """Elements ``first`` to ``last`` (exclusive), in logical order, of one tensor of the state.

    ``name`` begins with one of ``KINDS``; ``shape`` is that of the whole tensor. ``tensor`` is the
    live memory: of that shape if it is all of it, else flat. ``holders`` are the ranks that hold these very
    elements, by their place in the group that trains together. ``order`` is its place in the state's hash,
    which each rank can tell without the others' tensors (the place of the parameter or buffer in the module,
    and for moments the key); None: the hash is not over it.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    first: int
    last: int
    tensor: Tensor
    holders: tuple[int, ...] = (0,)
    order: Order | None = (0, "")

    @staticmethod
    def whole(name: str, x: Tensor, holders: tuple[int, ...] = (0,), order: Order | None = (0, "")) -> Shard:
        """All of ``x``."""
        return Shard(name, tuple(x.shape), x.dtype, 0, x.numel(), x.detach(), holders, order)

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == math.prod(self.shape)

    @property
    def row(self) -> Row:
        """What it is, without its values."""
        return Row(self.name, self.shape, self.dtype, self.first, self.last, self.order)

    @property
    def first_block(self) -> int:
        return self.first // BLOCK_ELEMENTS

    @property
    def num_blocks(self) -> int:
        """Canonical blocks in it."""
        return num_blocks(self.last - self.first)

    def part(self, first: int, last: int) -> Shard:
        """Elements ``first`` to ``last`` of the whole tensor, which are in this shard."""
        if (first, last) == (self.first, self.last):
            return self
        inside = elements(self.tensor, first - self.first, last - self.first)
        return self._replace(first=first, last=last, tensor=inside)

    def blocks(self, first: int, last: int) -> Tensor:
        """Blocks ``first`` to ``last`` (exclusive) of the whole tensor, which are in this shard, flat."""
        start, stop = first * BLOCK_ELEMENTS, min(last * BLOCK_ELEMENTS, self.last)
        return elements(self.tensor, start - self.first, stop - self.first)


def owned(shards: Iterable[Shard], rank: int) -> Iterator[Shard]:
    """What ``rank`` writes, or hashes, for all holders: over all ranks each element exactly once.

    Of what several ranks hold each has a run of blocks, of equal length. They take turns with the first run,
    or one rank would have all that is small.
    """
    for shard in shards:
        if rank not in shard.holders:
            continue
        num, turn = len(shard.holders), (shard.order or (0, ""))[0]
        i = (shard.holders.index(rank) + turn) % num
        begin, count = shard.first_block, shard.num_blocks
        first, last = begin + i * count // num, begin + (i + 1) * count // num
        if first < last:
            yield shard.part(first * BLOCK_ELEMENTS, min(last * BLOCK_ELEMENTS, shard.last))
        elif not count and i == 0:
            yield shard  # without elements, and still a tensor of the state


def without_ties(shards: Iterable[Described], ties: Mapping[str, str]) -> list[Described]:
    """Those that are stored: not what is only a further name, as in ``ties``, of memory that is stored."""
    return [x for x in shards if not (x.name.startswith(MODEL) and x.name.removeprefix(MODEL) in ties)]


def elements(x: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of ``x`` in logical order, flat: a view if it is contiguous."""
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    return torch.cat([x.new_empty(0), *(part.reshape(-1) for part in _parts(x, start, stop))])


def put_elements(x: Tensor, start: int, values: Tensor) -> None:
    """The elements of ``x`` from ``start`` on, in logical order, become ``values``, which are flat."""
    parts = list(_parts(x, start, start + values.numel()))
    for part, own in zip(parts, values.split([part.numel() for part in parts]), strict=True):
        part.copy_(own.view(part.shape))


def _parts(x: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views of ``x`` that are its elements ``start`` to ``stop``, in logical order: a few per dimension.

    | . . . . |
    | . . a a |      a, c: parts of a row, which is cut in the same way
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


class Row(NamedTuple):
    """A shard without its values."""

    name: str
    shape: Shape
    dtype: torch.dtype
    first: int
    last: int
    order: Order | None

    @property
    def first_block(self) -> int:
        return self.first // BLOCK_ELEMENTS

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.last - self.first)


def num_blocks(num_elements: int) -> int:
    """Canonical blocks of so many elements, the last one perhaps shorter."""
    return -(-num_elements // BLOCK_ELEMENTS)


Described = TypeVar("Described", Shard, Row)


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

    def options(self) -> Json:
        """What of it is no tensor, as this rank knows it."""
