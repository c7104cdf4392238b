"""The format of the sum tree's nodes: what every leaf, every sum and the root are rounded to.

Each node is computed in float32 from its children and rounded to the format at once. So its value depends on
its children alone, whoever computes it, and whatever travels, up the tree or back, is in the format already:
no rank rounds anything because it is sent.

    leaf 0 --round--.
                    +--round-- [0,2) --.
    leaf 1 --round--'                  +--round-- [0,4)   bytes of a node of n elements:
    leaf 2 --round--.                  |                      float32     4 n
                    +--round-- [2,4) --'                      bfloat16    2 n
    leaf 3 --round--'                                         int8        n + n / 1024

In memory a node stays in float32, rounded, where ranks add it; ``encode`` and ``decode`` are for the way
between two ranks, and exact. The mean is the root times a factor, after decoding.

int8: 4096 elements of one parameter, counted from its first one, share a scale, which is a power of two. So
q * scale is exact, and a node that was rounded is rounded to itself: its scale is found in its values again.
Where one of them is inf or nan, or so large that it would be rounded to inf, the scale is nan, and so are all
of them. Edges of slices lie on edges of blocks (``ordered.blocks.place``).

float64 stays float64 in every format; complex numbers are pairs. Rounding to nearest breaks ties to even; for
"stochastic" see ``ordered/rounding.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES
from instep.mesh.axes import round_up
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.rounding import GRANULE, Rounding, Stochastic, Stretch, ToNearest
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Node

PIECE = PIECE_BYTES // torch.float32.itemsize
SCALE_BYTES = torch.float32.itemsize
MAGNITUDE, MANTISSA, MANTISSA_BITS = 0x7FFFFFFF, 0x7FFFFF, 23
LARGEST_EXPONENT = 254  # of a finite number
LARGEST, EXPONENT_OF_LARGEST = 0x7E0000, 6  # 127 is 2**6 * (1 + LARGEST / 2**23)
NAN = 0x7FC00000


class BucketNodes:
    """The nodes of one bucket, in the format that they are computed in: nothing is rounded, nothing encoded.

    At construction: the bucket's elements are cut into ``num_slices`` of ``slice_length``. In a reduction:
    ``begin``; for each node ``round``, or ``add``, which makes one of its children. Where it travels:
    ``encode`` and ``decode``; where all slices of a root have come, ``decode_mean``. A root that is not
    rounded travels as the mean that it will be, and into its place.

    ``rounds``: whether there is anything to round. ``wire_dtype``, ``wire_length``: of a slice that travels.
    """

    rounds: ClassVar[bool] = False

    def __init__(self, slice_length: int, num_slices: int, dtype: torch.dtype) -> None:
        self.slice_length, self.num_slices, self.dtype = slice_length, num_slices, dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def wire_length(self) -> int:
        return self.slice_length

    @cached_property
    def wire_bytes(self) -> int:
        """Of all slices of a node."""
        return self.num_slices * self.wire_length * self.wire_dtype.itemsize

    def begin(self, *key: int) -> None:
        """A reduction begins, whose random numbers are keyed by ``key``."""

    def clear(self, x: Tensor) -> None:
        """What lies in ``x``, a whole bucket, between the parameters, must not count: a leaf comes."""

    def round(self, x: Tensor, node: Node, first: int = 0) -> None:
        """``x``, elements ``first`` and following of the bucket, becomes the value of ``node``."""

    def add(
        self, left: Tensor, right: Tensor, node: Node, first: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """``out``, or ``left``, becomes the value of ``node``, of whose children these are the values."""
        return torch.add(left, right, out=left if out is None else out)

    def encode(self, x: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        """Slices ``x`` of a node, which begin at element ``first``, as they travel: in ``out``, if given."""
        return x if out is None else out.copy_(x)

    def decode(self, wire: Tensor, first: int = 0) -> Tensor:
        """What was given to ``encode``; it may be the memory of ``wire``."""
        return wire

    def gathered(self, home: Tensor, scratch: Scratch) -> Tensor:
        """Memory for the slices of a root, as they travel, that are to come into ``home``."""
        return home

    def decode_mean(self, wire: Tensor, scale: float, home: Tensor, first: int = 0) -> None:
        """The slices of a root, which are in ``gathered``, become its mean in ``home``, from ``first`` on."""


class RoundedNodes(BucketNodes):
    """Nodes in a smaller format than they are computed in; ``rounding`` says how they are rounded."""

    rounds = True

    def __init__(self, slice_length: int, num_slices: int, dtype: torch.dtype, rounding: Rounding) -> None:
        super().__init__(slice_length, num_slices, dtype)
        self._rounding = rounding

    def begin(self, *key: int) -> None:
        self._rounding.begin(*key)

    def round(self, x: Tensor, node: Node, first: int = 0) -> None:
        for start, piece in _pieces(x):
            self._round(piece, node, first + start)

    def add(
        self, left: Tensor, right: Tensor, node: Node, first: int = 0, out: Tensor | None = None
    ) -> Tensor:
        out = left if out is None else out
        for start, piece in _pieces(out):
            end = start + len(piece)
            torch.add(left[start:end], right[start:end], out=piece)
            self._round(piece, node, first + start)
        return out

    def gathered(self, home: Tensor, scratch: Scratch) -> Tensor:
        num_slices = len(home) // self.slice_length
        return scratch.take(num_slices * self.wire_length, self.wire_dtype, home.device)

    def encode(self, x: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            num_slices = len(x) // self.slice_length
            out = torch.empty(num_slices * self.wire_length, dtype=self.wire_dtype, device=x.device)
        rows = out.split(self.wire_length)
        for k, (values, row) in enumerate(zip(x.split(self.slice_length), rows, strict=True)):
            for start, piece in _pieces(values):
                self._encode(piece, row, start, first + k * self.slice_length)
        return out

    def decode(self, wire: Tensor, first: int = 0) -> Tensor:
        num_slices = len(wire) // self.wire_length
        out = torch.empty(num_slices * self.slice_length, dtype=self.dtype, device=wire.device)
        self._decode_all(wire, 1.0, out, first)
        return out

    def decode_mean(self, wire: Tensor, scale: float, home: Tensor, first: int = 0) -> None:
        self._decode_all(wire, scale, home, first)

    def _decode_all(self, wire: Tensor, scale: float, out: Tensor, first: int) -> None:
        rows = wire.split(self.wire_length)
        for k, (values, row) in enumerate(zip(out.split(self.slice_length), rows, strict=True)):
            for start, piece in _pieces(values):
                self._decode(piece, row, start, first + k * self.slice_length)
                if scale != 1.0:
                    piece.mul_(scale)

    def _round(self, x: Tensor, node: Node, first: int) -> None:
        """``round``, of a piece that fits into a core's cache."""
        raise NotImplementedError

    def _encode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        """A piece, elements ``start`` and following of the slice that begins at ``first``, into ``row``."""
        raise NotImplementedError

    def _decode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        """What ``_encode`` has done, undone."""
        raise NotImplementedError


class BFloat16Nodes(RoundedNodes):
    """Nodes that have the upper 16 bits of float32."""

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def _round(self, x: Tensor, node: Node, first: int) -> None:
        self._rounding.to_bfloat16(x, node, first)

    def _encode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        row[start : start + len(x)].copy_(x)

    def _decode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        x.copy_(row[start : start + len(x)])


class Int8Nodes(RoundedNodes):
    """Nodes of whole numbers from -127 to 127, times a power of two per block.

    A slice travels as its numbers, then the scales of its blocks. Every slice has room for as many scales as
    there are in the one with most of them.
    """

    def __init__(
        self,
        slice_length: int,
        num_slices: int,
        dtype: torch.dtype,
        rounding: Rounding,
        stretches: Sequence[Stretch],
        device: torch.device,
    ) -> None:
        super().__init__(slice_length, num_slices, dtype, rounding)
        with torch.inference_mode(False):  # it outlives what it is made in
            self._block_of = _block_of(stretches, slice_length * num_slices).to(device)  # by granule
        edges = [int(x) for x in self._block_of[:: slice_length // GRANULE]] + [int(self._block_of[-1]) + 1]
        most = max(after - before for before, after in pairwise(edges))
        self._wire_length = slice_length + round_up(most * SCALE_BYTES, GRANULE)
        of_one = self._block_of.view(-1, BLOCK_ELEMENTS // GRANULE)  # which stand between two edges of slices
        self._is_whole = (of_one == of_one[:, :1]).all(1).cpu()
        self._gaps = _gaps(stretches, slice_length * num_slices)

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def wire_length(self) -> int:
        return self._wire_length

    def clear(self, x: Tensor) -> None:
        if self._gaps:
            torch._foreach_zero_([x[begin:end] for begin, end in self._gaps])

    def _round(self, x: Tensor, node: Node, first: int) -> None:
        rows, block_of = self._rows(x, first)
        scales = _scales(rows, block_of)[block_of].view(-1, 1)
        rows.mul_(scales.reciprocal())
        self._rounding.to_integers(x, node, first)
        rows.mul_(scales).add_(0.0)  # there is no -0.0 in this format

    def _encode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        rows, block_of = self._rows(x, first + start)
        scales = _scales(rows, block_of)
        self._scales_of(row, start, first)[: len(scales)] = scales
        numbers = row[start : start + len(x)].view(torch.int8)
        numbers.copy_((rows * scales.reciprocal()[block_of].view(-1, 1)).view(-1))

    def _decode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        rows, block_of = self._rows(x, first + start)
        x.copy_(row[start : start + len(x)].view(torch.int8))
        rows.mul_(self._scales_of(row, start, first)[block_of].view(-1, 1))

    def _rows(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """``x`` in rows of which none is of two blocks, and the block of each, counted from the first one."""
        blocks = slice(first // BLOCK_ELEMENTS, (first + len(x)) // BLOCK_ELEMENTS)
        width = BLOCK_ELEMENTS if self._is_whole[blocks].all() else GRANULE
        block_of = self._block_of[first // GRANULE : (first + len(x)) // GRANULE : width // GRANULE]
        return x.view(-1, width), (block_of - block_of[0]).long()

    def _scales_of(self, row: Tensor, start: int, first: int) -> Tensor:
        """Those of a slice that travels, from that of element ``start`` on."""
        begin, now = self._block_of[first // GRANULE], self._block_of[(first + start) // GRANULE]
        return row[self.slice_length :].view(torch.float32)[int(now - begin) :]


TOLERANCES = {"float32": 0.0, "bfloat16": 1.6e-2, "int8": 0.3}
FORMATS = tuple(TOLERANCES)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class NodeFormat:
    """What nodes are rounded to, and how; ``seed`` keys the random numbers of stochastic rounding.

    Raises:
        ValueError: an unknown word, or a rounding for nodes that are not rounded.
    """

    nodes: str = "float32"
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.nodes not in FORMATS:
            raise ValueError(f"nodes={self.nodes!r}: expected one of {', '.join(FORMATS)}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: expected one of {', '.join(ROUNDINGS)}")
        if self.nodes == "float32" and self.rounding != "nearest":
            raise ValueError(
                f"rounding={self.rounding!r} with nodes='float32', which are not rounded any further: choose "
                "a smaller format, or leave the rounding out"
            )

    @property
    def rounds(self) -> bool:
        """Whether nodes have another format than they are computed in."""
        return self.nodes != "float32"

    @property
    def minds_order(self) -> bool:
        """Whether a value depends on which element of its parameter it is."""
        return self.nodes == "int8" or self.rounding == "stochastic"

    @property
    def tolerance(self) -> float:
        """How far a gradient may be from the sum that was not rounded, relative to its norm."""
        return TOLERANCES[self.nodes]

    def __str__(self) -> str:
        return f"{self.nodes}, {self.rounding}" if self.rounds else self.nodes

    def block(self, dtype: torch.dtype) -> int:
        """Elements of a parameter that no edge of a slice may cut, in a bucket of ``dtype``."""
        return BLOCK_ELEMENTS if self.nodes == "int8" and dtype == torch.float32 else 1

    def of_bucket(
        self,
        stretches: Sequence[Stretch],
        slice_length: int,
        num_slices: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BucketNodes:
        """For a bucket of ``num_slices`` of ``slice_length`` elements of ``dtype``; what lies in it where."""
        if self.nodes == "float32" or dtype != torch.float32:
            return BucketNodes(slice_length, num_slices, dtype)
        rounding: Rounding = ToNearest()
        if self.rounding == "stochastic":
            rounding = Stochastic(self.seed, stretches, slice_length * num_slices, device)
        if self.nodes == "bfloat16":
            return BFloat16Nodes(slice_length, num_slices, dtype, rounding)
        return Int8Nodes(slice_length, num_slices, dtype, rounding, stretches, device)


IN_FLOAT32 = NodeFormat()


def _pieces(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """``x`` in pieces that fit into a core's cache, which cut no block, and where each begins."""
    return ((start, x[start : start + PIECE]) for start in range(0, len(x), PIECE))


def _scales(rows: Tensor, block_of: Tensor) -> Tensor:
    """Of the blocks of ``rows``, found in their values."""
    # Bits of floats without their signs are in order, those of nan above all.
    magnitudes = (rows.view(torch.int32) & MAGNITUDE).amax(1)
    largest = torch.zeros(int(block_of[-1]) + 1, dtype=torch.int32, device=rows.device)
    return _smallest_scale(largest.scatter_reduce_(0, block_of, magnitudes, "amax"))


def _smallest_scale(largest: Tensor) -> Tensor:
    """The smallest power of two of which no value is more than 127 times, by the bits of the largest one.

    A normal number, so that its inverse is one. Of inf and nan, and of what would be rounded to inf: nan.
    """
    is_more = (largest & MANTISSA) > LARGEST
    exponent = ((largest >> MANTISSA_BITS) - EXPONENT_OF_LARGEST + is_more).clamp_(min=1)
    scales = exponent << MANTISSA_BITS
    return scales.masked_fill_(exponent > LARGEST_EXPONENT - EXPONENT_OF_LARGEST, NAN).view(torch.float32)


def _gaps(stretches: Sequence[Stretch], num_elements: int) -> list[tuple[int, int]]:
    """Where nothing of a parameter lies: from, to."""
    taken = sorted((x.offset, x.offset + x.length) for x in stretches if x.length)
    ends, begins = [0, *(end for _, end in taken)], [*(begin for begin, _ in taken), num_elements]
    return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def _block_of(stretches: Sequence[Stretch], num_elements: int) -> Tensor:
    """The number of the block that each granule is of, (num_elements / 16,); padding is of the one before.

    Where a canonical block begins, and nothing of a parameter lies across it, there is one of padding.
    """
    begins = set(range(0, num_elements, BLOCK_ELEMENTS))
    for x in stretches:
        for begin in range(x.offset, x.offset + x.length, BLOCK_ELEMENTS):
            begins.add(begin)
            inside = round_up(begin + 1, BLOCK_ELEMENTS)
            if inside < min(begin + BLOCK_ELEMENTS, x.offset + x.length):
                begins.discard(inside)
    granules = torch.arange(0, num_elements, GRANULE, device="cpu")
    edges = torch.tensor(sorted(begins), dtype=torch.int64, device="cpu")
    return (torch.searchsorted(edges, granules, right=True) - 1).to(torch.int32)
