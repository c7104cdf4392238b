"""When a run that keeps failing shall end. Pure.

A failure that comes back at the same place is not a machine's. What ends a run: five failures in a row
without a step in between, or the same exception twice at the same step. Several workers that fail in one
generation, in which one has pulled the others down, count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from instep.errors import InstepError

MAX_IN_A_ROW = 5


@dataclass(frozen=True)
class Failure:
    """One worker's end: ``step`` steps were done, ``error`` is its exception, "" if it raised none.

    ``rank`` is -1 for one that had no seat. ``attempt`` tells failures that belong together from others.
    """

    rank: int
    pid: int
    attempt: int
    step: int
    phase: str
    how: str
    error: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a spare"
        where = f", after step {self.step} in {self.phase}," if self.step >= 0 else f", in {self.phase},"
        return f"{who} (pid {self.pid}){where} {self.how}"

    def repeats(self, other: Failure) -> bool:
        """Whether ``other`` is the same exception at the same step, at another try."""
        same = (self.error, self.step) == (other.error, other.step)
        return same and self.step >= 0 and self.attempt != other.attempt

    def fields(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


class RunFailed(InstepError):
    """The run failed again and again; the message lists every failure since the last step that was made."""

    def __init__(self, reason: str, failures: Sequence[Failure]) -> None:
        super().__init__("\n  ".join([reason, *map(str, failures)]))
        self.failures = tuple(failures)


@dataclass
class Patience:
    """Counts failures; a step that was made makes it forget all but exceptions."""

    in_a_row: list[Failure] = field(default_factory=list)
    raised: list[Failure] = field(default_factory=list)
    step: int = -1

    def progressed(self, step: int) -> None:
        """``step`` steps are done."""
        if step > self.step:
            self.in_a_row.clear()
        self.step = max(step, self.step)

    def add(self, failure: Failure) -> None:
        """``failure`` has happened.

        Raises:
            RunFailed: it was one too many.
        """
        again = [f for f in self.raised if failure.error and f.repeats(failure)]
        self.in_a_row.append(failure)
        self.raised += [failure] if failure.error else []
        if again:
            raise RunFailed("the same exception came twice at the same step:", [again[0], failure])
        if len({f.attempt for f in self.in_a_row}) >= MAX_IN_A_ROW:
            raise RunFailed(f"{MAX_IN_A_ROW} failures in a row, without a step in between:", self.in_a_row)
