"""From time to bandwidth: what nccl-tests calls algbw and busbw, and the effective bandwidth of older tables.

    algbw   bytes of the message / time: how fast it was for the caller
    busbw   algbw x a factor that depends on the collective and on W: what each of W links would have to carry
            if the algorithm moved no byte too many; so it can be compared with the hardware, and between
            collectives and numbers of ranks
    effbw   bytes that have to reach another rank, all ranks together / time

S is the size of the message as nccl-tests counts it: of the whole result of all_gather and gather, of the
whole input of reduce_scatter, scatter and all_to_all, of the tensor of the others. W is the number of ranks.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable

# busbw / algbw.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda W: 2 * (W - 1) / W,
    "all_gather": lambda W: (W - 1) / W,
    "reduce_scatter": lambda W: (W - 1) / W,
    "all_to_all": lambda W: (W - 1) / W,
    "broadcast": lambda W: 1.0,
    "reduce": lambda W: 1.0,
    "gather": lambda W: (W - 1) / W,
    "scatter": lambda W: (W - 1) / W,
}
# Messages of S bytes that have to reach another rank, all ranks together. An all-reduce is a sum that comes
# back: W-1 ways there, W-1 ways home.
MESSAGES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda W: 2 * (W - 1),
    "all_gather": lambda W: W - 1,
    "reduce_scatter": lambda W: W - 1,
    "all_to_all": lambda W: W - 1,
    "broadcast": lambda W: W - 1,
    "reduce": lambda W: W - 1,
    "gather": lambda W: (W - 1) / W,
    "scatter": lambda W: (W - 1) / W,
}
# Those whose message is cut into W equal parts; ``count`` is then the elements of one part.
IN_PARTS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
WITH_SUM = frozenset({"all_reduce", "reduce_scatter", "reduce"})
WITH_ROOT = frozenset({"broadcast", "reduce", "gather", "scatter"})


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw of ``collective``; of one rank 0, because nothing has to travel."""
    return FACTORS[collective](num_ranks) if num_ranks > 1 else 0.0


def bytes_moved(collective: str, size_bytes: int, num_ranks: int) -> float:
    """Bytes that have to reach another rank, all ranks together."""
    return size_bytes * MESSAGES[collective](num_ranks)


def figures(collective: str, size_bytes: int, num_ranks: int, time_us: float) -> dict[str, float]:
    """The three bandwidths in GB/s, by the names of their columns."""
    algbw = size_bytes / time_us / 1e3
    return {
        "algbw(GB/s)": algbw,
        "busbw(GB/s)": algbw * bus_factor(collective, num_ranks),
        "effbw(GB/s)": bytes_moved(collective, size_bytes, num_ranks) / time_us / 1e3,
    }


def whole_count(size_bytes: int, num_ranks: int, itemsize: int = 4) -> int:
    """Elements of a message of about ``size_bytes`` in ``num_ranks`` equal parts of at least one element.

    Rounded down, as in nccl-tests.
    """
    return max(size_bytes // itemsize // num_ranks, 1) * num_ranks
