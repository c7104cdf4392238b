"""Snapshots: the whole state after some step, in memory that outlives every worker.

A worker writes its snapshot and the supervisor holds the descriptor of its memory, so it is gone with the
supervisor and with nothing else. There are two halves. A writer fills the one that is not current and then
turns one word; a worker that dies in the middle has turned nothing, and what is current is whole.

    word 0: current half     half 0: length, description, tensors     half 1: ...

Where the state is sharded each rank writes what it has into a snapshot of its own, and no single store can
turn all of them. It need not: no rank takes part in a step before its own snapshot of the last one is whole.
So when a rank begins to write the snapshot of step t, all have that of the step before, s, and a rank that is
killed leaves

    rank 0   s  t        it was the first to be done
    rank 1   s  #        killed in the middle: this half counts for nothing
    rank 2   s           had not begun

and s, the newest step that every rank has, is whole. Each half says of which step it is, or that it is none.

How often one is written follows from what it costs: at most ``SHARE`` of the time that steps take. Only time
in which the writing thread has run counts: if during one copy the machine ran something else for a quarter of
a second, and that counted, there would be no other for a hundred steps, and a kill of all ranks would cost as
many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.launch.memory_file import MemoryFile
from instep.mesh.axes import round_up
from instep.shm import segment
from instep.shm.segment import Mapping
from instep.state.shards import Shape
from instep.state.stored import ALIGN_BYTES, views

SHARE = 0.02
HEADER_BYTES = 4096

# Where is what, in words of 8 bytes.
_CURRENT, _DESCRIPTION_BYTES, _TENSOR_BYTES, _STEPS = 0, 1, 2, 3


@dataclass(frozen=True)
class SnapshotHandle:
    """The snapshot of ``rank``, one of ``num_ranks`` that make up the state, written since ``generation``."""

    place: MemoryFile
    generation: int = 0
    rank: int = 0
    num_ranks: int = 1


class Snapshot:
    """Two halves, each with room for a description and for tensors; ``read`` gives the newest whole one."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._words = mapping.words()
        self._views: dict[int, tuple[list[tuple[torch.dtype, Shape]], list[Tensor]]] = {}

    @staticmethod
    def create(description_bytes: int, tensor_bytes: int) -> Snapshot:
        """New memory for so much; its pages are taken when they are first written to."""
        description_bytes = round_up(description_bytes + 8, ALIGN_BYTES)
        tensor_bytes = round_up(tensor_bytes, ALIGN_BYTES)
        made = Snapshot(segment.create(HEADER_BYTES + 2 * (description_bytes + tensor_bytes)))
        made._words.post(_DESCRIPTION_BYTES, description_bytes)
        made._words.post(_TENSOR_BYTES, tensor_bytes)
        return made

    def grown(self, description_bytes: int, tensor_bytes: int) -> Snapshot:
        """A larger one that has what is current in this one."""
        known, step = self.description() or b"", self._words[_STEPS + self._words[_CURRENT] % 2] - 1
        made = Snapshot.create(max(description_bytes, len(known)), max(tensor_bytes, self.tensor_bytes))
        if step >= 0:
            made.write(known, [self.bytes_of(self._words[_CURRENT] % 2, 0, self.tensor_bytes)], step)
        return made

    @staticmethod
    def attach(place: MemoryFile) -> Snapshot:
        """The snapshot of another process; ``OSError`` if it is gone."""
        return Snapshot(segment.attach(place.pid, place.fd, place.inode))

    @property
    def tensor_bytes(self) -> int:
        """Room for tensors in a half."""
        return self._words[_TENSOR_BYTES]

    def fits(self, description_bytes: int, tensor_bytes: int) -> bool:
        """Whether a half is large enough."""
        return 8 + description_bytes <= self._words[_DESCRIPTION_BYTES] and tensor_bytes <= self.tensor_bytes

    @property
    def next_half(self) -> int:
        """The half that is written next."""
        return 1 - self._words[_CURRENT] % 2

    @property
    def halves(self) -> dict[int, int]:
        """The steps that it has, each with its half."""
        return {step: half for half in (0, 1) if (step := self._words[_STEPS + half] - 1) >= 0}

    def write(self, description: bytes, tensors: Sequence[Tensor], step: int = 0) -> None:
        """Make these the current ones; ``step`` is what they are of."""
        half = self.next_half
        self._words.post(_STEPS + half, 0)  # until it is whole, it is of no step
        start = self._start(half)
        data = len(description).to_bytes(8, "little") + description
        memoryview(self.mapping.memory)[start : start + len(data)] = data
        if tensors:  # a rank may own nothing of a small model
            torch._foreach_copy_(self._there(half, tensors), [x.detach() for x in tensors])
        # Two stores, after all others: x86-64 keeps their order.
        self._words.post(_STEPS + half, step + 1)
        self._words.post(_CURRENT, (self._words[_CURRENT] // 2 + 1) * 2 + half)

    def return_to(self, step: int) -> None:
        """Make ``step``, which it has, the current one, and forget any other."""
        half = self.halves[step]
        self._words.post(_CURRENT, (self._words[_CURRENT] // 2 + 1) * 2 + half)
        self._words.post(_STEPS + 1 - half, 0)

    def description(self, half: int | None = None) -> bytes | None:
        """The description of ``half``, or of the current one; None if nothing has been written."""
        if not self._words[_CURRENT]:
            return None
        start = self._start(self._words[_CURRENT] % 2 if half is None else half)
        memory = memoryview(self.mapping.memory)
        length = int.from_bytes(memory[start : start + 8], "little")
        return bytes(memory[start + 8 : start + 8 + length])

    def tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """The current ones, in place, which are laid out as those of ``like``."""
        return self._there(self._words[_CURRENT] % 2, like)

    def bytes_of(self, half: int, offset: int, nbytes: int) -> Tensor:
        """Bytes among the tensors of ``half``, flat; the first tensor begins at 0."""
        return self.mapping.tensor(self._start(half) + self._words[_DESCRIPTION_BYTES] + offset, nbytes)

    def _start(self, half: int) -> int:
        return HEADER_BYTES + half * (self._words[_DESCRIPTION_BYTES] + self._words[_TENSOR_BYTES])

    def _there(self, half: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The places of ``tensors`` in ``half``."""
        layout: list[tuple[torch.dtype, Shape]] = [(x.dtype, tuple(x.shape)) for x in tensors]
        if half not in self._views or self._views[half][0] != layout:
            self._views[half] = layout, views(layout, self.bytes_of(half, 0, self.tensor_bytes))
        return self._views[half][1]


def common_step(snapshots: Iterable[Snapshot]) -> int:
    """The newest step that all of ``snapshots`` have; -1 if there is none."""
    steps = [set(each.halves) for each in snapshots]
    return max(set.intersection(*steps), default=-1) if steps else -1


class SnapshotInterval:
    """Steps from one snapshot to the next, so that writing them takes at most ``share`` of the time.

    All by the thread that writes them.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.cost_s: float | None = None  # the least so far, but for the first, into new pages
        self._next = 0

    def due(self, step: int) -> bool:
        """Whether a snapshot of the state after ``step`` steps shall be written."""
        return step >= self._next

    @contextmanager
    def copying(self, step: int, step_s: float) -> Iterator[None]:
        """The block writes the snapshot of ``step``; a step takes ``step_s``."""
        began = time.thread_time()
        yield
        took_s = time.thread_time() - began
        if self._next == 0:
            self._next = step + 1
            return
        self.cost_s = took_s if self.cost_s is None else min(self.cost_s, took_s)
        self._next = step + max(1, math.ceil(self.cost_s / (self.share * max(step_s, 1e-6))))


class SnapshotStore:
    """What a supervisor holds for the next generation: sets of snapshots that make up a state.

    Of each generation that began one there is a set, of one snapshot or one of every rank. It replaces all
    that are older when it is complete: until the last rank of a generation has handed its snapshot over, the
    state is in the set before.
    """

    def __init__(self) -> None:
        self._sets: dict[int, dict[int, SnapshotHandle]] = {}  # by generation, by rank

    @property
    def handles(self) -> tuple[SnapshotHandle, ...]:
        """All of them, the oldest set first."""
        return tuple(handle for _, one in sorted(self._sets.items()) for _, handle in sorted(one.items()))

    def add(self, handle: SnapshotHandle) -> None:
        """Hold ``handle``, whose descriptor is this process's own; a snapshot that it follows is let go."""
        complete = [number for number, one in self._sets.items() if _is_complete(one)]
        if handle.generation < max(complete, default=handle.generation):
            handle.place.close()  # it comes too late
            return
        one = self._sets.setdefault(handle.generation, {})
        if (before := one.pop(handle.rank, None)) is not None:
            before.place.close()
        one[handle.rank] = handle
        if _is_complete(one):
            for number in [number for number in self._sets if number < handle.generation]:
                self._drop(number)

    def clear(self) -> None:
        """Let all go."""
        for number in list(self._sets):
            self._drop(number)

    def _drop(self, number: int) -> None:
        for handle in self._sets.pop(number).values():
            handle.place.close()


def _is_complete(one: dict[int, SnapshotHandle]) -> bool:
    return bool(one) and len(one) == next(iter(one.values())).num_ranks
