"""Which elements of which entry of the state lie where, when no single file or process has all of it.

    model:embed.weight   (50257, 768)    0 ........ 9646080 | 9646080 ........ 19292160 | ...
                                         file of rank 0       file of rank 1              file of rank 2

An entry is all there exactly once: neither a hole, which would be filled with whatever memory held, nor two
versions of one element. Whoever reads asks for a range, and gets it from as many places as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from instep import memory
from instep.checkpoint.manifest import Json
from instep.checkpoint.tensors import ALIGN_BYTES, DTYPES, Contents, Layout, Shape, is_bounded
from instep.errors import CheckpointRejected
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.parts import Part

MODEL, OPTIMIZER = "model:", "optimizer:"
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
Row = tuple[str, Shape, torch.dtype, int, int]
"""A part without its values: name, shape and dtype of the entry, first and last element."""


@dataclass(frozen=True)
class Piece:
    """Elements ``first`` to ``last`` (exclusive), in ``place``: a file, or a rank's copy."""

    first: int
    last: int
    place: str


@dataclass(frozen=True)
class Entry:
    """One tensor of the state and where its elements are, in their order."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, first: int, last: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces of elements ``first`` to ``last``, each with its part of that range."""
        for piece in self.pieces:
            begin, end = max(first, piece.first), min(last, piece.last)
            if begin < end:
                yield piece, begin, end


Entries = Mapping[str, Entry]


class Reader(Protocol):
    """One place of pieces."""

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """Fill the flat ``out`` with what begins at element ``first`` of the piece of ``name``."""


@dataclass(frozen=True)
class Source:
    """A whole state in pieces: what there is, who reads each place, and ``ties`` from further names."""

    entries: Entries
    readers: Mapping[str, Reader]
    ties: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Elements ``first`` to ``last`` of ``name``, flat, in aligned CPU memory of their own."""
        entry = self.entries[name]
        out = memory.allocate((last - first) * entry.dtype.itemsize, ALIGN_BYTES).elements(entry.dtype)
        for piece, begin, end in entry.within(first, last):
            reader = self.readers[piece.place]
            reader.read_into(name, begin - piece.first, out[begin - first : end - first])
        return out

    def whole(self, name: str) -> Tensor:
        """All of ``name``, in its shape."""
        entry = self.entries[name]
        return self.read(name, 0, entry.numel).view(entry.shape)

    def contents(self, kind: str) -> Contents:
        """What there is of the ``kind``, ``MODEL`` or ``OPTIMIZER``, by names without it."""
        layout = {
            name.removeprefix(kind): (entry.shape, entry.dtype)
            for name, entry in self.entries.items()
            if name.startswith(kind)
        }
        return Contents(layout, dict(self.ties) if kind == MODEL else {})


def row(part: Part) -> Row:
    """What ``part`` is."""
    return part.name, part.shape, part.dtype, part.first, part.last


def rows_to_json(rows: Iterable[Row]) -> Json:
    """As they travel."""
    return [[name, list(shape), dtype_name(dtype), first, last] for name, shape, dtype, first, last in rows]


def num_blocks(numel: int) -> int:
    """How many digests so many elements have that begin at a block's edge."""
    return -(-numel // BLOCK_ELEMENTS)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_from_json(rows: Json) -> list[Row]:
    """What ``rows_to_json`` made; CheckpointRejected if anything else did."""
    _require(isinstance(rows, list), "pieces", "a list", rows)
    return [_row(each) for each in rows]


def _row(row: Json) -> Row:
    _require(isinstance(row, list) and len(row) == 5, "pieces", "name, shape, dtype, first and last", row)
    name, shape, dtype, first, last = row
    return _require_name(name), *_layout(name, shape, dtype), _count(name, first), _count(name, last)


def assemble(by_place: Mapping[str, Iterable[Row]]) -> dict[str, Entry]:
    """Where each entry is, from what each place has; CheckpointRejected for a hole or an overlap."""
    layouts: dict[str, tuple[Shape, torch.dtype]] = {}
    found: dict[str, list[Piece]] = {}
    for place, rows in by_place.items():
        for name, shape, dtype, first, last in rows:
            known = layouts.setdefault(name, (shape, dtype))
            _require(known == (shape, dtype), name, f"everywhere {known}", (shape, dtype))
            found.setdefault(name, []).append(Piece(first, last, place))
    return {name: _entry(name, *layouts[name], pieces) for name, pieces in found.items()}


def _entry(name: str, shape: Shape, dtype: torch.dtype, pieces: list[Piece]) -> Entry:
    pieces = sorted(pieces, key=lambda piece: (piece.first, piece.last))
    end = 0
    for piece in pieces:
        _require(piece.first >= end, name, f"each element once, but {piece.place} begins", piece.first)
        _require(piece.first == end, name, f"a piece that begins at element {end}", piece.first)
        _require(piece.last >= piece.first, name, f"a piece that ends after {piece.first}", piece.last)
        end = piece.last
    _require(end == math.prod(shape), name, f"{math.prod(shape)} elements", end)
    if len(pieces) > 1 and not math.prod(shape):
        _require(False, name, "one piece of nothing", len(pieces))
    return Entry(shape, dtype, tuple(pieces))


def to_json(entries: Entries, ties: Mapping[str, str]) -> Json:
    """As a manifest has them: for each name its shape, its dtype and ``[[first, last, place], ...]``."""
    return {
        "entries": {
            name: [list(x.shape), dtype_name(x.dtype), [[p.first, p.last, p.place] for p in x.pieces]]
            for name, x in entries.items()
        },
        "ties": dict(ties),
    }


def from_json(body: Json) -> tuple[dict[str, Entry], dict[str, str]]:
    """What ``to_json`` made; CheckpointRejected unless every entry is there exactly once."""
    _require(isinstance(body, dict) and set(body) == {"entries", "ties"}, "pieces", "entries and ties", body)
    entries, ties = body["entries"], body["ties"]
    _require(isinstance(entries, dict), "pieces", "an object", entries)
    parsed = {}
    for name, entry in entries.items():
        _require(isinstance(entry, list) and len(entry) == 3, name, "shape, dtype and pieces", entry)
        layout = _layout(_require_name(name), entry[0], entry[1])
        _require(isinstance(entry[2], list), name, "a list of pieces", entry[2])
        parsed[name] = _entry(name, *layout, [_piece(name, piece) for piece in entry[2]])
    sound = isinstance(ties, dict) and all(MODEL + str(first) in parsed for first in ties.values())
    _require(sound, "ties", "names of entries", ties)
    return parsed, ties


def _piece(name: str, piece: Json) -> Piece:
    _require(isinstance(piece, list) and len(piece) == 3, name, "first, last and place", piece)
    first, last, place = piece
    _require(isinstance(place, str), name, "the name of a file", place)
    return Piece(_count(name, first), _count(name, last), place)


def _require_name(name: Json) -> str:
    ok = isinstance(name, str) and name.startswith((MODEL, OPTIMIZER))
    _require(ok, "pieces", f"a name that begins with {MODEL} or {OPTIMIZER}", name)
    return str(name)


def _layout(name: str, shape: Json, dtype: Json) -> tuple[Shape, torch.dtype]:
    ok = isinstance(shape, list) and all(map(_is_count, shape)) and is_bounded(shape)
    _require(ok, name, "a shape that a tensor can have", shape)
    _require(isinstance(dtype, str) and dtype in BY_NAME, name, f"a dtype among {', '.join(BY_NAME)}", dtype)
    return tuple(shape), BY_NAME[dtype]


def _count(name: str, value: Json) -> int:
    _require(_is_count(value), name, "a whole number", value)
    return int(value)


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _require(ok: bool, where: str, expected: str, got: object) -> None:
    if not ok:
        shown = repr(got)[:80].encode("ascii", "backslashreplace").decode()
        raise CheckpointRejected(
            f"pieces of a state: {where[:80]}: expected {expected}, got {shown}: take another one"
        )


def require_layout(source: Source, kind: str, expected: Layout) -> None:
    """CheckpointRejected unless what there is of ``kind`` are exactly the tensors that are ``expected``."""
    own = source.contents(kind).layout
    missing, unknown = sorted(expected.keys() - own.keys()), sorted(own.keys() - expected.keys())
    _require(not missing, kind, f"the tensor {missing[:1]}", "none of that name")
    _require(not unknown, kind, f"the {len(expected)} tensors of this model", f"also {unknown[:1]}")
    for name, layout in expected.items():
        _require(own[name] == layout, name, str(layout), own[name])
