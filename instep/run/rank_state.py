"""What one rank has of the run's state, and what may become of that: the only place where it changes.

    begin ----------> INITIAL     the weights of before the first step, which every rank makes for itself
    restoring ------> NOTHING     it is being replaced: of no step
    agreed ---------> EVERYTHING  all of the state after ``steps_done``, as all ranks have agreed
                      SHARDS      this rank's shards of it
    updating: NOTHING, until the update is whole; then as before
    counted           one step more; what was never agreed upon becomes NOTHING
    left -----------> NOTHING     where the state was divided: a rank alone has none of it

When ranks meet, a rank that has EVERYTHING can give it to the others. What counts is the newest step of
these, then the newest snapshot that is whole, then the newest checkpoint that verifies (``recovery.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from instep.record.step_lines import Made


class Holds(Enum):
    """What a rank has: see the module's docstring."""

    INITIAL = "initial"
    NOTHING = "nothing"
    SHARDS = "shards"
    EVERYTHING = "everything"


@dataclass
class RankState:
    """Position of a run on one rank, and what the rank ``holds`` of its tensors."""

    holds: Holds = Holds.INITIAL
    steps_done: int = 0
    last: Made | None = None  # the step that led here; None after a checkpoint was loaded

    def begin(self) -> None:
        """The weights are those of before the first step."""
        self.holds, self.steps_done, self.last = Holds.INITIAL, 0, None

    def restoring(self) -> None:
        """Tensors are about to be written to: until all have agreed that they are those of the run."""
        self.holds = Holds.NOTHING

    def restored(self, step: int, last: dict[str, Any] | None) -> None:
        """Tensors are those of ``step``; not agreed upon yet."""
        self.steps_done = step
        self.last = None if last is None else Made.from_json(last)

    def agreed(self, *, complete: bool) -> None:
        """All ranks have agreed that this is the state of the run; whether this one has all of it."""
        self.holds = Holds.EVERYTHING if complete else Holds.SHARDS

    def counted(self, last: Made) -> None:
        """A step is made, or was skipped."""
        self.steps_done += 1
        self.last = last
        if self.holds is Holds.INITIAL:
            self.holds = Holds.NOTHING

    def left(self, *, divided: bool) -> None:
        """The rank has left its group; its shards are of no use without the others'."""
        if divided:
            self.holds = Holds.NOTHING

    def to_json(self) -> dict[str, Any]:
        """The position, for another process."""
        return {"step": self.steps_done, "last": self.last and self.last.to_json()}
