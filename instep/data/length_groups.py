"""The order of the stream, changed such that the samples of a micro-batch have similar lengths. Pure.

A micro-batch of texts is padded to its longest, so where lengths are mixed, most of what is computed may be
padding. Here the stream is cut into windows of a few hundred samples, at the ends of epochs, too; the samples
of a window are sorted by length and dealt out, one run of neighbours to each micro-batch, in an order of
micro-batches that is random again:

    a window's samples         31  7 12 30  8 29 11  6 13 28        two samples to a micro-batch
    sorted                      6  7| 8 11|12 13|28 29|30 31
    stands in the stream       12 13|30 31| 6  7|28 29| 8 11

It stays a pure function of the position: every epoch has each of its samples once, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from instep.data.order import sample_at

KEPT = 4  # windows; a rank reads in one or two


class LengthGroups:
    """The samples at positions of a stream of samples with ``lengths``, grouped within ``window`` positions.

    ``stream(positions)`` are the samples where nothing is grouped. Micro-batches of ``micro_size`` begin at
    its multiples.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        stream: Callable[[range], list[int]],
        *,
        micro_size: int,
        window: int,
        seed: int,
    ) -> None:
        self._lengths = lengths
        self._stream = stream
        self._micro_size, self._window, self._seed = micro_size, window, seed
        self._kept: dict[int, list[int]] = {}

    def samples_at(self, positions: range) -> list[int]:
        """The sample at each of ``positions``."""
        return [self._sample_at(position) for position in positions]

    def _sample_at(self, position: int) -> int:
        num_samples = len(self._lengths)
        epoch, number = position // num_samples, position // self._window
        first = max(epoch * num_samples, number * self._window)
        end = min((epoch + 1) * num_samples, (number + 1) * self._window)
        if first not in self._kept:
            self._kept[first] = self._grouped(first, end)
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[first][position - first]

    def _grouped(self, first: int, end: int) -> list[int]:
        samples = sorted(self._stream(range(first, end)), key=lambda sample: self._lengths[sample])
        cuts = [first, *range((first // self._micro_size + 1) * self._micro_size, end, self._micro_size), end]
        dealt: list[list[int]] = [[] for _ in cuts[1:]]
        taken = 0
        for i in range(len(dealt)):
            slot = sample_at(first * len(dealt) + i, len(dealt), self._seed)
            size = cuts[slot + 1] - cuts[slot]
            dealt[slot] = samples[taken : taken + size]
            taken += size
        return [sample for micro_batch in dealt for sample in micro_batch]
