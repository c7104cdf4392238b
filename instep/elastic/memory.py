"""The memory copy: the whole state after some step, in memory that outlives every worker.

A worker writes it and the supervisor holds its descriptor, so it is gone with the supervisor and with nothing
else. There are two halves. A writer fills the one that is not current and then turns one word; whoever dies
in the middle has turned nothing, and what is current is whole.

    word 0: current half     half 0: length, description, tensors     half 1: ...

Where the state is sharded each rank writes what it has into a copy of its own, and no single store can turn
all of them. It need not: nobody takes part in a step before its own copy of the last one is whole. So when a
rank begins to write the copy of step t, all have that of the step before, s, and whoever is killed leaves

    rank 0   s  t        it was the first to be done
    rank 1   s  #        killed in the middle: this half counts for nothing
    rank 2   s           had not begun

and s, the newest step that every rank has, is whole. Each half says of which step it is, or that it is none.

How often it is written follows from what it costs: at most ``SHARE`` of the time that steps take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.shm import segment
from instep.shm.segment import Mapping

SHARE = 0.02
HEADER_BYTES = 4096
ALIGN_BYTES = 64


# Where is what, in words of 8 bytes.
_CURRENT, _DESCRIPTION_BYTES, _TENSOR_BYTES, _STEPS = 0, 1, 2, 3


@dataclass(frozen=True)
class Place:
    """Where another process finds it: descriptor ``fd`` of process ``pid``."""

    pid: int
    fd: int
    inode: int


@dataclass(frozen=True)
class Kept:
    """The copy of ``rank``, one of ``num_ranks`` that make up the state, written since ``generation``."""

    place: Place
    generation: int = 0
    rank: int = 0
    num_ranks: int = 1


class Copy:
    """Two halves, each with room for a description and for tensors; ``read`` gives the newest whole one."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._words = mapping.words()
        self._views: dict[int, tuple[list[tuple[torch.dtype, torch.Size]], list[Tensor]]] = {}

    @staticmethod
    def create(description_bytes: int, tensor_bytes: int) -> Copy:
        """New memory for so much; its pages are taken when they are first written to."""
        description_bytes, tensor_bytes = _aligned(description_bytes + 8), _aligned(tensor_bytes)
        copy = Copy(segment.create(HEADER_BYTES + 2 * (description_bytes + tensor_bytes)))
        copy._words.post(_DESCRIPTION_BYTES, description_bytes)
        copy._words.post(_TENSOR_BYTES, tensor_bytes)
        return copy

    def grown(self, description_bytes: int, tensor_bytes: int) -> Copy:
        """A larger one that has what is current in this one."""
        known, step = self.description() or b"", self._words[_STEPS + self._words[_CURRENT] % 2] - 1
        copy = Copy.create(max(description_bytes, len(known)), max(tensor_bytes, self.tensor_bytes))
        if step >= 0:
            copy.write(known, [self.bytes_of(self._words[_CURRENT] % 2, 0, self.tensor_bytes)], step)
        return copy

    @staticmethod
    def attach(place: Place) -> Copy:
        """That of another process; ``OSError`` if it is gone."""
        return Copy(segment.attach(place.pid, place.fd, place.inode))

    @property
    def tensor_bytes(self) -> int:
        """Room for tensors in a half."""
        return self._words[_TENSOR_BYTES]

    def fits(self, description: bytes, tensors: Sequence[Tensor]) -> bool:
        """Whether a half is large enough."""
        return (
            8 + len(description) <= self._words[_DESCRIPTION_BYTES]
            and tensor_bytes(tensors) <= self._words[_TENSOR_BYTES]
        )

    @property
    def halves(self) -> dict[int, int]:
        """The steps that it has, each with its half."""
        return {step: half for half in (0, 1) if (step := self._words[_STEPS + half] - 1) >= 0}

    def write(self, description: bytes, tensors: Sequence[Tensor], step: int = 0) -> None:
        """Make these the current ones; ``step`` is what they are of."""
        half = 1 - self._words[_CURRENT] % 2
        self._words.post(_STEPS + half, 0)  # until it is whole, it is of no step
        start = self._start(half)
        data = len(description).to_bytes(8, "little") + description
        memoryview(self.mapping.memory)[start : start + len(data)] = data
        _copy(self._there(half, tensors), [x.detach() for x in tensors])
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

    def read_into(self, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors``, which are laid out as the description of the current half says."""
        _copy(tensors, self._there(self._words[_CURRENT] % 2, tensors))

    def bytes_of(self, half: int, offset: int, nbytes: int) -> Tensor:
        """Bytes among the tensors of ``half``, flat; the first tensor begins at 0."""
        return self.mapping.tensor(self._start(half) + self._words[_DESCRIPTION_BYTES] + offset, nbytes)

    def _start(self, half: int) -> int:
        return HEADER_BYTES + half * (self._words[_DESCRIPTION_BYTES] + self._words[_TENSOR_BYTES])

    def _there(self, half: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The places of ``tensors`` in ``half``."""
        layout = [(x.dtype, x.shape) for x in tensors]
        if half not in self._views or self._views[half][0] != layout:
            begins = offsets(x.nbytes for x in tensors)
            self._views[half] = (
                layout,
                [
                    self.bytes_of(half, begin, x.nbytes).view(x.dtype).view(x.shape)
                    for begin, x in zip(begins, tensors, strict=True)
                ],
            )
        return self._views[half][1]


def offsets(nbytes: Iterable[int]) -> list[int]:
    """Where tensors of so many bytes begin in a half."""
    begins, end = [], 0
    for size in nbytes:
        begins.append(end)
        end += _aligned(size)
    return begins


def common_step(copies: Iterable[Copy]) -> int:
    """The newest step that all of ``copies`` have; -1 if there is none."""
    steps = [set(copy.halves) for copy in copies]
    return max(set.intersection(*steps), default=-1) if steps else -1


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:  # a rank may own nothing of a small model
        torch._foreach_copy_(list(targets), list(sources))


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Room that ``tensors`` take in a half."""
    return sum(_aligned(x.nbytes) for x in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Interval:
    """Steps from one memory copy to the next, so that copying takes at most ``share`` of the time."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.cost_s: float | None = None  # the least so far, but for the first, into new pages
        self._next = 0

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` steps shall be copied."""
        return step >= self._next

    @contextmanager
    def copying(self, step: int, step_s: float) -> Iterator[None]:
        """The block makes the copy of ``step``; a step takes ``step_s``."""
        began = time.monotonic()
        yield
        took_s = time.monotonic() - began
        if self._next == 0:
            self._next = step + 1
            return
        self.cost_s = took_s if self.cost_s is None else min(self.cost_s, took_s)
        self._next = step + max(1, math.ceil(self.cost_s / (self.share * max(step_s, 1e-6))))
