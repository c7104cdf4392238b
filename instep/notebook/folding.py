"""The output of several ranks as one: a line that all ranks print alike is shown once.

    rank 0   epoch 0    loss 0.71    epoch 1      [0-1] epoch 0
    rank 1   epoch 0    loss 0.64    epoch 1      [0] loss 0.71
                                                  [1] loss 0.64
                                                  [0-1] epoch 1

A line waits ``DELAY_S`` for the same line of the other ranks. Then all waiting lines are shown: those between
two common lines rank by rank, ranks with equal lines together. Only complete lines are shown while a cell
runs; of a progress bar, which returns to the beginning of its line, the newest state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby, zip_longest
from typing import TypeVar

T = TypeVar("T")

DELAY_S = 0.2
STREAMS = ("stdout", "stderr")
Write = Callable[[str, str], None]
"""Shows a text of one of ``STREAMS``."""


class Folding:
    """The output of ``ranks`` during one cell, shown by ``write``."""

    def __init__(self, ranks: Sequence[int], write: Write) -> None:
        self.ranks = list(ranks)
        self._write = write
        self._lines: dict[str, dict[int, list[str]]] = {
            stream: {rank: [] for rank in ranks} for stream in STREAMS
        }
        self._begun: dict[tuple[str, int], str] = {}  # lines without an end yet
        self._since: float | None = None  # from when lines wait for the same lines of other ranks

    @property
    def wait_s(self) -> float | None:
        """The time until waiting lines have to be shown; None: no line waits."""
        return None if self._since is None else max(0.0, self._since + DELAY_S - time.monotonic())

    def add(self, rank: int, stream: str, text: str) -> None:
        """``rank`` has printed ``text``."""
        *lines, rest = (self._begun.get((stream, rank), "") + text).split("\n")
        self._begun[stream, rank] = rest
        if lines:
            self._lines[stream][rank] += [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            if self._since is None:
                self._since = time.monotonic()

    def show(self, *, everything: bool = False) -> None:
        """Show the lines that all ranks have; those that have waited long enough, or ``everything``, too."""
        if everything:
            for (stream, rank), rest in self._begun.items():
                if rest:
                    self._lines[stream][rank].append(rest.rstrip("\r").rpartition("\r")[2])
            self._begun.clear()
        overdue = everything or self.wait_s == 0
        for stream in STREAMS:
            lines = self._lines[stream]
            num_shown = 0
            for is_common, group in groupby(zip_longest(*lines.values()), lambda alike: len(set(alike)) == 1):
                if not is_common and not overdue:
                    break
                rows = list(group)
                num_shown += len(rows)
                columns = (
                    tuple(line for line in column if line is not None) for column in zip(*rows, strict=True)
                )
                for block, ranks in fold(dict(zip(self.ranks, columns, strict=True))).items():
                    self._emit(stream, ranks, block)
            if num_shown:
                self._since = time.monotonic()  # the ranks keep up with each other
            for rank in self.ranks:
                del lines[rank][:num_shown]
        if not any(any(lines.values()) for lines in self._lines.values()):
            self._since = None

    def _emit(self, stream: str, ranks: Sequence[int], lines: Sequence[str]) -> None:
        if lines:
            self._write(stream, "".join(f"[{span(ranks)}] {line}\n" for line in lines))


def fold(values: dict[int, T]) -> dict[T, list[int]]:
    """The ranks that have each value, in the order of the first of them."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def span(ranks: Sequence[int]) -> str:
    """``ranks`` in short: "0-3" or "0,2"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_ranks(text: str, world_size: int) -> list[int]:
    """The ranks that ``text`` names: "[0]", "1,3", "0-2", "all".

    Raises:
        ValueError: it names no rank, or a rank that the world does not have.
    """
    if text.strip() == "all":
        return list(range(world_size))
    found: set[int] = set()
    try:
        for part in text.strip().strip("[]").split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"expected ranks such as [0], 1,3 or 0-2, got {text!r}") from None
    if not found or not found <= set(range(world_size)):
        raise ValueError(f"expected ranks from 0 to {world_size - 1}, got {text!r}")
    return sorted(found)
