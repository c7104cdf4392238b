"""The format of the sum tree's nodes: what every leaf, every sum and the root are rounded to.

Each node is computed in float32 from its children and immediately rounded to the format. So its value depends
on its children alone, whoever computes it, and everything that is sent, up the tree or back, is already in
the format: no rank rounds anything because it is sent.

    leaf 0 --round--.
                    +--round-- [0,2) --.
    leaf 1 --round--'                  +--round-- [0,4)   bytes of a node of n elements:
    leaf 2 --round--.                  |                      float32     4 n
                    +--round-- [2,4) --'                      bfloat16    2 n
    leaf 3 --round--'                                         int8        n + n / 1024

In memory a node stays in float32, rounded; ``encode`` and ``decode`` convert it for a message, exactly. The
mean is the root times a factor, after decoding.

int8: each 4096 elements of one parameter, counted from its first one, share a scale, a power of two. So
q * scale is exact, and a rounded node is rounded to itself: its values give its scale again. If one of the
elements is inf or nan, or so large that it would be rounded to inf, the scale is nan, and so are all of them.
Slices begin at block edges (``reduce.blocks.place``).

float64 stays float64 in every format; complex numbers are pairs. Rounding to nearest breaks ties to even.

Rounding to nearest loses what is small beside a sum, each time in the same direction. Stochastic rounding
goes up with a probability of the distance to the lower neighbour, so sums are unbiased: 0.3 becomes 1 in 30
of 100 cases, else 0. Its random bits are a function of (seed, step, node, parameter, element), the same
wherever the node is rounded, in whatever bucket and pieces:

    E[g] = mix(mix(parameter) + element // 16)        g: a granule, 16 elements; computed once per bucket
    K[g] = mix(E[g] ^ k0) + k1                        k0, k1: of (seed, step, node), BLAKE2b
    h    = K[g] ^ lane[element % 16]
    h    = h * a;  h = h ^ (h >> 15);  h = h * b      modulo 2**32, shifts are logical
    bits = the upper ones of h: 16 to round to bfloat16, 24 to round to integers

``mix`` is C. Wellons' lowbias32 (a search for 32-bit hash functions without bias), the last line its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES
from instep.mesh.axes import round_up
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.reduce.tree import Node
from instep.rng.keys import derive

PIECE = PIECE_BYTES // torch.float32.itemsize
SCALE_BYTES = torch.float32.itemsize
GRANULE = 16  # elements; every parameter begins at a multiple
# Bits of float32.
MAGNITUDE, MANTISSA, MANTISSA_BITS = 0x7FFFFFFF, 0x7FFFFF, 23
LARGEST_EXPONENT = 254  # of a finite number
LARGEST, EXPONENT_OF_LARGEST = 0x7E0000, 6  # 127 is 2**6 * (1 + LARGEST / 2**23)
NAN = 0x7FC00000
IN_BFLOAT16 = -0x10000
# Constants of the hash.
MASK, A, B, GOLDEN = 0xFFFFFFFF, 0x7FEB352D, 0x846CA68B, 0x9E3779B9


class Stretch(NamedTuple):
    """Elements ``first`` to ``first + length`` of a parameter, by its number, are stored at ``offset``."""

    parameter: int
    offset: int
    length: int
    first: int = 0


class BucketNodes:
    """The nodes of one bucket, in the format they are computed in: neither rounded nor encoded.

    The bucket is ``num_slices`` slices of ``slice_length`` elements. In a reduction: ``begin``; ``round`` for
    each leaf, ``add`` for each sum; ``encode`` and ``decode`` around a message; ``decode_mean`` when all
    slices of a root have been gathered. A root that is not rounded is sent already scaled, and received in
    its final place.

    ``rounds``: whether there is anything to round. ``wire_dtype``, ``wire_length``: of an encoded slice.
    """

    rounds: ClassVar[bool] = False

    def __init__(self, slice_length: int, num_slices: int, dtype: torch.dtype) -> None:
        self.slice_length, self.num_slices, self.dtype = slice_length, num_slices, dtype
        self.wire_dtype, self.wire_length = dtype, slice_length

    @cached_property
    def wire_bytes(self) -> int:
        """Of all encoded slices of a node."""
        return self.num_slices * self.wire_length * self.wire_dtype.itemsize

    def begin(self, *key: int) -> None:
        """Start a reduction, which draws its random numbers by ``key``."""

    def clear(self, x: Tensor) -> None:
        """Zero the padding in ``x``, a whole bucket, where it counts, before a leaf is stored there."""

    def round(self, x: Tensor, node: Node, first: int = 0) -> None:
        """Round ``x``, elements of the bucket from ``first`` on, in place to the value of ``node``."""

    def add(
        self, left: Tensor, right: Tensor, node: Node, first: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Write the value of ``node``, the sum of these children, to ``out``, by default ``left``."""
        return torch.add(left, right, out=left if out is None else out)

    def encode(self, x: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        """Encode ``x``, slices of a node from element ``first`` on, into ``out`` if given."""
        return x if out is None else out.copy_(x)

    def decode(self, wire: Tensor, first: int = 0) -> Tensor:
        """Undo ``encode``; the result may share the memory of ``wire``."""
        return wire

    def decode_mean(self, wire: Tensor, scale: float, home: Tensor, first: int = 0) -> None:
        """Decode the slices of a root into ``home``, times ``scale``."""


class RoundedNodes(BucketNodes):
    """Nodes in a smaller format. They are rounded to nearest, or stochastically if ``random`` is given."""

    rounds = True

    def __init__(
        self, slice_length: int, num_slices: int, wire_dtype: torch.dtype, random: RandomBits | None
    ) -> None:
        super().__init__(slice_length, num_slices, torch.float32)
        self.wire_dtype, self._random = wire_dtype, random

    def begin(self, *key: int) -> None:
        if self._random is not None:
            self._random.key = key

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

    def encode(self, x: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            num_slices = len(x) // self.slice_length
            out = torch.empty(num_slices * self.wire_length, dtype=self.wire_dtype, device=x.device)
        for at, start, piece, row in self._rows(x, out, first):
            self._encode(piece, row, start, at)
        return out

    def decode(self, wire: Tensor, first: int = 0) -> Tensor:
        num_slices = len(wire) // self.wire_length
        out = torch.empty(num_slices * self.slice_length, dtype=self.dtype, device=wire.device)
        self.decode_mean(wire, 1.0, out, first)
        return out

    def decode_mean(self, wire: Tensor, scale: float, home: Tensor, first: int = 0) -> None:
        for at, start, piece, row in self._rows(home, wire, first):
            self._decode(piece, row, start, at)
            if scale != 1.0:
                piece.mul_(scale)

    def _rows(self, x: Tensor, wire: Tensor, first: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Pieces of the slices in ``x``: where the slice and, in it, the piece begins, and its wire row."""
        rows = wire.split(self.wire_length)
        for k, (values, row) in enumerate(zip(x.split(self.slice_length), rows, strict=True)):
            for start, piece in _pieces(values):
                yield first + k * self.slice_length, start, piece, row

    # By format, for a piece: elements from ``start`` on of the slice that begins at ``first``.
    def _round(self, x: Tensor, node: Node, first: int) -> None: ...
    def _encode(self, x: Tensor, row: Tensor, start: int, first: int) -> None: ...
    def _decode(self, x: Tensor, row: Tensor, start: int, first: int) -> None: ...


class BFloat16Nodes(RoundedNodes):
    """Nodes of the upper 16 bits of float32. Stochastic rounding is exact to 2**-16 of a step."""

    def _round(self, x: Tensor, node: Node, first: int) -> None:
        if self._random is None:
            x.copy_(x.bfloat16())
            return
        bits = _shifted(self._random.draw(len(x), node, first), 16)
        bits.add_(x.view(torch.int32)).bitwise_and_(IN_BFLOAT16)
        rounded = bits.view(torch.float32)
        if not x.sum().isfinite():  # the bits of a nan may carry over to a number
            rounded = torch.where(x.isfinite(), rounded, x.bfloat16())
        x.copy_(rounded)

    def _encode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        row[start : start + len(x)].copy_(x)

    def _decode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        x.copy_(row[start : start + len(x)])


class Int8Nodes(RoundedNodes):
    """Nodes of integers from -127 to 127, times a power of two per block.

    An encoded slice is its integers, then the scales of its blocks, with room for the scales of the slice
    that has most. Stochastic rounding is exact to 2**-24.
    """

    def __init__(
        self,
        slice_length: int,
        num_slices: int,
        random: RandomBits | None,
        stretches: Sequence[Stretch],
        device: torch.device,
    ) -> None:
        super().__init__(slice_length, num_slices, torch.uint8, random)
        with torch.inference_mode(False):  # it is kept
            self._block_of = _block_of(stretches, slice_length * num_slices).to(device)  # by granule
        edges = [int(x) for x in self._block_of[:: slice_length // GRANULE]] + [int(self._block_of[-1]) + 1]
        most = max(after - before for before, after in pairwise(edges))
        self.wire_length = slice_length + round_up(most * SCALE_BYTES, GRANULE)
        by_block = self._block_of.view(-1, BLOCK_ELEMENTS // GRANULE)
        self._is_whole = (by_block == by_block[:, :1]).all(1).cpu()
        self._gaps = _gaps(stretches, slice_length * num_slices)

    def clear(self, x: Tensor) -> None:
        if self._gaps:
            torch._foreach_zero_([x[begin:end] for begin, end in self._gaps])

    def _round(self, x: Tensor, node: Node, first: int) -> None:
        rows, block_of = self._in_rows(x, first)
        scales = _scales(rows, block_of)[block_of].view(-1, 1)
        rows.mul_(scales.reciprocal())
        if self._random is None:
            x.round_()
        else:
            drawn = _shifted(self._random.draw(len(x), node, first), 8)
            below = x.floor()
            up = x.sub_(below).mul_(1 << 24) > drawn
            torch.add(below, up, out=x)
        rows.mul_(scales).add_(0.0)  # there is no -0.0 in this format

    def _encode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        rows, block_of = self._in_rows(x, first + start)
        scales = _scales(rows, block_of)
        self._scales_of(row, start, first)[: len(scales)] = scales
        numbers = row[start : start + len(x)].view(torch.int8)
        numbers.copy_((rows * scales.reciprocal()[block_of].view(-1, 1)).view(-1))

    def _decode(self, x: Tensor, row: Tensor, start: int, first: int) -> None:
        rows, block_of = self._in_rows(x, first + start)
        x.copy_(row[start : start + len(x)].view(torch.int8))
        rows.mul_(self._scales_of(row, start, first)[block_of].view(-1, 1))

    def _in_rows(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """``x`` in rows that no block edge cuts, and the block of each row, counted from the first one's."""
        blocks = slice(first // BLOCK_ELEMENTS, (first + len(x)) // BLOCK_ELEMENTS)
        width = BLOCK_ELEMENTS if self._is_whole[blocks].all() else GRANULE
        block_of = self._block_of[first // GRANULE : (first + len(x)) // GRANULE : width // GRANULE]
        return x.view(-1, width), (block_of - block_of[0]).long()

    def _scales_of(self, row: Tensor, start: int, first: int) -> Tensor:
        """The scales in an encoded slice, from that of element ``start`` on."""
        begin, now = self._block_of[first // GRANULE], self._block_of[(first + start) // GRANULE]
        return row[self.slice_length :].view(torch.float32)[int(now - begin) :]


class RandomBits:
    """The random bits of stochastic rounding, for a bucket in which ``stretches`` are stored.

    ``key``: of the reduction, (declared or not, step, ...).
    """

    def __init__(
        self, seed: int, stretches: Sequence[Stretch], num_elements: int, device: torch.device
    ) -> None:
        self.seed, self.key = seed, tuple[int, ...]()
        with torch.inference_mode(False):  # they are kept
            hashes = torch.zeros(num_elements // GRANULE, dtype=torch.int32, device="cpu")
            for x in stretches:
                first, begin, count = x.first // GRANULE, x.offset // GRANULE, -(-x.length // GRANULE)
                numbers = torch.arange(first, first + count, device="cpu").to(torch.int32)
                of_parameter = _mix(torch.tensor([x.parameter + 1], dtype=torch.int32, device="cpu"))
                hashes[begin : begin + count] = _mix(numbers.add_(of_parameter))
            lanes = torch.arange(1, GRANULE + 1, dtype=torch.int32, device="cpu").mul_(_signed(GOLDEN))
            self._hashes, self._lanes = hashes.to(device), _mix(lanes).to(device)

    def draw(self, length: int, node: Node, first: int) -> Tensor:
        """32 bits for each of ``length`` elements of the bucket from ``first`` on, (length,) int32."""
        key = derive(self.seed, "node", *self.key, *node)
        granules = self._hashes[first // GRANULE : (first + length) // GRANULE]
        keys = _mix(granules ^ _signed(key)).add_(_signed(key >> 32))
        drawn = keys.view(-1, 1) ^ self._lanes  # (granules, 16)
        drawn.mul_(A)
        drawn.bitwise_xor_(_shifted(drawn, 15)).mul_(_signed(B))
        return drawn.view(-1)


TOLERANCES = {"float32": 0.0, "bfloat16": 1.6e-2, "int8": 0.3}
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class NodeFormat:
    """The format of nodes, and how they are rounded; ``seed`` keys the bits of stochastic rounding.

    Raises:
        ValueError: an unknown word, or a rounding for nodes that are not rounded.
    """

    nodes: str = "float32"
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.nodes not in TOLERANCES:
            raise ValueError(f"nodes={self.nodes!r}: expected one of {', '.join(TOLERANCES)}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: expected one of {', '.join(ROUNDINGS)}")
        if not self.rounds and self.rounding != "nearest":
            raise ValueError(
                f"rounding={self.rounding!r} with nodes='float32', which are not rounded: choose a smaller "
                "format, or leave the rounding out"
            )

    @property
    def rounds(self) -> bool:
        """Whether the nodes' format is smaller than the one they are computed in."""
        return self.nodes != "float32"

    @property
    def counts_elements(self) -> bool:
        """Whether a node depends on where in its parameter an element is."""
        return self.nodes == "int8" or self.rounding == "stochastic"

    @property
    def tolerance(self) -> float:
        """Largest distance of a gradient from the sum without rounding, relative to its norm."""
        return TOLERANCES[self.nodes]

    def __str__(self) -> str:
        return f"{self.nodes}, {self.rounding}" if self.rounds else self.nodes

    def block(self, dtype: torch.dtype) -> int:
        """Elements of a parameter that no slice edge may cut, in a bucket of ``dtype``."""
        return BLOCK_ELEMENTS if self.nodes == "int8" and dtype == torch.float32 else 1

    def of_bucket(
        self,
        stretches: Sequence[Stretch],
        slice_length: int,
        num_slices: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BucketNodes:
        """For a bucket of ``num_slices`` slices of ``slice_length`` elements, in which ``stretches`` lie."""
        if not self.rounds or dtype != torch.float32:
            return BucketNodes(slice_length, num_slices, dtype)
        random = None
        if self.rounding == "stochastic":
            random = RandomBits(self.seed, stretches, slice_length * num_slices, device)
        if self.nodes == "bfloat16":
            return BFloat16Nodes(slice_length, num_slices, torch.bfloat16, random)
        return Int8Nodes(slice_length, num_slices, random, stretches, device)


IN_FLOAT32 = NodeFormat()


def _pieces(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Pieces of ``x`` that fit into a core's cache and cut no block, and where each begins."""
    return ((start, x[start : start + PIECE]) for start in range(0, len(x), PIECE))


def _scales(rows: Tensor, block_of: Tensor) -> Tensor:
    """The scale of each block in ``rows``: the smallest power of two that keeps all its values within 127.

    A normal number, so that its inverse is one. nan if the block has inf, nan, or a value that would be
    rounded to inf.
    """
    # Without their signs, bits of floats compare as the floats do, and those of nan are the largest.
    magnitudes = (rows.view(torch.int32) & MAGNITUDE).amax(1)
    largest = torch.zeros(int(block_of[-1]) + 1, dtype=torch.int32, device=rows.device)
    largest.scatter_reduce_(0, block_of, magnitudes, "amax")
    is_more = (largest & MANTISSA) > LARGEST
    exponent = ((largest >> MANTISSA_BITS) - EXPONENT_OF_LARGEST + is_more).clamp_(min=1)
    scales = exponent << MANTISSA_BITS
    return scales.masked_fill_(exponent > LARGEST_EXPONENT - EXPONENT_OF_LARGEST, NAN).view(torch.float32)


def _gaps(stretches: Sequence[Stretch], num_elements: int) -> list[tuple[int, int]]:
    """The padding between parameters: from, to."""
    taken = sorted((x.offset, x.offset + x.length) for x in stretches if x.length)
    edges = [(0, 0), *taken, (num_elements, num_elements)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(edges) if end < begin]


def _block_of(stretches: Sequence[Stretch], num_elements: int) -> Tensor:
    """The block number of each granule, (num_elements / 16,); padding belongs to the block before.

    A block of padding begins at each canonical block edge that no block of a parameter crosses.
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


def _mix(x: Tensor) -> Tensor:
    """Hash ``x``, int32, in place."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(A)
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(B))
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, by: int) -> Tensor:
    """``x >> by``, logical."""
    return (x >> by).bitwise_and_(MASK >> by)


def _signed(word: int) -> int:
    """The lower 32 bits of ``word`` as int32."""
    return ((word & MASK) ^ 1 << 31) - (1 << 31)
