"""The ledger's lines: what two runs are compared by, bit by bit, and where a run began, moved or was changed.

    {"step": 7, "cursor": 224, "loss": "0x1.2p+2", "grad_norm": "0x1.8p-1", "world_size": 2,
     "placement": {"dp": 2}, "strategy": "bucketed", "sampled": [["head.weight", 3, "9f0a51c2"], ...]}
    {"step": 7, "event": "started", "restarts": 1, ...}

``step`` is the number of steps done. Floats are written as hexadecimal: bits, not digits. ``sampled`` has the
blocks whose turn it is (``ordered.sample``); every so many steps there are ``state_sha256`` and the hash of
each of its ``entries`` too. After a crash a step may be there twice; the last line of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEDGER = "ledger.jsonl"
LEAVES = "leaves.jsonl"
SAMPLE_EVERY = 50  # steps until each block of the state has been sampled once
STARTED, ACCEPTED = "started", "contract accepted"
LAYOUT = ("world_size", "placement", "strategy", "parallel")  # of a start

Whole = tuple[str, Mapping[str, str]]
"""``state_sha256`` and the short hash of each entry, by name: what ``ordered.hash.state_digests`` gives."""
Write = Callable[..., None]
"""Writes its keyword arguments down as one line."""


@dataclass(frozen=True)
class Placement:
    """Who does the work: the mesh's axes by name, and the strategy among the ranks of ``dp``.

    ``parallel`` has all that the run was told of it; only a start says so much.
    """

    axes: Mapping[str, int]
    strategy: str
    world_size: int
    parallel: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """As it stands in a line."""
        return {"world_size": self.world_size, "placement": dict(self.axes), "strategy": self.strategy}

    def layout(self) -> dict[str, Any]:
        """As it stands in the line of a start."""
        return {**self.fields(), "parallel": dict(self.parallel)}


def part_begins(starts: Sequence[Mapping[str, Any]]) -> int:
    """The step after which the last part of a run begins, of the lines of its ``starts``.

    A part is what one command has made in one layout. Ranks that are replaced go on with it; ``--resume``
    begins another, and so does another number of ranks.
    """
    part: list[Mapping[str, Any]] = []
    for start in reversed(starts):
        if part and not _goes_on(part[-1], start):
            break
        part.append(start)
    step = part[-1].get("step") if part else 0
    return step if isinstance(step, int) else 0


def _goes_on(start: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether ``start`` is of the command that has made ``before``, in the same layout."""
    earlier, later = before.get("generation", 1), start.get("generation", 1)
    is_next = isinstance(earlier, int) and isinstance(later, int) and earlier < later
    return is_next and all(before.get(name) == start.get(name) for name in LAYOUT)


class Ledger:
    """Says what is worth a line; ``write`` puts it down. Only rank 0 has one.

    In time order: ``started``, with ``accepted`` before the first step if the contract is a new one; then
    ``step`` after every step. Other ranks begin with ``started`` again.
    """

    def __init__(self, write: Write, placement: Placement, *, every: int) -> None:
        """``every`` steps the whole state is hashed; 0: at the end only."""
        self._write = write
        self.placement = placement
        self.every = every

    def is_whole(self, step: int, *, last: bool) -> bool:
        """Whether the line of ``step`` shall have the hash of the whole state."""
        return last or (self.every > 0 and step % self.every == 0)

    def started(
        self,
        step: int,
        *,
        restarts: int,
        fingerprint: str,
        numerical: Mapping[str, Any],
        canary: str,
        state: Whole | None = None,
        generation: int = 1,
    ) -> None:
        """The run begins, or goes on, after ``step``; ``state`` is what it goes on from.

        ``generation`` counts the groups of ranks since the command was given.
        """
        self._event(
            STARTED,
            step,
            restarts=restarts,
            **self.placement.layout(),
            fingerprint=fingerprint,
            canary=canary,
            generation=generation,
            numerical=dict(numerical),
            **_whole(state),
        )

    def accepted(self, step: int, differences: Sequence[str]) -> None:
        """From ``step`` on the run is under another contract, because the user said so."""
        self._event(ACCEPTED, step, differences=list(differences))

    def step(
        self,
        step: int,
        *,
        cursor: int,
        loss: float,
        norm: float,
        sampled: Sequence[Sequence[Any]],
        whole: Whole | None = None,
        skipped: str = "",
    ) -> None:
        """Step number ``step`` is done, with samples up to ``cursor``; ``skipped`` says why not applied."""
        self._write(
            step=step,
            cursor=cursor,
            loss=float(loss).hex(),
            grad_norm=float(norm).hex(),
            **self.placement.fields(),
            sampled=[list(block) for block in sampled],
            **_whole(whole),
            **({"skipped": skipped} if skipped else {}),
        )

    def _event(self, name: str, step: int, **fields: Any) -> None:
        self._write(step=step, event=name, **fields)


def _whole(state: Whole | None) -> dict[str, Any]:
    return {} if state is None else {"state_sha256": state[0], "entries": dict(state[1])}
