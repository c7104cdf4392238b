"""A state stored elsewhere: which file, snapshot or rank has which elements of each tensor.

    model:embed.weight   (50257, 768)    0 ........ 9646080 | 9646080 ........ 19292160 | ...
                                         file of rank 0       file of rank 1              file of rank 2

Each element is stored exactly once: neither a hole, which would be filled with whatever memory held, nor two
versions of one element. A reader asks for a range of a box, and gets it from as many places as it takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Protocol

import torch
from torch import Tensor

from instep import memory
from instep.errors import CheckpointRejected
from instep.mesh.axes import round_up
from instep.state.shards import (
    KINDS,
    MODEL,
    Box,
    Json,
    Order,
    Shape,
    Shard,
    count_before,
    grid,
    numbers,
)

# The dtypes that files can hold, by their code in safetensors.
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
ALIGN_BYTES = memory.ALIGN_BYTES["cpu"]  # of tensors in flat memory
MAX_DIMS = 64  # of a torch tensor
MAX_BOX_DIMS = 8  # of a tensor divided into boxes, which have 2**dims corners
MAX_ELEMENTS = 2**48
UNORDERED = (1 << 62, "")  # after all that the hash is over
SHARD = f"a name that begins with {', '.join(KINDS)}, shape, dtype, first, last, order, perhaps a box"
ENTRY = f"a name that begins with {', '.join(KINDS)} with shape, dtype and pieces"
EXTENT = "first, last, place, perhaps a box"
CHUNK_ELEMENTS = 1 << 20  # read at a time where boxes differ


@dataclass(frozen=True)
class Extent:
    """Elements ``first`` to ``last`` (exclusive) of ``box``, in ``place``: a file, or a rank."""

    first: int
    last: int
    place: str
    box: Box | None = None


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the state and where its elements are, each exactly once."""

    shape: Shape
    dtype: torch.dtype
    extents: tuple[Extent, ...]
    order: Order | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Reader(Protocol):
    """One place of elements."""

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """Fill the flat ``out`` with the place's elements of ``name``, from its element ``first`` on."""


def offsets(nbytes: Iterable[int]) -> list[int]:
    """Where tensors of these sizes begin in flat memory, and where the last one ends."""
    return [0, *accumulate(round_up(size, ALIGN_BYTES) for size in nbytes)]


def views(layout: Sequence[tuple[torch.dtype, Shape]], flat: Tensor) -> list[Tensor]:
    """Tensors of these dtypes and shapes, one after the other in the bytes of ``flat``."""
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in layout]
    return [
        flat[begin : begin + size].view(dtype).view(shape)
        for begin, size, (dtype, shape) in zip(offsets(sizes), sizes, layout, strict=False)
    ]


@dataclass(frozen=True)
class Source:
    """A whole state: its tensors, a reader for each place, and ``ties`` from further names.

    ``frozen`` parameters were left out, and are taken from the model: hashes by name, to compare.
    """

    tensors: Mapping[str, StoredTensor]
    readers: Mapping[str, Reader]
    ties: Mapping[str, str] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str, first: int, last: int, box: Box | None = None) -> Tensor:
        """Elements ``first`` to ``last`` of ``box`` of ``name``, flat, in aligned CPU memory of their own."""
        stored = self.tensors[name]
        out = _room(last - first, stored.dtype)
        for extent in stored.extents:
            reader = self.readers[extent.place]
            if extent.box == box:
                begin, end = max(first, extent.first), min(last, extent.last)
                if begin < end:
                    reader.read_into(name, begin - extent.first, out[begin - first : end - first])
                continue
            for begin in range(first, last, CHUNK_ELEMENTS):  # the numbers of all would take 8 bytes each
                end = min(begin + CHUNK_ELEMENTS, last)
                wanted = numbers(stored.shape, box, begin, end)
                _read_across(reader, name, extent, stored.shape, wanted, out[begin - first : end - first])
        return out

    def read_whole(self, name: str) -> Tensor:
        """All of ``name``, in its shape."""
        stored = self.tensors[name]
        return self.read(name, 0, stored.numel).view(stored.shape)

    def layout(self, kind: str) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of the tensors of ``kind``, one of ``KINDS``, by names without it."""
        return {
            name.removeprefix(kind): (stored.shape, stored.dtype)
            for name, stored in self.tensors.items()
            if name.startswith(kind)
        }


def _room(count: int, dtype: torch.dtype) -> Tensor:
    return memory.allocate(count * dtype.itemsize, ALIGN_BYTES).elements(dtype)


def _read_across(
    reader: Reader, name: str, extent: Extent, shape: Shape, wanted: Tensor, out: Tensor
) -> None:
    """Fill ``out``, elements ``wanted`` of the whole tensor, with those of them that ``extent`` has."""
    low, high = int(wanted[0]), int(wanted[-1]) + 1
    begin = max(extent.first, count_before(shape, extent.box, low))
    end = min(extent.last, count_before(shape, extent.box, high))
    if begin >= end:
        return
    values = _room(end - begin, out.dtype)
    reader.read_into(name, begin - extent.first, values)
    found = numbers(shape, extent.box, begin, end)
    at = torch.searchsorted(wanted, found)  # all are below the last one wanted
    hit = wanted[at] == found
    width = out.itemsize  # bytes, because not all dtypes can be indexed
    out.view(torch.uint8).view(-1, width)[at[hit]] = values.view(torch.uint8).view(-1, width)[hit]


def assemble(
    by_place: Mapping[str, Iterable[Shard]], error: type[Exception] = CheckpointRejected
) -> dict[str, StoredTensor]:
    """Where each tensor is, from the shards of each place, in the order of the hash.

    Raises:
        error: a hole or an overlap, or the places do not mean the same tensor.
    """
    known: dict[str, tuple[str, Shard]] = {}
    found: dict[str, list[Extent]] = {}
    for place, shards in by_place.items():
        for x in shards:
            first_place, first = known.setdefault(x.name, (place, x))
            if x[1:3] != first[1:3] or x.order != first.order:
                raise error(
                    f"{x.name[:80]!r}: expected {_shown(first)}, as in {first_place}, got {_shown(x)} in "
                    f"{place}: these are not shards of one state"
                )
            found.setdefault(x.name, []).append(Extent(x.first, x.last, place, x.box))
    ordered = sorted((x for _, x in known.values()), key=lambda x: x.order or UNORDERED)
    return {
        x.name: StoredTensor(x.shape, x.dtype, _complete(x.name, x.shape, found[x.name], error), x.order)
        for x in ordered
    }


def _complete(
    name: str, shape: Shape, extents: Sequence[Extent], error: type[Exception]
) -> tuple[Extent, ...]:
    """``extents`` in order; ``error`` unless they have each element once.

    Flat ranges must make up whole boxes, and boxes the tensor. Boxes do so if their corners, counted +1 and
    -1 by turns, cancel out but for the tensor's own:

        + . - + . -         + . . . . -
        . a . . b .    =    .         .
        - . + - . +         - . . . . +
    """
    in_order = tuple(sorted(extents, key=lambda x: (x.box or (), x.first, x.last)))
    ends: dict[Box | None, int] = {}
    sound = len({x.place for x in extents}) == len(extents) > 0
    for x in in_order:
        sound &= x.first == ends.get(x.box, 0) and (x.first < x.last or len(extents) == 1)
        ends[x.box] = x.last
    sound &= all(end == count_before(shape, box, math.prod(shape)) for box, end in ends.items())
    boxes = [box for box in ends if box is not None]
    if boxes:
        cut = grid(shape, boxes[0])
        sound &= len(boxes) == len(ends) and all(grid(shape, box) == cut for box in boxes)
        sound &= _corners(boxes) == _corners([tuple((0, size) for size in cut)])
    if not sound:
        got = ", ".join(
            f"{x.first} to {x.last}{f' of box {list(x.box)}' if x.box else ''} in {x.place[:80]}"
            for x in in_order[:8]
        )
        raise error(
            f"{name[:80]!r}: expected shards that together have each of {math.prod(shape)} elements once, "
            f"one shard per place, got {got or 'none'}: these are not all shards of one state"
        )
    return in_order


def _corners(boxes: Iterable[Box]) -> dict[tuple[int, ...], int]:
    found: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        for corner in product(*(((start, 1), (stop, -1)) for start, stop in box)):
            found[tuple(at for at, _ in corner)] += math.prod(sign for _, sign in corner)
    return {corner: count for corner, count in found.items() if count}


def shards_to_json(shards: Iterable[Shard]) -> Json:
    """``shards`` without their values, as they travel."""
    return [
        [x.name, list(x.shape), dtype_name(x.dtype), x.first, x.last, x.order and list(x.order)]
        + ([] if x.box is None else [x.box])
        for x in shards
    ]


def shards_from_json(shards: Json) -> list[Shard]:
    """The inverse of ``shards_to_json``; CheckpointRejected for anything else."""
    _require(isinstance(shards, list), "a list", shards)
    return [_shard(each) for each in shards]


def stored_to_json(tensors: Mapping[str, StoredTensor], ties: Mapping[str, str]) -> Json:
    """The entry of a manifest: for each name its shape, its dtype and ``[[first, last, place], ...]``."""
    return {
        "entries": {
            name: [
                list(x.shape),
                dtype_name(x.dtype),
                [[e.first, e.last, e.place] + ([] if e.box is None else [e.box]) for e in x.extents],
            ]
            for name, x in tensors.items()
        },
        "ties": dict(ties),
    }


def stored_from_json(body: Json) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The inverse of ``stored_to_json``; CheckpointRejected unless each element is there exactly once."""
    sound = isinstance(body, dict) and set(body) == {"entries", "ties"}
    _require(sound and all(isinstance(x, dict) for x in body.values()), "entries and ties", body)
    parsed = {}
    for name, entry in body["entries"].items():
        sound = isinstance(entry, list) and len(entry) == 3 and _is_tensor(name, *entry[:2])
        _require(sound and isinstance(entry[2], list), ENTRY, [name, entry])
        shape, dtype = tuple(entry[0]), DTYPES[entry[1]]
        extents = [_extent(shape, each) for each in entry[2]]
        parsed[name] = StoredTensor(shape, dtype, _complete(name, shape, extents, CheckpointRejected))
    ties = body["ties"]
    sound = all(isinstance(first, str) and MODEL + first in parsed for first in ties.values())
    _require(sound, "ties to names of entries", ties)
    return parsed, ties


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_bounded(sizes: Sequence[int]) -> bool:
    """Whether torch can have such a shape; an empty one may have any sizes beside its zero."""
    return len(sizes) <= MAX_DIMS and math.prod(max(size, 1) for size in sizes) <= MAX_ELEMENTS


def _shard(x: Json) -> Shard:
    sound = isinstance(x, list) and len(x) in (6, 7) and _is_tensor(*x[:3])
    _require(sound and _is_range(tuple(x[1]), x[3], x[4], x[6:]) and _is_order(x[5]), SHARD, x)
    name, shape, dtype, first, last, order, *box = x
    order = None if order is None else (order[0], order[1])
    return Shard(name, tuple(shape), DTYPES[dtype], first, last, order, _box(box))


def _extent(shape: Shape, x: Json) -> Extent:
    sound = isinstance(x, list) and len(x) in (3, 4) and isinstance(x[2], str)
    _require(sound and _is_range(shape, x[0], x[1], x[3:]), EXTENT, x)
    return Extent(x[0], x[1], x[2], _box(x[3:]))


def _is_tensor(name: Json, shape: Json, dtype: Json) -> bool:
    is_shape = isinstance(shape, list) and all(map(_is_count, shape)) and is_bounded(shape)
    is_name = isinstance(name, str) and name.startswith(KINDS)
    return is_name and is_shape and isinstance(dtype, str) and dtype in DTYPES


def _is_range(shape: Shape, first: Json, last: Json, box: list[Json]) -> bool:
    if not (_is_count(first) and _is_count(last)):
        return False
    if not box:
        return True
    if not (isinstance(box[0], list) and 0 <= len(box[0]) - len(shape) <= 1 and len(box[0]) <= MAX_BOX_DIMS):
        return False
    pairs = all(isinstance(x, list) and len(x) == 2 and all(map(_is_count, x)) for x in box[0])
    if not (pairs and all(start < stop for start, stop in box[0])):
        return False
    cut = grid(shape, tuple(map(tuple, box[0])))
    fits = len(cut) == len(shape) or (box[0][0][0] == 0 and cut[0] > 1 and cut[0] * cut[1] == shape[0])
    return fits and all(stop <= size for (_, stop), size in zip(box[0], cut, strict=True))


def _is_order(x: Json) -> bool:
    return x is None or (isinstance(x, list) and len(x) == 2 and _is_count(x[0]) and isinstance(x[1], str))


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _box(found: list[Json]) -> Box | None:
    return tuple((start, stop) for start, stop in found[0]) if found else None


def _shown(x: Shard) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)} at place {x.order} of the hash"


def _require(ok: bool, expected: str, got: object) -> None:
    if not ok:
        shown = repr(got)[:160].encode("ascii", "backslashreplace").decode()
        raise CheckpointRejected(f"shards of a state: expected {expected}, got {shown}: take another one")
