"""Samples that lie in shards and are read in sequence, dealt out such that every rank can do so.

A shard (a file of lines, a tar archive, a table) is cheap to read from front to back, and dear to jump about
in. If the stream of an epoch ran through one shard after the other, every rank would read all shards, and
throw away what belongs to the micro-batches of others. So an epoch is cut into as many *lanes* as a step has
micro-batches, and micro-batch i of every step is the next piece of lane i:

    shards, in the epoch's order    | c c c c c c | a a a | d d d d d | b b b b b b |
    lanes                           | 0 0 0 0 0 | 1 1 1 1 1 | 2 2 2 2 2 | 3 3 3 3 3 |
    step 0, two to a micro-batch      0 0         1 1         2 2         3 3
    step 1                                0 0         1 1         2 2         3 3

Whichever rank has micro-batch i reads on in lane i, and a shard is opened by one reader, or by two where a
lane ends in the middle of it. Where an epoch ends in the middle of a step, the next one has lanes of its own;
how many positions of a lane lie before any position has a formula. So which sample stands where is a function
of the position alone, each epoch has every sample once, and any number of ranks can go on anywhere: it costs
the samples of a shard that are read past. For that the sizes of the shards have to be known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from instep.data.order import sample_at

KEPT = 2  # epochs whose order of shards is remembered: a step may have samples of two
END = object()
Key = Callable[[int], None]
"""Keys what is drawn by the number of a sample, which is about to be read."""


class ShardOrder:
    """Which sample stands at a position of the stream; samples are numbered through the shards as given.

    ``batch_size`` samples to a step, ``micro_size`` to a micro-batch, which is the width of a lane.
    """

    def __init__(
        self, sizes: Sequence[int], *, batch_size: int, micro_size: int, seed: int, shuffle: bool
    ) -> None:
        self._sizes = sizes
        self._firsts = [0, *accumulate(sizes)]  # number of each shard's first sample
        self._num_samples = self._firsts[-1]
        self._batch_size, self._micro_size = batch_size, micro_size
        self._seed, self._shuffle = seed, shuffle
        self._kept: dict[int, tuple[list[int], list[int]]] = {}

    def samples_at(self, positions: range) -> list[int]:
        """The sample at each of ``positions``."""
        return [self._sample_at(position) for position in positions]

    def _sample_at(self, position: int) -> int:
        epoch = position // self._num_samples
        begin = epoch * self._num_samples
        left = position % self._batch_size // self._micro_size * self._micro_size  # edges of the lane
        right = left + self._micro_size
        lanes_before = self._left_of(left, begin + self._num_samples) - self._left_of(left, begin)
        in_lane = self._left_of(right, position) - self._left_of(left, position)
        place = lanes_before + in_lane - (self._left_of(right, begin) - self._left_of(left, begin))
        shards, begins = self._epoch(epoch)
        number = bisect_right(begins, place) - 1
        return self._firsts[shards[number]] + place - begins[number]

    def _left_of(self, edge: int, position: int) -> int:
        """How many of the positions before ``position`` are, within their steps, before ``edge``."""
        steps, rest = divmod(position, self._batch_size)
        return steps * edge + min(rest, edge)

    def _epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """The shards in the order of ``epoch``, and where each begins in it."""
        if epoch not in self._kept:
            num = len(self._sizes)
            shards = [sample_at(epoch * num + i, num, self._seed) for i in range(num)]
            shards = shards if self._shuffle else list(range(num))
            self._kept[epoch] = shards, [0, *accumulate(self._sizes[shard] for shard in shards[:-1])]
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[epoch]


@dataclass
class _Open:
    """A shard that is being read: its rows by number, or its samples in sequence, ``following`` the next."""

    rows: Any
    samples: Iterator[Any]
    following: int = 0


class Shards:
    """Reads samples, by number, out of shards that ``open_shard`` opens, in sequence where it can.

    ``open_shard(shard)`` gives the samples of one of ``shards``, the same ones in the same order whenever it
    is asked: an iterable, or rows by number, which are then not read past. As many shards stay open as there
    are lanes.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open_shard: Callable[[Any], Iterable[Any]],
        sizes: Sequence[int] | None,
        num_lanes: int,
    ) -> None:
        self.shards, self.open_shard = shards, open_shard
        self.sizes = [self._count(shard) for shard in shards] if sizes is None else list(map(int, sizes))
        if len(self.sizes) != len(shards) or min(self.sizes, default=0) < 0:
            raise ValueError(
                f"expected the sizes of {len(shards)} shards, each at least 0, got {len(self.sizes)}"
                f"{f', one of them {min(self.sizes)}' if self.sizes else ''}"
            )
        self._firsts = [0, *accumulate(self.sizes)]
        self._num_kept = num_lanes + 1
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()  # by epoch and shard

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, epoch: int, sample: int, key: Key) -> Any:
        """``sample``, after those before it in its shard, if they have not been read just now.

        Whatever is read is keyed, what is read past too: then also what keeps drawing, such as a buffer in
        which samples are shuffled, gives the same whoever reads and wherever they have begun.

        Raises:
            ValueError: the shard has another number of samples.
        """
        shard, offset = self._locate(sample)
        opened = self._opened(epoch, shard, offset, key)
        if opened.rows is not None:
            key(sample)
            return opened.rows[offset]
        while opened.following <= offset:
            key(sample - offset + opened.following)
            value = next(opened.samples, END)
            if value is END:
                raise self._unlike(shard, str(opened.following))
            opened.following += 1
        if opened.following == self.sizes[shard]:
            if next(opened.samples, END) is not END:
                raise self._unlike(shard, "more")
            self._close(epoch, shard)
        return value

    def where(self, sample: int) -> str:
        """Shard and place of ``sample``, for messages."""
        shard, offset = self._locate(sample)
        return f"number {offset} of shard {self.shards[shard]!r:.200}"

    def close(self) -> None:
        """Nothing stays open."""
        for at in list(self._open):
            self._close(*at)

    def _locate(self, sample: int) -> tuple[int, int]:
        shard = bisect_right(self._firsts, sample) - 1
        return shard, sample - self._firsts[shard]

    def _opened(self, epoch: int, shard: int, offset: int, key: Key) -> _Open:
        opened = self._open.get((epoch, shard))
        if opened is None or opened.following > offset:
            self._close(epoch, shard)
            key(self._firsts[shard])
            content: Any = self.open_shard(self.shards[shard])
            rows = content if _has_rows(content) else None
            if rows is not None and len(rows) != self.sizes[shard]:
                raise self._unlike(shard, str(len(rows)))
            opened = self._open[epoch, shard] = _Open(rows, iter(()) if rows is not None else iter(content))
        self._open.move_to_end((epoch, shard))
        while len(self._open) > self._num_kept:
            self._close(*next(iter(self._open)))
        return opened

    def _close(self, epoch: int, shard: int) -> None:
        opened = self._open.pop((epoch, shard), None)
        close = getattr(opened and opened.samples, "close", None)  # of a generator, and with it its file
        if close is not None:
            close()

    def _count(self, shard: Any) -> int:
        content: Any = self.open_shard(shard)
        return len(content) if _has_rows(content) else sum(1 for _ in content)

    def _unlike(self, shard: int, found: str) -> ValueError:
        return ValueError(
            f"shard {self.shards[shard]!r:.200} was to have {self.sizes[shard]} samples, and open_shard gave "
            f"{found}: pass the sizes as they are, and give the same samples whenever a shard is opened"
        )

    def __getstate__(self) -> Any:
        return {**vars(self), "_open": OrderedDict()}  # to a worker process, which opens its own


def _has_rows(content: Any) -> bool:
    return hasattr(content, "__getitem__") and hasattr(content, "__len__")
