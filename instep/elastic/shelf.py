"""The memory copies that a supervisor holds for the next generation: one, or one of every rank."""

from __future__ import annotations

import os

from instep.elastic.memory import Kept


class Shelf:
    """Sets of copies that make up a state, by the generation that began them.

    A set takes the place of all that are older when it is complete: until the last rank of a generation has
    handed its copy over, the state is in the one before.
    """

    def __init__(self) -> None:
        self._sets: dict[int, dict[int, Kept]] = {}

    @property
    def kept(self) -> tuple[Kept, ...]:
        """All of them, the oldest set first."""
        return tuple(kept for _, one in sorted(self._sets.items()) for _, kept in sorted(one.items()))

    def add(self, kept: Kept) -> None:
        """Hold ``kept``, whose descriptor is this process's own; a copy that it follows is let go."""
        complete = [number for number, one in self._sets.items() if _is_complete(one)]
        if kept.generation < max(complete, default=kept.generation):
            os.close(kept.place.fd)  # it comes too late
            return
        one = self._sets.setdefault(kept.generation, {})
        if (before := one.pop(kept.rank, None)) is not None:
            os.close(before.place.fd)
        one[kept.rank] = kept
        if _is_complete(one):
            for number in [number for number in self._sets if number < kept.generation]:
                self._drop(number)

    def clear(self) -> None:
        """Let all go."""
        for number in list(self._sets):
            self._drop(number)

    def _drop(self, number: int) -> None:
        for kept in self._sets.pop(number).values():
            os.close(kept.place.fd)


def _is_complete(one: dict[int, Kept]) -> bool:
    return bool(one) and len(one) == next(iter(one.values())).num_ranks
