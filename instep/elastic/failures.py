"""Failures of workers, when a run that keeps failing shall end, and how long a recovery took.

A failure that comes back at the same place is not a machine's. What ends a run: five failures in a row
with no completed step, the same exception twice at the same step, or on all ranks before any step is made.
Several workers that fail in one generation, in which one has pulled the others down, count once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from instep.errors import InstepError, counted

MAX_IN_A_ROW = 5
NUMBER = re.compile(r"0x[0-9a-f]+|\bpid(\(s\))? [0-9, ]+")
FEW_STEPS = 2  # between two failures of one exception that the steps in between do not excuse


@dataclass(frozen=True)
class Failure:
    """One worker's end: ``step`` steps were done, ``error`` is its exception, "" if it raised none.

    ``rank`` is -1 for a spare. Failures of one generation have the same ``attempt``. The fields are written
    down in the run directory.
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
        where = f", in step {self.step} ({self.phase})," if self.step >= 0 else f", in {self.phase},"
        return f"{who} (pid {self.pid}){where} {self.how}"

    @property
    def kind(self) -> str:
        """The first line of its exception without pids and addresses, which differ between attempts."""
        return NUMBER.sub("#", self.error.partition("\n")[0])

    def repeats(self, other: Failure) -> bool:
        """Whether ``other`` is the same exception at the same step, at another try."""
        same = (self.kind, self.step) == (other.kind, other.step)
        return same and self.step >= 0 and self.attempt != other.attempt

    def fields(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


class RunFailed(InstepError):
    """The run failed again and again; the message lists failures since the last step that was done, of each
    exception the last."""

    def __init__(self, reason: str, failures: Sequence[Failure]) -> None:
        told = {failure.kind or failure: failure for failure in failures}
        lines = (str(failure).partition("\n")[0] for failure in told.values())  # the rest has been said
        super().__init__("\n  ".join([reason, *lines]))
        self.failures = tuple(failures)


@dataclass
class RetryLimit:
    """Counts failures until there are too many; a step that was done resets all but the exceptions."""

    in_a_row: list[Failure] = field(default_factory=list)
    raised: list[Failure] = field(default_factory=list)
    step: int = -1

    def progressed(self, step: int) -> None:
        """``step`` steps are done."""
        if step > self.step:
            self.in_a_row.clear()
        self.step = max(step, self.step)

    def add(self, failure: Failure, num_ranks: int = 0) -> None:
        """``failure`` has happened, in a generation of so many ranks.

        Raises:
            RunFailed: it was one too many.
        """
        alike = {f.rank for f in self.like(failure)} | {failure.rank}
        if failure.error and failure.step <= 0 and len(alike) == num_ranks > 1:
            reason = f"all {num_ranks} ranks raised the same exception before a step was made:"
            raise RunFailed(reason, [failure])
        again = [f for f in self.raised if failure.error and f.repeats(failure)]
        self.in_a_row.append(failure)
        self.raised += [failure] if failure.error else []
        if again:
            raise RunFailed("the same exception came twice at the same step:", [again[0], failure])
        everywhere = self._everywhere(failure)
        if len({f.attempt for f in everywhere}) >= MAX_IN_A_ROW:
            raise RunFailed(f"the same exception came {MAX_IN_A_ROW} times, step after step:", everywhere)
        if len({f.attempt for f in self.in_a_row}) >= MAX_IN_A_ROW:
            raise RunFailed(f"{MAX_IN_A_ROW} failures in a row with no completed step:", self.in_a_row)

    def like(self, failure: Failure) -> list[Failure]:
        """The same exception, of other ranks of its generation."""
        return [f for f in self.raised if (f.kind, f.attempt) == (failure.kind, failure.attempt)]

    def _everywhere(self, failure: Failure) -> list[Failure]:
        """Those of the same exception, each a few steps after the one before it.

        A new process makes so many steps only because it has not yet what the script forgets to put away.
        """
        found: list[Failure] = []
        if not failure.error:
            return found
        for earlier in reversed(self.raised):
            if earlier.kind == failure.kind:
                if found and found[-1].step - earlier.step > FEW_STEPS:
                    break
                found.append(earlier)
        return found[::-1]


class Recovery:
    """What it takes from noticing a failure until all are ready, have joined, have the state, have stepped.

    Times are ``time.monotonic_ns()``, which all processes of a host share.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.noticed_ns = time.monotonic_ns()
        self.assigned_ns = 0
        self._first_step: dict[str, Any] = {}

    def assigned(self) -> None:
        """All members are ready and have been assigned their ranks."""
        self.assigned_ns = time.monotonic_ns()

    def stepped(self, message: dict[str, Any]) -> None:
        """A member has done the first step, and tells when it did what."""
        self._first_step = message

    @property
    def seconds(self) -> dict[str, float]:
        """From noticing to: assignments (survivors and newcomer ready), group, state, and first new step."""
        message = self._first_step
        marks = [
            self.noticed_ns,
            self.assigned_ns,
            message["joined_ns"],
            message["agreed_ns"],
            message["stepped_ns"],
        ]
        names = ("ready", "join", "state", "step")
        parts = {name: (b - a) / 1e9 for name, a, b in zip(names, marks, marks[1:], strict=False)}
        return {**parts, "total": (marks[-1] - marks[0]) / 1e9}

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        told = {name: self._first_step[name] for name in ("step", "source", "generation", "world_size")}
        return {
            "event": "recovery",
            "noticed_ns": self.noticed_ns,
            "stepped_ns": self._first_step["stepped_ns"],
            "seconds": self.seconds,
            **told,
        }

    def __str__(self) -> str:
        message, parts = self._first_step, self.seconds
        ranks = counted(message["world_size"], "rank")
        listed = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items() if name != "total")
        return (
            f"going on with {ranks} at step {message['step'] - 1}, from {message['source']}: first new step "
            f"after {parts['total']:.3f} s ({listed})"
        )
