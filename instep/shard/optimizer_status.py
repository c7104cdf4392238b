"""May a sharded optimizer go on, and has a step gone well on all ranks?

It may not when it is closed, nor when ranks have weights of different steps. So ranks vote between the update
and the exchange of its results. The vote is a barrier too: a rank that has its result knows that no rank
computes with the old values any more.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from instep.errors import Desync, PeerLost
from instep.launch.rank_exit import mark_secondary
from instep.net.process_group import Group
from instep.reduce.header import UPDATE
from instep.shard.checks import options_text
from instep.step.reduction import Reduction

BROKEN = "the ranks' weights and moments are not of the same step any more: load both, or restart the run"
FINE, REFUSED, FAILED, READY = 0, 1, 2, 3  # REFUSED, READY: before it had changed anything


class OptimizerStatus:
    """What has become of a ShardedOptimizer of ``group``, which the calls of ``ends`` close.

    ``steps`` are those that it has made. ``broken`` says why its weights and moments are not those of one
    step, "" if they are; it is set before they are written to, and cleared after.

    ``meeting`` is the reduction of the gradients, where one is over all of ``group``. Ranks vote there: one
    that makes no step goes on to its next exchange, and so it is met.
    """

    def __init__(self, group: Group, *ends: weakref.finalize[Any, Any]) -> None:
        self.group = group
        self.steps = 0
        self.broken = ""
        self._ends = ends
        self._why_closed = ""
        self.meeting: Reduction | None = None

    def close(self) -> None:
        for end in self._ends:
            end()

    def require_open(self) -> None:
        if self._why_closed or not all(end.alive for end in self._ends):
            raise RuntimeError(f"this ShardedOptimizer is closed{self._why_closed}: make another one")

    def require_sound(self) -> None:
        self.require_open()
        if self.broken:
            raise RuntimeError(f"this ShardedOptimizer cannot go on, because {self.broken}: {BROKEN}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around collective calls: a lost rank closes the optimizer, whose group is of no use without it."""
        try:
            yield
        except PeerLost as lost:
            self.give_up(lost)
            raise

    def vote(self, mine: Vote, raised: BaseException | None) -> None:
        """Raise on all ranks unless all make the same step, and none has ``raised``.

        A barrier too: when it returns, all ranks have come. Collective.

        Raises:
            Desync: on all ranks; also where one does something else at its ``meeting``.
            PeerLost: a rank did not come.
        """
        try:
            votes = self._collect(mine)
        except (PeerLost, Desync) as told:
            if raised is None:
                raise
            raise raised from told
        if found := disagreement(votes, (self.meeting or self).group.ranks):
            self.broken = f"in step {self.steps} {found}" if changed(votes) else ""
            after = BROKEN if changed(votes) else "nothing was changed"
            error = Desync(f"step {self.steps} of the sharded optimizer: {found}; {after}")
            raise raised or (mark_secondary(error) if failed(votes) else error)

    def _collect(self, mine: Vote) -> list[Vote]:
        """The votes of all ranks, once all are there: W steps of 24 bytes at most."""
        operation, words = f"the vote on step {self.steps}", [*vars(mine).values()]
        with self.together():
            if self.meeting is not None:
                return [Vote(*row) for row in self.meeting.rendezvous(UPDATE, operation, words)]
            row = torch.tensor(words, dtype=torch.int64, device="cpu")
            out = torch.empty(self.group.size * row.numel(), dtype=torch.int64, device="cpu")
            self.group.all_gather(out, row, operation)
            return [Vote(*values) for values in out.view(self.group.size, -1).tolist()]

    def give_up(self, lost: PeerLost) -> None:
        """Close: what the group still owes would be paired with what follows."""
        self._why_closed = f", because {str(lost).splitlines()[0]}"
        self.close()


@dataclass(frozen=True)
class Vote:
    """What a rank tells the others of its step; numbers of 64 bits.

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
    presence = short(bytes(p.grad is not None for group in groups for p in group["params"]))
    return Vote(outcome, presence, short("; ".join(map(options_text, groups)).encode()))


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
