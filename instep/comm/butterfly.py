"""All-reduce in pairs at distance 1, 2, 4, ...: after log2 W exchanges every rank has the data of all.

     0 --- 1     2 --- 3        distance 1        W = 4
     0 --------- 2
           1 --------- 3        distance 2

Recursive doubling exchanges all of x each time. Halving-doubling exchanges a half of x, then a quarter, ...
until each rank owns the sum of one part, and then gathers on the same way back. x = abcd:

     rank 0      rank 1      rank 2      rank 3
     ab          cd          ab          cd         after halving at distance 1
     a           c           b           d          after halving at distance 2: each owns a sum
     ab          cd          ab          cd         after doubling at distance 2
     abcd        abcd        abcd        abcd       after doubling at distance 1

Where W is no power of two, P is the next smaller one, and the first 2(W-P) ranks form pairs: the odd rank
sends its x to the even one, and receives the result. W ranks, x of S bytes, W a power of two:

    algorithm             steps       bytes each rank sends     time
    recursive_doubling    log2 W      S log2 W                  log2 W (alpha + S beta)
    halving_doubling      2 log2 W    2 S (W-1)/W               2 log2 W alpha + 2 S (W-1)/W beta

otherwise P instead of W, and 2 (alpha + S beta) more. Halving-doubling has the ring's bytes and the tree's
latency, but distant partners. Both add each element in the same order on every rank, lower
ranks on the left: W = 4 is (x0 + x1) + (x2 + x3), W = 5 is ((x0 + x1) + x2) + (x3 + x4).

Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner, Gropp 2005 (see ``binomial_tree``), on
all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from instep.comm.schedule import WHOLE, Piece, Step, Then, exchange, receive, send


def recursive_doubling(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks; every rank adds all of it in the same order. Needs S bytes of scratch."""
    yield from _among_nodes(rank, size, _doubling)


def halving_doubling(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks; each part is added on one rank and copied. Needs S/2 bytes of scratch,
    S where W is no power of two."""
    yield from _among_nodes(rank, size, _halving_and_doubling)


def _among_nodes(rank: int, size: int, steps: Callable[[int, int], Iterator[Step]]) -> Iterator[Step]:
    """``steps`` of this rank's node of P, with the exchanges of the 2(W-P) paired ranks around them."""
    folded = 2 * (size - (1 << _levels(size)))
    if rank >= folded:
        yield from steps(rank - folded // 2, size)
    elif rank % 2:
        yield send(rank - 1)
        yield receive(rank - 1)
    else:
        yield receive(rank + 1, then="own + received")
        yield from steps(rank // 2, size)
        yield send(rank + 1)


def _doubling(node: int, size: int) -> Iterator[Step]:
    for k in range(_levels(size)):
        partner = _rank_of(node ^ 1 << k, size)
        yield exchange(partner, WHOLE, partner, WHOLE, _lower_first(node, k))


def _halving_and_doubling(node: int, size: int) -> Iterator[Step]:
    levels = _levels(size)
    lo, hi = 0, 1 << levels
    path = []  # the pieces that this node and its partner kept, level by level
    for k in range(levels):
        middle = (lo + hi) // 2
        lower, upper = Piece(lo, middle, 1 << levels), Piece(middle, hi, 1 << levels)
        kept, given = (upper, lower) if node >> k & 1 else (lower, upper)
        partner = _rank_of(node ^ 1 << k, size)
        yield exchange(partner, given, partner, kept, _lower_first(node, k))
        lo, hi = kept.first, kept.end
        path.append((partner, kept, given))
    for partner, kept, given in reversed(path):
        yield exchange(partner, kept, partner, given)


def _levels(size: int) -> int:
    """log2 P."""
    return size.bit_length() - 1


def _rank_of(node: int, size: int) -> int:
    folded = size - (1 << _levels(size))
    return 2 * node if node < folded else node + folded


def _lower_first(node: int, k: int) -> Then:
    """The addend of the lower of two partners is the left one, on both."""
    return "received + own" if node >> k & 1 else "own + received"
