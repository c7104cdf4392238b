"""May a sharded optimizer go on? Not when it is closed, nor when ranks have weights of different steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.errors import Desync, PeerLost
from instep.mesh.exits import as_told
from instep.mesh.group import Group
from instep.shard.verdict import Vote, changed, collect, disagreement, failed

BROKEN = "the ranks' weights and moments are not those of one step any more: load both, or end"


class Standing:
    """What has become of an optimizer of ``group``, which the calls of ``ends`` close.

    ``steps`` are those that it has made. ``broken`` says why its weights and moments are not those of one
    step, "" if they are; it is set before they are written to, and cleared after.
    """

    def __init__(self, group: Group, *ends: weakref.finalize[Any, Any]) -> None:
        self.group = group
        self.steps = 0
        self.broken = ""
        self._ends = ends
        self._why_closed = ""

    def close(self) -> None:
        for end in self._ends:
            end()

    def require_open(self) -> None:
        if not self._ends[0].alive:
            raise RuntimeError(f"this ShardedOptimizer is closed{self._why_closed}: make another one")

    def require_sound(self) -> None:
        self.require_open()
        if self.broken:
            raise RuntimeError(f"this ShardedOptimizer cannot go on, because {self.broken}: {BROKEN}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do something collective; without all of its ranks the group is of no use any more."""
        try:
            yield
        except PeerLost as lost:
            self.give_up(lost)
            raise

    def vote(self, mine: Vote, raised: BaseException | None) -> None:
        """Return on all ranks, if all make the same step and none has ``raised``; else raise on all.

        A barrier too: whoever returns knows that all have come. Collective.
        """
        try:
            votes = collect(mine, self.group, f"the verdict on step {self.steps}")
        except PeerLost as lost:
            self.give_up(lost)
            if raised is None:
                raise
            raise raised from lost
        if found := disagreement(votes, self.group.ranks):
            self.broken = f"in step {self.steps} {found}" if changed(votes) else ""
            after = BROKEN if changed(votes) else "nothing was changed"
            error = Desync(f"step {self.steps} of the sharded optimizer: {found}; {after}")
            raise raised or (as_told(error) if failed(votes) else error)

    def give_up(self, lost: PeerLost) -> None:
        """Close: what the group still owes would be paired with what follows."""
        self._why_closed = f", because {str(lost).splitlines()[0]}"
        self.close()
