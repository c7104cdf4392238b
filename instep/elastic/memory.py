"""The memory copy: the whole state after some step, in memory that outlives every worker.

A worker writes it and the supervisor holds its descriptor, so it is gone with the supervisor and with nothing
else. There are two halves. A writer fills the one that is not current and then turns one word; whoever dies
in the middle has turned nothing, and what is current is whole.

    word 0: current half     half 0: length, description, tensors     half 1: ...

How often it is written follows from what it costs: at most ``SHARE`` of the time that steps take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.shm import segment
from instep.shm.segment import Mapping

SHARE = 0.02
HEADER_BYTES = 4096
ALIGN_BYTES = 64


@dataclass(frozen=True)
class Place:
    """Where another process finds it: descriptor ``fd`` of process ``pid``."""

    pid: int
    fd: int
    inode: int


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
        copy._words.post(1, description_bytes)
        copy._words.post(2, tensor_bytes)
        return copy

    @staticmethod
    def attach(place: Place) -> Copy:
        """That of another process; ``OSError`` if it is gone."""
        return Copy(segment.attach(place.pid, place.fd, place.inode))

    @property
    def tensor_bytes(self) -> int:
        """Room for tensors in a half."""
        return self._words[2]

    def fits(self, description: bytes, tensors: Sequence[Tensor]) -> bool:
        """Whether a half is large enough."""
        return 8 + len(description) <= self._words[1] and tensor_bytes(tensors) <= self._words[2]

    def write(self, description: bytes, tensors: Sequence[Tensor]) -> None:
        """Make these the current ones."""
        half = 1 - self._words[0] % 2
        start = self._start(half)
        data = len(description).to_bytes(8, "little") + description
        memoryview(self.mapping.memory)[start : start + len(data)] = data
        torch._foreach_copy_(self._there(half, tensors), [x.detach() for x in tensors])
        # One store, after all others: x86-64 keeps their order.
        self._words.post(0, (self._words[0] // 2 + 1) * 2 + half)

    def description(self) -> bytes | None:
        """The description of the current half; None if nothing has been written."""
        if not self._words[0]:
            return None
        start = self._start(self._words[0] % 2)
        memory = memoryview(self.mapping.memory)
        length = int.from_bytes(memory[start : start + 8], "little")
        return bytes(memory[start + 8 : start + 8 + length])

    def read_into(self, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors``, which are laid out as the description of the current half says."""
        torch._foreach_copy_(list(tensors), self._there(self._words[0] % 2, tensors))

    def _start(self, half: int) -> int:
        return HEADER_BYTES + half * (self._words[1] + self._words[2])

    def _there(self, half: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The places of ``tensors`` in ``half``."""
        layout = [(x.dtype, x.shape) for x in tensors]
        if half not in self._views or self._views[half][0] != layout:
            offset, views = self._start(half) + self._words[1], []
            for x in tensors:
                views.append(self.mapping.tensor(offset, x.nbytes).view(x.dtype).view(x.shape))
                offset += _aligned(x.nbytes)
            self._views[half] = layout, views
        return self._views[half][1]


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
