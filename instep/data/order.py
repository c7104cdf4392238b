"""Which sample stands at a global position of an endless stream: a pure function that knows no rank. Pure.

A sampler that shuffles a list with a generator makes the order depend on what drew from that generator
before, costs memory for the list, and has to be replayed after a restart. Here the order of an epoch is a
permutation that is *computed*, one element at a time: any process can ask for any position of any epoch,
and all get the same answer, so a run can be resumed or resized at any step.

The permutation is a small block cipher keyed by (seed, epoch). An index is written as two digits of the
smallest base whose square holds all samples, and a Feistel network turns any mixing function into a
bijection on pairs of digits:

    left   right                      left'  = right
      |      |         one round:     right' = (left + mix(right + key)) mod base
      +------+

A pair beyond the last sample is fed through the network again until it is a sample ("cycle walking"), which
keeps the map a bijection on the samples alone. With a power of two as the domain up to three of four pairs
would be such; with a square it is a share of at most about ``2 / sqrt(num_samples)``.

With G micro-batches of m samples to a step, the stream is dealt out as

    position   0 .. m-1       | m .. 2m-1     | ... | (G-1)*m .. G*m-1 | G*m .. G*m+m-1 | ...
               step 0         |               |     |                  | step 1
               micro-batch 0  | micro-batch 1 | ... | micro-batch G-1  | micro-batch 0  | ...

so the samples of a micro-batch follow from (seed, step, micro-batch) alone, on any rank. A rank needs no
position of its own, and after a restart or resize the step says where to go on.

Sources: M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
SIAM J. Comput. 17(2), 1988; J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002
(the cipher on two digits of any base, and cycle walking); G. Steele, D. Lea and C. Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014 (splitmix64: the mixing function and the stream of keys).
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

__all__ = ["sample_at"]

# Luby and Rackoff's four rounds are enough for wide digits only: the orders of ten samples are visibly
# uneven over many epochs with four, hardly with eight. A call costs about 4 microseconds.
NUM_ROUNDS = 8
MASK_64 = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment, 2**64 divided by the golden ratio, odd


def sample_at(position: int, num_samples: int, seed: int) -> int:
    """The sample, in ``range(num_samples)``, at ``position`` of the stream that ``seed`` names.

    Positions ``e * num_samples`` to ``(e + 1) * num_samples - 1`` are epoch ``e`` and hold every sample
    exactly once, in an order of their own. Nothing is dropped or padded. Takes microseconds and no memory.
    Raises ``ValueError`` for a position below 0, fewer than one sample, or a seed outside 64 bits.
    """
    if num_samples < 1:
        raise ValueError(f"expected num_samples >= 1, got {num_samples}: the data set is empty")
    if position < 0:
        raise ValueError(f"expected position >= 0, got {position}: the stream begins at 0")
    epoch, index = divmod(position, num_samples)
    keys = round_keys(seed, epoch)
    base = isqrt(num_samples - 1) + 1
    while True:
        index = feistel(index, base, keys)
        if index < num_samples:
            return index


@lru_cache(maxsize=64)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """The first outputs of a splitmix64 stream whose start is a hash of (seed, epoch)."""
    if not 0 <= seed <= MASK_64:
        raise ValueError(f"expected 0 <= seed < 2**64, got {seed}: choose a seed that fits in 64 bits")
    start = mix(mix(seed + GOLDEN_GAMMA) + epoch)
    return tuple(mix(start + i * GOLDEN_GAMMA) for i in range(1, NUM_ROUNDS + 1))


def feistel(index: int, base: int, keys: tuple[int, ...]) -> int:
    """Permute ``range(base**2)``, one round per key."""
    left, right = divmod(index, base)
    for key in keys:
        left, right = right, (left + mix(right + key)) % base
    return left * base + right


def mix(z: int) -> int:
    """splitmix64's finaliser: a bijection on 64 bits in which every input bit moves about half the output."""
    z &= MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK_64
    return z ^ z >> 31
