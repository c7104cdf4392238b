"""How a number that a smaller format has not is rounded: to the nearest that it has, or to a random one.

Rounding to nearest loses what is small beside a sum, each time to the same side. Stochastic rounding goes up
as often as the number is near to the upper neighbour, so that sums are right on average: 0.3 becomes 1 in 30
of 100 cases, else 0. Its random bits are no stream that somebody draws from: they are a function of (seed,
step, node, parameter, element), the same wherever the node is rounded, in whatever bucket and pieces.

    E[g] = mix(mix(parameter) + element // 16)        g: a granule, 16 elements; made once per bucket
    K[g] = mix(E[g] ^ k0) + k1                        k0, k1: of (seed, step, node), BLAKE2b
    h    = K[g] ^ lane[element % 16]
    h    = h * a;  h = h ^ (h >> 15);  h = h * b      modulo 2**32, shifts are logical
    bits = the upper ones of h: 16 to round to bfloat16, 24 to round to integers

``mix`` is C. Wellons' lowbias32 (a search for 32-bit hash functions without bias), the last line its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from instep.ordered.keys import derive
from instep.ordered.tree import Node

GRANULE = 16  # elements; all parameters begin on multiples of it
MASK = 0xFFFFFFFF
A, B = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9
UPPER = -0x10000  # the bits of float32 that bfloat16 has


class Stretch(NamedTuple):
    """Elements ``first`` and ``length - 1`` following of a parameter, by its number, lie at ``offset``."""

    parameter: int
    offset: int
    length: int
    first: int = 0


class Rounding(Protocol):
    """Rounds elements of a bucket, in place: ``x`` are ``first`` and following, of ``node``."""

    def begin(self, *key: int) -> None:
        """A reduction begins, whose random numbers are keyed by ``key``."""

    def to_bfloat16(self, x: Tensor, node: Node, first: int) -> None:
        """To numbers that bfloat16 has."""

    def to_integers(self, x: Tensor, node: Node, first: int) -> None:
        """To whole numbers; ``x`` is contiguous."""


class ToNearest:
    """To the nearest one, and of two to the even one."""

    def begin(self, *key: int) -> None:
        """Nothing: it is always the same."""

    def to_bfloat16(self, x: Tensor, node: Node, first: int) -> None:
        x.copy_(x.bfloat16())

    def to_integers(self, x: Tensor, node: Node, first: int) -> None:
        x.round_()


class Stochastic:
    """To the lower or the upper neighbour, in proportion; what has no neighbours nearer than itself stays.

    ``stretches`` lie in a bucket of ``num_elements`` on ``device``. The proportions are exact to 2**-16 of a
    step of bfloat16, and to 2**-24 of one of integers.
    """

    def __init__(
        self, seed: int, stretches: Sequence[Stretch], num_elements: int, device: torch.device
    ) -> None:
        self.seed, self.stretches, self.num_elements, self.device = seed, stretches, num_elements, device
        self._key: tuple[int, ...] = ()

    def begin(self, *key: int) -> None:
        self._key = key

    def to_bfloat16(self, x: Tensor, node: Node, first: int) -> None:
        bits = _shifted(self.random_bits(x.numel(), node, first), 16)
        bits.add_(x.view(torch.int32)).bitwise_and_(UPPER)
        rounded = bits.view(torch.float32)
        if not x.sum().isfinite():  # the bits of a nan may carry over to a number
            rounded = torch.where(x.isfinite(), rounded, x.bfloat16())
        x.copy_(rounded)

    def to_integers(self, x: Tensor, node: Node, first: int) -> None:
        drawn = _shifted(self.random_bits(x.numel(), node, first), 8)
        below = x.floor()
        up = x.sub_(below).mul_(1 << 24) > drawn
        torch.add(below, up, out=x)

    def random_bits(self, length: int, node: Node, first: int) -> Tensor:
        """32 of each of ``length`` elements of the bucket, (length,) int32."""
        key = derive(self.seed, "node", *self._key, *node)
        granules = self._hashes[first // GRANULE : (first + length) // GRANULE]
        keys = _mix(granules ^ _signed(key)).add_(_signed(key >> 32))
        drawn = keys.view(-1, 1) ^ self._lanes  # (granules, 16)
        drawn.mul_(A)
        drawn.bitwise_xor_(_shifted(drawn, 15)).mul_(_signed(B))
        return drawn.view(-1)

    @cached_property
    def _lanes(self) -> Tensor:
        with torch.inference_mode(False):  # they outlive what they are made in
            lanes = torch.arange(1, GRANULE + 1, dtype=torch.int32, device=self.device)
            return _mix(lanes.mul_(_signed(GOLDEN)))

    @cached_property
    def _hashes(self) -> Tensor:
        """Of each granule of the bucket, (num_elements / 16,)."""
        with torch.inference_mode(False):
            found = torch.zeros(self.num_elements // GRANULE, dtype=torch.int32, device="cpu")
            for x in self.stretches:
                first, begin, count = x.first // GRANULE, x.offset // GRANULE, -(-x.length // GRANULE)
                numbers = torch.arange(first, first + count, device="cpu").to(torch.int32)
                of_parameter = _mix(torch.tensor([x.parameter + 1], dtype=torch.int32, device="cpu"))
                found[begin : begin + count] = _mix(numbers.add_(of_parameter))
            return found.to(self.device)


def _mix(x: Tensor) -> Tensor:
    """Each of ``x``, int32, to another one, in place."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(A)
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(B))
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, by: int) -> Tensor:
    """``x >> by``, where no sign comes in from the left."""
    return (x >> by).bitwise_and_(MASK >> by)


def _signed(word: int) -> int:
    """The int32 of the lower 32 bits of ``word``."""
    return ((word & MASK) ^ 1 << 31) - (1 << 31)
