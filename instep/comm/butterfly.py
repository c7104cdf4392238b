"""All-reduce in pairs at distance 1, 2, 4, ...: after log2 W exchanges every rank has met every other.

     0 --- 1     2 --- 3        distance 1        W = 4
     0 --------- 2
           1 --------- 3        distance 2

Recursive doubling exchanges all of x each time. Halving-doubling exchanges a half, then a quarter, ...
of it, until each rank owns the sum of one part, and then goes the same way back, gathering. x = abcd:

     rank 0      rank 1      rank 2      rank 3
     ab          cd          ab          cd         after halving at distance 1
     a           c           b           d          after halving at distance 2: each owns a sum
     ab          cd          ab          cd         after doubling at distance 2
     abcd        abcd        abcd        abcd       after doubling at distance 1

Where W is no power of two, P is the one below it, and the first 2(W-P) ranks go in pairs: the odd one
gives its x to the even one, waits, and gets the result. W ranks, x of S bytes, W a power of two:

    algorithm             steps       bytes each rank sends     time
    recursive_doubling    log2 W      S log2 W                  log2 W (alpha + S beta)
    halving_doubling      2 log2 W    2 S (W-1)/W               2 log2 W alpha + 2 S (W-1)/W beta

and else P in the place of W, and 2 (alpha + S beta) more. Halving-doubling has the ring's bytes and the
tree's latency, but partners at a distance. Both add each element in the same order on every rank, lower
ranks on the left: W = 4 is (x0 + x1) + (x2 + x3), W = 5 is ((x0 + x1) + x2) + (x3 + x4).

Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner, Gropp 2005 (see ``binomial_tree``), on
all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.comm.messages import Messages, edges, flat


def recursive_doubling(x: Tensor, messages: Messages) -> None:
    """``x`` becomes the sum over ranks; every rank adds all of it, in the same order: the same bits.

    Needs S bytes of scratch.
    """
    node = _fold(x, messages)
    if node is not None:
        received = torch.empty_like(x)
        for k in range(_levels(messages.size)):
            partner = _rank_of(node ^ 1 << k, messages.size)
            messages.exchange(x, partner, received, partner)
            _add(x, received, own_is_left=not node >> k & 1)
    _unfold(x, messages)


def halving_doubling(x: Tensor, messages: Messages) -> None:
    """``x`` becomes the sum over ranks; each part is added on one rank and copied: the same bits.

    Needs S/2 bytes of scratch, S where W is no power of two.
    """
    node = _fold(x, messages)
    if node is not None:
        _halve_and_double(flat(x), node, messages)
    _unfold(x, messages)


def _halve_and_double(x: Tensor, node: int, messages: Messages) -> None:
    """All-reduce among the nodes, which are as many as a power of two."""
    levels = _levels(messages.size)
    at = edges(x.numel(), 1 << levels)
    scratch = x.new_empty(-(-x.numel() // 2))
    lo, hi = 0, 1 << levels
    path = []  # what this node kept, and what its partner kept, level by level
    for k in range(levels):
        middle = (lo + hi) // 2
        lower, upper = x[at[lo] : at[middle]], x[at[middle] : at[hi]]
        is_upper = bool(node >> k & 1)
        kept, given = (upper, lower) if is_upper else (lower, upper)
        partner = _rank_of(node ^ 1 << k, messages.size)
        received = messages.exchange(given, partner, scratch[: kept.numel()], partner)
        _add(kept, received, own_is_left=not is_upper)
        lo, hi = (middle, hi) if is_upper else (lo, middle)
        path.append((partner, kept, given))
    for partner, kept, given in reversed(path):
        messages.exchange(kept, partner, given, partner)


def _levels(size: int) -> int:
    """log2 P."""
    return size.bit_length() - 1


def _rank_of(node: int, size: int) -> int:
    folded = size - (1 << _levels(size))
    return 2 * node if node < folded else node + folded


def _fold(x: Tensor, messages: Messages) -> int | None:
    """This rank's node of the butterfly over P nodes; None if its neighbour has taken over its ``x``."""
    rank = messages.rank
    folded = messages.size - (1 << _levels(messages.size))
    if rank >= 2 * folded:
        return rank - folded
    if rank % 2:
        messages.send(x, rank - 1)
        return None
    x.add_(messages.recv(torch.empty_like(x), rank + 1))
    return rank // 2


def _unfold(x: Tensor, messages: Messages) -> None:
    rank = messages.rank
    if rank >= 2 * (messages.size - (1 << _levels(messages.size))):
        return
    if rank % 2:
        messages.recv(x, rank - 1)
    else:
        messages.send(x, rank + 1)


def _add(own: Tensor, received: Tensor, *, own_is_left: bool) -> None:
    left, right = (own, received) if own_is_left else (received, own)
    torch.add(left, right, out=own)
