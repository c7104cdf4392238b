"""Each rank's share of a data set, for a loop of one's own: nothing dropped, nothing padded.

torch's ``DistributedSampler`` makes all shards equally long by repeating the first samples, or by dropping
the last ones. Repeated samples are trained on twice and counted twice in an evaluation. Here the shards are
a partition: every sample is in exactly one, and their lengths differ by at most one.

    contiguous(8, rank, 3):   0 0 1 1 1 2 2 2        strided(8, rank, 3):   0 1 2 0 1 2 0 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from instep.data.order import sample_at

__all__ = ["ShardSampler", "contiguous", "strided"]


def contiguous(num_samples: int, rank: int, world_size: int) -> range:
    """The ``rank``-th of ``world_size`` neighbouring runs of ``range(num_samples)``."""
    check_share(num_samples, rank, world_size)
    return range(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def strided(num_samples: int, rank: int, world_size: int) -> range:
    """Every ``world_size``-th of ``range(num_samples)``, from ``rank`` on."""
    check_share(num_samples, rank, world_size)
    return range(rank, num_samples, world_size)


SHARDS: dict[str, Callable[[int, int, int], range]] = {"contiguous": contiguous, "strided": strided}


class ShardSampler:
    """A rank's samples, epoch by epoch: ``DataLoader(data, batch_size, sampler=ShardSampler(...))``.

    Each ``iter()`` is the next epoch. All ranks shuffle the whole data set by the same permutation, keyed by
    (``seed``, epoch), and then take their shard of it, so a rank sees other samples in every epoch.
    ``set_epoch`` need not be called; after a restart it continues from a given epoch.

    Unlike torch's ``DistributedSampler`` it neither pads nor drops, so ranks may differ by one sample, and
    then perhaps by one batch. Where every rank must take equally many steps, stop at the shortest.

    Raises ``ValueError`` for a rank outside the world or an unknown kind of ``shards``.
    """

    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        shards: str = "strided",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if shards not in SHARDS:
            raise ValueError(f"expected shards to be one of {', '.join(SHARDS)}, got {shards!r}")
        self.num_samples = num_samples
        self.shard = SHARDS[shards](num_samples, rank, world_size)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[int]:
        """The samples of the coming epoch; the epoch is counted here, even if it is not read to its end."""
        start = self.epoch * self.num_samples
        self.epoch += 1
        if not self.shuffle:
            return iter(self.shard)
        return (sample_at(start + index, self.num_samples, self.seed) for index in self.shard)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` epoch ``epoch``."""
        if epoch < 0:
            raise ValueError(f"expected epoch >= 0, got {epoch}: epochs are counted from 0")
        self.epoch = epoch


def check_share(num_samples: int, rank: int, world_size: int) -> None:
    if num_samples < 0:
        raise ValueError(f"expected num_samples >= 0, got {num_samples}")
    if world_size < 1:
        raise ValueError(f"expected world_size >= 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected 0 <= rank < world_size({world_size}), got {rank}: count ranks from 0")
