"""What was expected of a fault, what was found, and what is wrong between the two. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Ways in which a fault is noticed.
SENTINEL = "end of the process"
STATE = "state of the process"
PROGRESS = "no progress"
DEADLINE = "deadline of the others"
EXCEPTION = "exception"
REPLICAS = "hashes of the replicas"
HEADER = "header of the message"
NORM = "norm of the gradient"
SIGNAL = "signal handler"
MANIFEST = "hashes of the manifest"
SYSTEM = "error of the system call"
LAUNCHER = "the launcher, which restarts all"
NOBODY = "nobody, as it should be"

WAYS = (
    (r"was killed by|exited with code", SENTINEL),
    (r"was stopped", STATE),
    (r"made no progress", PROGRESS),
    (r"never came|lost its group", DEADLINE),
    (r"failed with instep\.errors\.ReplicasDiffer", REPLICAS),
    (r"failed with", EXCEPTION),
)
PARTS = ("detect", "ready", "join", "state", "step")


@dataclass(frozen=True)
class Expect:
    """What shall become of a run.

    ``codes`` are the exit codes of its commands. ``failures`` is how many ``faults.jsonl`` shall have, at
    least and at most: of exactly ``ranks``, each noticed by ``noticed``. Where there is none to be noted,
    ``noticed`` is what ``says`` proves, a pattern in what the commands say. ``redone`` is how many steps may
    be made twice, ``source`` a pattern of where the state came from, ``left`` one of what may be left
    behind. ``same``: the hash of the undisturbed run on one rank.
    """

    noticed: str
    codes: tuple[int, ...] = (0,)
    failures: tuple[int, int] = (0, 0)
    ranks: tuple[int, ...] = ()
    says: str = ""
    same: bool = True
    redone: int = 0
    source: str = ""
    skipped: int = 0
    left: str = ""


@dataclass(frozen=True)
class Found:
    """What became of it. ``events`` are those of ``faults.jsonl``, ``moments`` when the fault came (ns).

    ``steps`` are (step, cursor) of the record, ``same`` is None where there is no hash to compare with;
    ``same_ledger``: losses and norms are those of the undisturbed run, too.
    """

    codes: tuple[int, ...]
    said: str
    events: Sequence[dict[str, Any]] = ()
    moments: Sequence[int] = ()
    same: bool | None = None
    same_ledger: bool | None = None
    steps: Sequence[tuple[int, int]] = ()
    skipped: int = 0
    redone_by_resume: int = 0
    left: Sequence[str] = ()
    problems: Sequence[str] = ()
    took: Sequence[dict[str, float]] = ()  # where ``events`` do not tell

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "failure"]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "recovery"]

    @property
    def redone(self) -> int:
        """Steps that were made twice: after a resume, or after the recovery that lost most."""
        before, most = 0, self.redone_by_resume
        for event in self.events:
            if event["event"] == "failure":
                before = max(before, event["step"])
            else:
                most, before = max(most, before - event["step"] + 1), 0
        return most

    @property
    def seconds(self) -> list[dict[str, float]]:
        """What each recovery was made of; with ``detect`` where it is known when its first fault came."""
        if self.took:
            return list(self.took)
        found: list[dict[str, float]] = []
        outside, first = len(self.recoveries) == len(self.moments), None
        for event in self.events:
            if event["event"] == "failure":
                first = first or event
                continue
            injected_ns = first.get("injected_ns", 0) if first else 0
            began_ns = self.moments[len(found)] if outside else injected_ns
            parts = dict(event["seconds"])
            if began_ns:
                parts = {"detect": (event["noticed_ns"] - began_ns) / 1e9, **parts}
                parts["total"] += parts["detect"]
            found.append(parts)
            first = None
        return found


def way(failure: dict[str, Any]) -> str:
    """How ``failure`` was noticed."""
    return next((way for pattern, way in WAYS if re.search(pattern, failure["how"])), failure["how"])


def judge(expect: Expect, found: Found, *, num_steps: int, global_size: int) -> list[str]:
    """What is not as expected, in words; nothing if all is."""
    wrong = list(found.problems)
    if found.codes != expect.codes:
        wrong.append(f"expected exit codes {expect.codes}, got {found.codes}")
    wrong += _wrong_failures(expect, found.failures)
    if expect.says and not re.search(expect.says, found.said):
        wrong.append(f"expected {expect.says!r} among what it says")
    sources = [event["source"] for event in found.recoveries]
    if expect.source and not (sources and all(re.search(expect.source, source) for source in sources)):
        wrong.append(f"expected the state from {expect.source!r}, got it from {sources}")
    if found.redone > expect.redone:
        wrong.append(f"expected at most {expect.redone} steps to be made twice, got {found.redone}")
    left = [name for name in found.left if not (expect.left and re.match(expect.left, name))]
    if left:
        wrong.append(f"left behind: {', '.join(left)}")
    if expect.same:
        wrong += [] if found.same else ["expected the hash of the undisturbed run"]
        wrong += samples(found.steps, num_steps, global_size)
        if found.skipped != expect.skipped:
            wrong.append(f"expected {expect.skipped} skipped steps, got {found.skipped}")
    return wrong


def _wrong_failures(expect: Expect, failures: Sequence[dict[str, Any]]) -> list[str]:
    wrong = []
    least, most = expect.failures
    if not least <= len(failures) <= most:
        listed = "; ".join(f"rank {failure['rank']} {failure['how']}" for failure in failures)
        wrong.append(f"expected {least} to {most} failures, got {len(failures)}: {listed[:500]}")
    ways = {way(failure) for failure in failures}
    if ways - {expect.noticed}:
        wrong.append(f"expected it to be noticed by {expect.noticed}, got {sorted(ways)}")
    ranks = {failure["rank"] for failure in failures}
    if least and expect.ranks and ranks != set(expect.ranks):
        wrong.append(f"expected rank {sorted(expect.ranks)} to be named, got {sorted(ranks)}")
    return wrong


def samples(steps: Sequence[tuple[int, int]], num_steps: int, global_size: int) -> list[str]:
    """What is wrong if not every sample was read exactly once; of a step made twice the last counts."""
    last = dict(steps)
    expected = {step: (step + 1) * global_size for step in range(num_steps)}
    if last == expected:
        return []
    odd = sorted(step for step in last.keys() | expected if last.get(step) != expected.get(step))
    return [f"expected every sample once, but step {odd[0]} has cursor {last.get(odd[0])}"]
