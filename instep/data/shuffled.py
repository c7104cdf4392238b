"""The order of ``data/order.py``, for many positions at once: the same samples, by arrays of numpy.

One position after the other costs microseconds each, most of them Python's own. Who reads goes through the
stream, so samples are computed in blocks of positions, and those of the last blocks are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from instep.data.order import GOLDEN_GAMMA, mix, round_keys, sample_at

BLOCK = 512  # positions; as dear as 50 of them one by one
KEPT = 4  # blocks: a micro-batch has samples of two or three, seldom of more
AT_ONCE = 16  # from so many numbers on, arrays are the faster way

Words = NDArray[np.uint64]


class Shuffled:
    """The samples of each epoch in an order of its own, or in that of their numbers."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self._kept: OrderedDict[tuple[int, int], list[int]] = OrderedDict()  # by epoch and first index

    def samples_at(self, positions: range) -> list[int]:
        """The sample at each of ``positions``, which follow each other."""
        num_samples = self.num_samples
        if not self.shuffle:
            return [position % num_samples for position in positions]
        found: list[int] = []
        while len(found) < len(positions):
            epoch, index = divmod(positions[len(found)], num_samples)
            offset = index % BLOCK
            found += self._block(epoch, index - offset)[offset : offset + len(positions) - len(found)]
        return found

    def _block(self, epoch: int, first: int) -> list[int]:
        samples = self._kept.get((epoch, first))
        if samples is None:
            end = min(first + BLOCK, self.num_samples)
            samples = self._kept[epoch, first] = shuffled(epoch, first, end, self.num_samples, self.seed)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return samples


def shuffled(epoch: int, first: int, end: int, num_samples: int, seed: int) -> list[int]:
    """``sample_at`` of the positions ``first`` to ``end`` (exclusive) within an epoch."""
    if end - first < AT_ONCE or num_samples > 2**62:  # squares of larger bases do not fit in 64 bits
        begin = epoch * num_samples
        return [sample_at(begin + i, num_samples, seed) for i in range(first, end)]
    keys, base = round_keys(seed, epoch), isqrt(num_samples - 1) + 1
    samples = _feistel(np.arange(first, end, dtype=np.uint64), base, keys)
    while (beyond := samples >= num_samples).any():
        samples[beyond] = _feistel(samples[beyond], base, keys)
    return samples.tolist()


def keyed(bases: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """For each of ``numbers``, that output of each splitmix64 stream that begins at one of ``bases``."""
    if len(bases) * len(numbers) < AT_ONCE:
        return [[mix(base + number * GOLDEN_GAMMA) for base in bases] for number in numbers]
    distances = _words(numbers) * np.uint64(GOLDEN_GAMMA)
    return _mix(distances[:, None] + _words(bases)).tolist()  # (numbers, bases)


def _words(numbers: Sequence[int]) -> Words:
    return np.array(numbers, dtype=np.uint64)


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
