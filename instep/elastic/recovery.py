"""What a recovery took, and what it was made of."""

from __future__ import annotations

import time
from typing import Any

from instep.elastic.failures import Failure


class Recovery:
    """From the moment a failure is noticed: until all are free, have joined, hold the state, have stepped.

    Times are ``time.monotonic_ns()``, which all processes of a host share.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.noticed_ns = time.monotonic_ns()
        self.seated_ns = 0
        self._first_step: dict[str, Any] = {}

    def seated(self) -> None:
        """All members are free and have been given their seats."""
        self.seated_ns = time.monotonic_ns()

    def stepped(self, message: dict[str, Any]) -> None:
        """A member has made the first step, and says when it did what."""
        self._first_step = message

    @property
    def seconds(self) -> dict[str, float]:
        """From noticing to: seats (survivors and newcomer ready), group, state, and first new step."""
        message = self._first_step
        marks = [
            self.noticed_ns,
            self.seated_ns,
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
        listed = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items() if name != "total")
        return (
            f"going on with {message['world_size']} rank(s) after step {message['step'] - 1}, from "
            f"{message['source']}: first new step after {parts['total']:.3f} s ({listed})"
        )
