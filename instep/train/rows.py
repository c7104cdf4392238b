"""How many ranks make a row, which has all of a sharded state once: arithmetic of ``parallel.shard_ranks``.

Four ranks in rows of two, on a mesh of dp(2) * shard(2):

    row 0     rank 0: first half     rank 1: second half
    row 1     rank 2: first half     rank 3: second half
"""

from __future__ import annotations


def check_rows(num_ranks: int, shard_ranks: int) -> None:
    """Raise ``ValueError`` unless ``num_ranks`` ranks are so many whole rows of ``shard_ranks``."""
    if not shard_ranks or num_ranks % shard_ranks == 0:
        return
    below = num_ranks - num_ranks % shard_ranks
    raise ValueError(
        f"{num_ranks} rank{'s' * (num_ranks > 1)} for rows of parallel.shard_ranks {shard_ranks}: use "
        f"{f'{below} or ' if below else ''}{below + shard_ranks} ranks, another parallel.shard_ranks, or 0 "
        "to divide the state among all ranks"
    )


def shard_axis(num_ranks: int, shard_ranks: int) -> int:
    """The size of the mesh's axis ``shard``: 1 if nobody asked for rows, else ``shard_ranks``.

    A run may go on with another number of ranks, which cannot be cut like that. Then rows are longer, the
    next number that divides the ranks, so that none of them has to hold more than was asked for.
    """
    if not shard_ranks:
        return 1
    return next((n for n in range(shard_ranks, num_ranks) if num_ranks % n == 0), num_ranks)
