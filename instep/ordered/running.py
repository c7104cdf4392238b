"""Running statistics over the micro-batches of a step: what each has measured, applied in their order.

Batch norm changes its buffers in forward, once per micro-batch:

    running = (1 - momentum) * running + momentum * statistic

A rank that did so for its own micro-batches alone would hold other buffers than the others. So forward
measures, and when the step ends every rank applies what all of them have measured:

    rank 0   measures in micro-batches 0, 1     |  all tell all  |   applies 0, 1, 2, 3
    rank 1   measures in micro-batches 2, 3     |                |   applies 0, 1, 2, 3

The buffers then have the bits of one process that has had the micro-batches one after the other, because the
formula is that of torch's kernels, which round in other places for other inputs (``Rule``).

What a micro-batch has changed travels as ``BufferChange``s, one for all buffers that one formula changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from instep.errors import Desync
from instep.memory import bytes_of, tensor_of

LENGTH_BYTES = 8  # before the JSON that says what the numbers after it are


class Rule(IntEnum):
    """How a kernel computes the new value of a buffer of dtype t, from left to right.

    SUM_IN_T     t(m) * statistic + t(1 - m) * running                      every operation rounds to t
    SUM_IN_32    as it, but the product of the statistic and the sum are in float32, and the sum rounds to t
    SUM_IN_64    as it, in float64
    ALL_IN_64    m * statistic + (1 - m) * running                          in float64, then rounds to t
    COUNT        running + m                                                of integers
    """

    SUM_IN_T = 0
    SUM_IN_32 = 1
    SUM_IN_64 = 2
    ALL_IN_64 = 3
    COUNT = 4


WIDE = {Rule.SUM_IN_32: torch.float32, Rule.SUM_IN_64: torch.float64}


@dataclass(frozen=True)
class BufferChange:
    """What one micro-batch has done, by ``rule``, to ``buffers``, each of them once.

    ``momentum`` is the m of the rule; None is 1 / count, with the count of each of ``counters``. Where
    ``num_rows`` is not 0, each of so many instances has changed the buffer, and their mean is the new value.
    """

    rule: Rule
    buffers: tuple[int, ...]
    momentum: float | None
    counters: tuple[int, ...] = ()
    num_rows: int = 0


Changes = Sequence[tuple[BufferChange, Tensor]]
"""Of one micro-batch, in order: each with the statistics of its buffers, flat, one after the other."""


def to_bytes(by_micro_batch: Mapping[int, Changes]) -> bytes:
    """What ``from_bytes`` reads: JSON of the changes, then their statistics."""
    listed = [
        [index, [[c.rule, c.buffers, c.momentum, c.counters, c.num_rows] for c, _ in changes]]
        for index, changes in by_micro_batch.items()
    ]
    head = json.dumps(listed).encode()
    body = b"".join(bytes_of(x) for changes in by_micro_batch.values() for _, x in changes)
    return len(head).to_bytes(LENGTH_BYTES, "little") + head + body


def from_bytes(data: bytes, buffers: Sequence[Tensor], whose: str) -> dict[int, Changes]:
    """The changes of each micro-batch of another rank, ``whose``, to ``buffers``.

    Raises:
        Desync: that is not what a rank with the same buffers has to say.
    """
    try:
        start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        listed = json.loads(data[LENGTH_BYTES:start])
        found: dict[int, Changes] = {}
        for index, changes in listed:
            own = []
            for fields in changes:
                change = _change(fields, len(buffers))
                end = start + num_elements(change, buffers) * dtype_of(change, buffers).itemsize
                own.append((change, _numbers(data[start:end], change, buffers)))
                start = end
            found[int(index)] = own
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise Desync(
            f"{whose} has sent running statistics of other buffers than those of this rank: build the same "
            "modules on every rank"
        ) from error
    return found


def num_elements(change: BufferChange, buffers: Sequence[Tensor]) -> int:
    """Statistics that ``change`` comes with."""
    if change.rule is Rule.COUNT:
        return 0
    return max(change.num_rows, 1) * sum(buffers[b].numel() for b in change.buffers)


def dtype_of(change: BufferChange, buffers: Sequence[Tensor]) -> torch.dtype:
    """Of the statistics of ``change``."""
    return torch.float64 if change.rule is Rule.ALL_IN_64 else buffers[change.buffers[0]].dtype


def apply(buffers: Sequence[Tensor], by_micro_batch: Mapping[int, Changes]) -> None:
    """BufferChange ``buffers``, in place, by what all micro-batches have measured, in their order."""
    new = _NewValues(buffers)
    for index in sorted(by_micro_batch):
        for change, statistics in by_micro_batch[index]:
            new.change(change, statistics)
    new.write()


class _NewValues:
    """The values of ``buffers`` while changes are applied: those that change together lie together, flat."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = buffers
        self._flat: dict[tuple[int, ...], Tensor] = {}
        self._place: dict[int, tuple[int, ...]] = {}  # buffer -> the buffers that it lies with
        self._added: dict[int, int] = {}  # to counters
        self._before: dict[int, int] = {}  # what was in them, where that is asked for

    def change(self, change: BufferChange, statistics: Tensor) -> None:
        if change.rule is Rule.COUNT:
            assert change.momentum is not None
            for b in change.buffers:
                self._added[b] = self._added.get(b, 0) + int(change.momentum)
            return
        key = change.buffers
        running = self._together(key)
        statistics = statistics.to(running.device)
        if change.num_rows:
            statistics = statistics.view(change.num_rows, -1)
        value = updated(change.rule, running, statistics, self._momentum(change, running.device))
        self._flat[key] = value.mean(0) if change.num_rows else value

    def write(self) -> None:
        """The buffers have the new values."""
        for b in self._place:
            self.buffers[b].detach().copy_(self._value(b))
        for b, number in self._added.items():
            self.buffers[b].detach().add_(number)

    def _momentum(self, change: BufferChange, device: torch.device) -> Tensor:
        """m, in float64: one number, or one for each element."""
        if change.momentum is not None:
            return torch.tensor(change.momentum, dtype=torch.float64, device="cpu")
        factors = [1.0 / float(self._count(c)) for c in change.counters]
        if len(set(factors)) == 1:
            return torch.tensor(factors[0], dtype=torch.float64, device="cpu")
        sizes = torch.tensor([self.buffers[b].numel() for b in change.buffers], device="cpu")
        return torch.tensor(factors, dtype=torch.float64, device="cpu").repeat_interleave(sizes).to(device)

    def _count(self, b: int) -> int:
        if b not in self._before:  # a device is waited for
            self._before[b] = int(self.buffers[b].item())
        return self._before[b] + self._added.get(b, 0)

    def _together(self, key: tuple[int, ...]) -> Tensor:
        if key not in self._flat or any(self._place[b] != key for b in key):
            self._flat[key] = torch.cat([self._value(b).reshape(-1) for b in key])
            self._place.update(dict.fromkeys(key, key))
        return self._flat[key]

    def _value(self, b: int) -> Tensor:
        key = self._place.get(b)
        if key is None:
            return self.buffers[b].detach()
        first = sum(self.buffers[other].numel() for other in key[: key.index(b)])
        return self._flat[key][first : first + self.buffers[b].numel()].view(self.buffers[b].shape)


def updated(rule: Rule, running: Tensor, statistic: Tensor, momentum: Tensor) -> Tensor:
    """The new value of a buffer, with the bits of the kernel that ``rule`` describes.

    Args:
        running: (n,), the old value.
        statistic: (n,) or (rows, n).
        momentum: float64, one number or (n,).
    """
    if rule is Rule.ALL_IN_64:
        return (momentum * statistic + (1 - momentum) * running.double()).to(running.dtype)
    m, wide = momentum.to(running.dtype), WIDE.get(rule, running.dtype)
    kept = (1 - m) * running
    return (m.to(wide) * statistic.to(wide) + kept.to(wide)).to(running.dtype)


def _change(fields: Any, num_buffers: int) -> BufferChange:
    rule, buffers, momentum, counters, num_rows = fields
    change = BufferChange(Rule(rule), tuple(buffers), momentum, tuple(counters), num_rows)
    for numbers in (change.buffers, change.counters):
        if any(type(b) is not int or not 0 <= b < num_buffers for b in numbers):
            raise ValueError(f"expected buffers 0 to {num_buffers - 1}, got {fields!r}")
    num_counters = len(change.buffers) if change.momentum is None else 0
    if len(set(change.buffers)) != len(change.buffers) or len(change.counters) != num_counters:
        raise ValueError(f"expected each buffer once, with a counter or with a momentum, got {fields!r}")
    if not change.buffers or type(num_rows) is not int or num_rows < 0:
        raise ValueError(f"expected some buffers, and a number of rows, got {fields!r}")
    if not isinstance(momentum, float | int | None):
        raise ValueError(f"expected a number for a momentum, got {fields!r}")
    return change


def _numbers(data: bytes, change: BufferChange, buffers: Sequence[Tensor]) -> Tensor:
    dtype = dtype_of(change, buffers)
    if len(data) != num_elements(change, buffers) * dtype.itemsize:
        raise ValueError("the message is too short")
    return tensor_of(data, dtype)
