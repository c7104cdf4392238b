"""Which parameters got no gradient, and on which ranks, in words."""

from __future__ import annotations

from collections.abc import Sequence

from instep.ordered.buckets import Bundle

SHOWN = 8


def describe(buckets: Sequence[Bundle], names: Sequence[str], ranks: Sequence[int]) -> str:
    """The parameters that some rank had no gradient for, or "". Call it after the exchange.

    A rank that had none at all, because no micro-batch or no weight fell to it, is not counted.
    """
    busy = [r for r in range(len(ranks)) if any(any(bucket.presence[r]) for bucket in buckets)]
    lines = []
    for bucket in buckets:
        for k, slot in enumerate(bucket.slots):
            missing = [ranks[r] for r in busy if not bucket.presence[r][k]]
            if missing:
                where = "any rank" if len(missing) == len(busy) else f"rank {', '.join(map(str, missing))}"
                lines.append(f"{names[slot.position]!r} on {where}")
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more
