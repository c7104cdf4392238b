"""The order of ``data/order.py``, for many positions at once: the same samples, by arrays of numpy.

One position after the other costs microseconds each, most of them Python's own. Who reads goes through the
stream, so samples are computed in blocks of positions, and those of the last blocks are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from instep.data.order import round_keys

BLOCK = 512  # positions; as dear as 50 of them one by one
KEPT = 16  # blocks: a micro-batch has samples of two or three, and a program may have several loaders

Words = NDArray[np.uint64]


class Shuffled:
    """The samples of each epoch in an order of its own, or in that of their numbers."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle

    def samples_at(self, positions: range) -> list[int]:
        """The sample at each of ``positions``, which follow each other."""
        num_samples = self.num_samples
        if not self.shuffle:
            return [position % num_samples for position in positions]
        found: list[int] = []
        while len(found) < len(positions):
            epoch, index = divmod(positions[len(found)], num_samples)
            offset = index % BLOCK
            block = shuffled(epoch, index - offset, num_samples, self.seed)
            found += block[offset : offset + len(positions) - len(found)]
        return found


@lru_cache(maxsize=KEPT)
def shuffled(epoch: int, first: int, num_samples: int, seed: int) -> list[int]:
    """``sample_at`` of the ``BLOCK`` positions from ``first`` on within an epoch."""
    keys, base = round_keys(seed, epoch), isqrt(num_samples - 1) + 1
    end = min(first + BLOCK, num_samples)
    samples = _feistel(np.arange(first, end, dtype=np.uint64), base, keys)
    while (beyond := samples >= num_samples).any():
        samples[beyond] = _feistel(samples[beyond], base, keys)
    return samples.tolist()


def _feistel(index: Words, base: int, keys: Sequence[int]) -> Words:
    size = np.uint64(base)
    left, right = np.divmod(index, size)
    for key in keys:
        left, right = right, (left + _mix(right + np.uint64(key)) % size) % size
    return left * size + right


def _mix(z: Words) -> Words:
    """``mix`` of each."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
