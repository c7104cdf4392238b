"""A state that is elsewhere: where in files, in snapshots or with other ranks each element of a tensor is.

    model:embed.weight   (50257, 768)    0 ........ 9646080 | 9646080 ........ 19292160 | ...
                                         file of rank 0       file of rank 1              file of rank 2

A tensor is all there exactly once: neither a hole, which would be filled with whatever memory held, nor two
versions of one element. A reader asks for a range, and gets it from as many places as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from instep import memory
from instep.errors import CheckpointRejected
from instep.mesh.axes import round_up
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.shards import KINDS, MODEL, Json, Order, Row, Shape, Shard, elements

# What files can hold, by the code that safetensors has for it.
CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES.values()}  # by torch's name
ALIGN_BYTES = 64  # of tensors in flat memory
MAX_DIMS = 64  # of a torch tensor
MAX_ELEMENTS = 2**48
UNORDERED = (1 << 62, "")  # after all that the hash is over


@dataclass(frozen=True)
class Extent:
    """Elements ``first`` to ``last`` (exclusive), in ``place``: a file, or a rank."""

    first: int
    last: int
    place: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the state and where its elements are, in their order, each exactly once."""

    shape: Shape
    dtype: torch.dtype
    extents: tuple[Extent, ...]
    order: Order | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // BLOCK_ELEMENTS)

    def within(self, first: int, last: int) -> Iterator[tuple[Extent, int, int]]:
        """The extents of elements ``first`` to ``last``, each with its part of that range."""
        for extent in self.extents:
            begin, end = max(first, extent.first), min(last, extent.last)
            if begin < end:
                yield extent, begin, end


class Reader(Protocol):
    """One place of elements."""

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """Fill the flat ``out`` with what begins at element ``first`` of what the place has of ``name``."""


@dataclass(frozen=True)
class MemoryReader:
    """Tensors in flat memory as a place of elements (``Reader``)."""

    memory: Tensor  # uint8
    begins: Mapping[str, int]  # bytes

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``Reader``."""
        begin = self.begins[name] + first * out.itemsize
        out.copy_(self.memory[begin : begin + out.nbytes].view(out.dtype))

    def place(self, name: str, x: Tensor) -> Tensor:
        """Where ``x``, all that there is of ``name``, lies."""
        begin = self.begins[name]
        return self.memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape)


@dataclass(frozen=True)
class LiveReader:
    """Whole tensors as a place of elements (``Reader``), for a rank that asks for what it holds of them."""

    shards: Mapping[str, Shard]

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``Reader``."""
        there = self.shards[name]
        out.copy_(elements(there.tensor, first - there.first, first - there.first + out.numel()))


def places(rows: Sequence[Row]) -> tuple[dict[str, int], int]:
    """Where each of ``rows`` begins in memory that holds one after the other, and how large that is."""
    sizes = [(row.last - row.first) * row.dtype.itemsize for row in rows]
    begins = offsets([*sizes, 0])
    return dict(zip((row.name for row in rows), begins, strict=False)), begins[-1]


def offsets(nbytes: Iterable[int]) -> list[int]:
    """Where tensors of so many bytes begin in flat memory."""
    begins, end = [], 0
    for size in nbytes:
        begins.append(end)
        end += round_up(size, ALIGN_BYTES)
    return begins


@dataclass(frozen=True)
class Source:
    """A whole state: what there is, who reads each place, and ``ties`` from further names."""

    tensors: Mapping[str, StoredTensor]
    readers: Mapping[str, Reader]
    ties: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Elements ``first`` to ``last`` of ``name``, flat, in aligned CPU memory of their own."""
        stored = self.tensors[name]
        align = memory.ALIGN_BYTES["cpu"]
        out = memory.allocate((last - first) * stored.dtype.itemsize, align).elements(stored.dtype)
        for extent, begin, end in stored.within(first, last):
            reader = self.readers[extent.place]
            reader.read_into(name, begin - extent.first, out[begin - first : end - first])
        return out

    def layout(self, kind: str) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of what there is of ``kind``, one of ``KINDS``, by names without it."""
        return {
            name.removeprefix(kind): (stored.shape, stored.dtype)
            for name, stored in self.tensors.items()
            if name.startswith(kind)
        }


def assemble(
    by_place: Mapping[str, Iterable[Row]], error: type[Exception] = CheckpointRejected
) -> dict[str, StoredTensor]:
    """Where each tensor is, from what each place has, in the order of the hash.

    Raises:
        error: a hole, which would be filled with whatever memory held; an overlap, two versions of one
            element; an edge inside a canonical block; or the places do not mean the same tensor.
    """
    known: dict[str, tuple[str, Row]] = {}
    found: dict[str, list[Extent]] = {}
    for place, rows in by_place.items():
        for row in rows:
            first_place, first = known.setdefault(row.name, (place, row))
            if row[1:3] != first[1:3] or row.order != first.order:
                raise error(
                    f"{row.name[:80]!r}: expected {_shown(first)}, as in {first_place}, got {_shown(row)} in "
                    f"{place}: these are not shards of one state"
                )
            found.setdefault(row.name, []).append(Extent(row.first, row.last, place))
    for name, (_, row) in known.items():
        found[name].sort(key=lambda extent: (extent.first, extent.last))
        _require_complete(name, row, found[name], error)
    ordered = sorted((row for _, row in known.values()), key=lambda row: row.order or UNORDERED)
    return {
        row.name: StoredTensor(row.shape, row.dtype, tuple(found[row.name]), row.order) for row in ordered
    }


def _require_complete(name: str, row: Row, extents: Sequence[Extent], error: type[Exception]) -> None:
    end, length = 0, math.prod(row.shape)
    for extent in extents:
        on_edges = extent.first % BLOCK_ELEMENTS == 0 and (
            extent.last % BLOCK_ELEMENTS == 0 or extent.last == length
        )
        if extent.first != end or extent.last < end or not on_edges:
            break
        end = extent.last
    else:
        if end == length and (length or len(extents) == 1):
            return
    got = ", ".join(f"{x.first} to {x.last} in {x.place}" for x in extents[:8])
    raise error(
        f"{name[:80]!r}: expected shards that follow on each other at multiples of {BLOCK_ELEMENTS}, up to "
        f"the end at {length}, each once, got {got}: these are not all shards of one state"
    )


def rows_to_json(rows: Iterable[Row]) -> Json:
    """As they travel."""
    return [
        [x.name, list(x.shape), dtype_name(x.dtype), x.first, x.last, x.order and list(x.order)] for x in rows
    ]


def rows_from_json(rows: Json) -> list[Row]:
    """What ``rows_to_json`` made; CheckpointRejected if anything else did."""
    _require(isinstance(rows, list), "shards", "a list", rows)
    return [_row(each) for each in rows]


def stored_to_json(tensors: Mapping[str, StoredTensor], ties: Mapping[str, str]) -> Json:
    """As a manifest has them: for each name its shape, its dtype and ``[[first, last, place], ...]``."""
    return {
        "entries": {
            name: [list(x.shape), dtype_name(x.dtype), [[e.first, e.last, e.place] for e in x.extents]]
            for name, x in tensors.items()
        },
        "ties": dict(ties),
    }


def stored_from_json(body: Json) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """What ``stored_to_json`` made; CheckpointRejected unless every tensor is there exactly once."""
    _require(isinstance(body, dict) and set(body) == {"entries", "ties"}, "pieces", "entries and ties", body)
    entries, ties = body["entries"], body["ties"]
    _require(isinstance(entries, dict), "pieces", "an object", entries)
    parsed = {}
    for name, entry in entries.items():
        _require(isinstance(entry, list) and len(entry) == 3, name, "shape, dtype and pieces", entry)
        shape, dtype = _layout(_require_name(name), entry[0], entry[1])
        _require(isinstance(entry[2], list), name, "a list of pieces", entry[2])
        parsed[name] = StoredTensor(
            shape, dtype, _in_order(name, shape, [_extent(name, each) for each in entry[2]])
        )
    sound = isinstance(ties, dict) and all(
        isinstance(first, str) and MODEL + first in parsed for first in ties.values()
    )
    _require(sound, "ties", "names of entries", ties)
    return parsed, ties


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_bounded(sizes: Sequence[int]) -> bool:
    """Whether torch can have such a shape; an empty one may have any sizes beside its zero."""
    return len(sizes) <= MAX_DIMS and math.prod(max(size, 1) for size in sizes) <= MAX_ELEMENTS


def _in_order(name: str, shape: Shape, extents: list[Extent]) -> tuple[Extent, ...]:
    extents = sorted(extents, key=lambda extent: (extent.first, extent.last))
    end = 0
    for extent in extents:
        _require(extent.first >= end, name, f"each element once, but {extent.place} begins", extent.first)
        _require(extent.first == end, name, f"a piece that begins at element {end}", extent.first)
        _require(extent.last >= extent.first, name, f"a piece that ends after {extent.first}", extent.last)
        end = extent.last
    _require(end == math.prod(shape), name, f"{math.prod(shape)} elements", end)
    if len(extents) > 1 and not math.prod(shape):
        _require(False, name, "one piece of nothing", len(extents))
    return tuple(extents)


def _row(row: Json) -> Row:
    expected = "name, shape, dtype, first, last and order"
    _require(isinstance(row, list) and len(row) == 6, "shards", expected, row)
    name, shape, dtype, first, last, order = row
    return Row(
        _require_name(name),
        *_layout(name, shape, dtype),
        _count(name, first),
        _count(name, last),
        _order(name, order),
    )


def _order(name: str, order: Json) -> Order | None:
    if order is None:
        return None
    sound = isinstance(order, list) and len(order) == 2 and isinstance(order[1], str)
    _require(sound, name, "a number and a key, or none", order)
    return _count(name, order[0]), order[1]


def _extent(name: str, extent: Json) -> Extent:
    _require(isinstance(extent, list) and len(extent) == 3, name, "first, last and place", extent)
    first, last, place = extent
    _require(isinstance(place, str), name, "the name of a file", place)
    return Extent(_count(name, first), _count(name, last), place)


def _require_name(name: Json) -> str:
    ok = isinstance(name, str) and name.startswith(KINDS)
    _require(ok, "shards", f"a name that begins with {', '.join(KINDS[:-1])} or {KINDS[-1]}", name)
    return str(name)


def _layout(name: str, shape: Json, dtype: Json) -> tuple[Shape, torch.dtype]:
    ok = isinstance(shape, list) and all(map(_is_count, shape)) and is_bounded(shape)
    _require(ok, name, "a shape that a tensor can have", shape)
    _require(isinstance(dtype, str) and dtype in DTYPES, name, f"a dtype among {', '.join(DTYPES)}", dtype)
    return tuple(shape), DTYPES[dtype]


def _count(name: str, value: Json) -> int:
    _require(_is_count(value), name, "a whole number", value)
    return int(value)


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _shown(row: Row) -> str:
    return f"{dtype_name(row.dtype)}{list(row.shape)} at place {row.order} of the hash"


def _require(ok: bool, where: str, expected: str, got: object) -> None:
    if not ok:
        shown = repr(got)[:80].encode("ascii", "backslashreplace").decode()
        raise CheckpointRejected(
            f"shards of a state: {where[:80]}: expected {expected}, got {shown}: take another one"
        )
