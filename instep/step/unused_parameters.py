"""Parameters that got no gradient in a reduction: forbidden, reported once, or frozen on one rank by mistake.

A rank that does not use a parameter counts as zero. That is right where the data decide which branch of a
model is used, and wrong where one rank has frozen what the others train: the mean would lack a share.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from instep.errors import Desync
from instep.reduce.buckets import Bundle

SHOWN = 8  # parameters in a message


class Unused(NamedTuple):
    """A parameter that ``ranks`` of the group had no gradient for, though they had others."""

    position: int
    ranks: list[int]
    on_some: bool  # others had one
    frozen: list[int]  # of ``ranks``, those where it requires no gradient, though others had one


class UnusedParameters:
    """Reports unused parameters by ``names`` and ``ranks``; if it ``warns``, once each."""

    def __init__(self, names: Sequence[str], ranks: Sequence[int], *, warns: bool) -> None:
        self._names, self._ranks, self._warns = names, ranks, warns
        self._reported: frozenset[int] = frozenset()

    def report(self, buckets: Sequence[Bundle], step: int, *, forbidden: bool) -> None:
        """Call it after the exchange of ``buckets``.

        Raises:
            Desync: a rank had none because the parameter is frozen there, and others had one.
            ValueError: unused parameters are ``forbidden``.
        """
        if not (unused := find_unused(buckets)):
            return
        if alone := [x._replace(ranks=x.frozen) for x in unused if x.frozen]:
            raise Desync(
                f"frozen on some ranks alone (requires_grad=False): {self._describe(alone)}; in step {step} "
                "other ranks had gradients for them, and the mean would lack a share: freeze on every rank, "
                "or pass find_unused_parameters=True if this is meant"
            )
        if unused and forbidden:
            raise ValueError(
                f"no gradient came for {self._describe(unused)} in step {step}, and "
                "find_unused_parameters=False forbids it: pass True or freeze them"
            )
        new = [x for x in unused if x.position not in self._reported]
        self._reported |= {x.position for x in new}
        if new and self._warns:
            warnings.warn(
                f"no gradient came for {self._describe(new)} in step {step}: where other ranks had one, zero "
                "was averaged in; where none had, .grad was left alone. Pass find_unused_parameters=True if "
                "this is meant",
                stacklevel=3,
            )

    def _describe(self, unused: Sequence[Unused]) -> str:
        lines = []
        for x in unused[:SHOWN]:
            ranks = ", ".join(str(self._ranks[r]) for r in x.ranks)
            lines.append(f"{self._names[x.position]!r} on {f'rank {ranks}' if x.on_some else 'any rank'}")
        more = f"; and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        return "; ".join(lines) + more


def find_unused(buckets: Sequence[Bundle]) -> list[Unused]:
    """A rank that had no gradient at all, because it had no micro-batch or no weight, is not counted."""
    ranks = range(len(buckets[0].presence))
    busy = [r for r in ranks if any(bucket.presence[r] for bucket in buckets)]
    found = []
    for bucket in buckets:
        for k, slot in enumerate(bucket.slots):
            its = busy if bucket.places is None else [r for r in busy if r in bucket.places]
            without = [r for r in its if not bucket.presence[r] >> k & 1]
            if without:
                on_some = len(without) < len(its)
                frozen = [r for r in without if on_some and bucket.frozen[r] >> k & 1]
                found.append(Unused(slot.position, without, on_some, frozen))
    return found
