"""Has the step gone well everywhere? Asked between the update and the exchange of its results.

The question is a barrier too: who has an answer knows that no rank computes with the old values any more.
Ranks that have one copy of the weights ask before the update as well, since the update writes to everybody's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from instep.mesh.group import Group
from instep.shard.groups import options_text

FINE, REFUSED, FAILED, READY = 0, 1, 2, 3  # REFUSED, READY: before it had changed anything


@dataclass(frozen=True)
class Vote:
    """What a rank has to say; numbers of 64 bits.

    ``presence`` and ``options`` stand for the parameters that had a gradient and the options of the groups.
    """

    outcome: int
    presence: int
    options: int


def short(data: bytes) -> int:
    """A number that stands for ``data``."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def vote(outcome: int, groups: Sequence[Mapping[str, Any]]) -> Vote:
    """That of this rank, with these parameter groups."""
    presence = bytes(p.grad is not None for group in groups for p in group["params"])
    return Vote(outcome, short(presence), short("; ".join(map(options_text, groups)).encode()))


def collect(mine: Vote, group: Group, operation: str) -> list[Vote]:
    """The votes of all ranks, once all are there. Collective: W steps of 24 bytes at most."""
    row = torch.tensor([mine.outcome, mine.presence, mine.options], dtype=torch.int64, device="cpu")
    out = torch.empty(group.size * row.numel(), dtype=torch.int64, device="cpu")
    group.all_gather(out, row, operation)
    return [Vote(*values) for values in out.view(group.size, -1).tolist()]


def changed(votes: Sequence[Vote]) -> bool:
    """Whether some rank has written to weights or moments."""
    return any(vote.outcome not in (REFUSED, READY) for vote in votes)


def failed(votes: Sequence[Vote]) -> bool:
    """Whether some rank has an error of its own."""
    return any(vote.outcome in (REFUSED, FAILED) for vote in votes)


def disagreement(votes: Sequence[Vote], ranks: Sequence[int]) -> str:
    """Why the results must not be exchanged; "" if they may."""
    raised = [rank for rank, vote in zip(ranks, votes, strict=True) if failed([vote])]
    if raised:
        return f"rank {', '.join(map(str, raised))} raised, its own traceback has the cause"
    for what, numbers in (
        ("gradients for other parameters", [vote.presence for vote in votes]),
        (
            "other options in its parameter groups, the learning rate for instance,",
            [v.options for v in votes],
        ),
    ):
        for rank, number in zip(ranks, numbers, strict=True):
            if number != numbers[0]:
                return f"rank {rank} has {what} than rank {ranks[0]}: every rank has to make the same step"
    return ""
