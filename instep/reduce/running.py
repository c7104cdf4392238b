"""Running statistics over the micro-batches of a step: measured by each rank, applied by all in one order.

Batch norm changes its buffers in forward, once per micro-batch:

    running = (1 - momentum) * running + momentum * statistic

If every rank did so for its own micro-batches, the ranks' buffers would differ. So forward only measures, and
at the end of the step every rank applies the measurements of all micro-batches:

    rank 0   measures in micro-batches 0, 1     |  all-gather  |   applies 0, 1, 2, 3
    rank 1   measures in micro-batches 2, 3     |              |   applies 0, 1, 2, 3

The buffers then have the bits of one process that ran the micro-batches one after the other, because the
formula is that of torch's kernels, which round differently for different inputs (``Rule``).

A ``BufferChange`` describes the changes of all buffers that one formula changes in a micro-batch.
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


class Rule(IntEnum):
    """How a kernel computes the new value of a buffer of dtype t, from left to right.

    SUM_IN_T     t(m) * statistic + t(1 - m) * running                      every operation rounds to t
    SUM_IN_32    the same, but the product with the statistic and the sum are in float32; the sum rounds to t
    SUM_IN_64    the same, in float64
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
    """The change of ``buffers``, each once, by ``rule`` in one micro-batch.

    ``momentum`` is the m of the rule; None is 1 / count, by the counter of each buffer in ``counters``. If
    ``num_rows`` is not 0, that many instances each change the buffer, and their mean is the new value.
    """

    rule: Rule
    buffers: tuple[int, ...]
    momentum: float | None
    counters: tuple[int, ...] = ()
    num_rows: int = 0


Changes = Sequence[tuple[BufferChange, Tensor]]
"""Of one micro-batch, in order: each with the statistics of its buffers, concatenated."""


def to_bytes(by_micro_batch: Mapping[int, Changes]) -> bytes:
    """The message that ``from_bytes`` reads: a line of JSON, then the statistics."""
    listed = [
        [index, [[c.rule, c.buffers, c.momentum, c.counters, c.num_rows] for c, _ in changes]]
        for index, changes in by_micro_batch.items()
    ]
    statistics = (bytes_of(x) for changes in by_micro_batch.values() for _, x in changes)
    return json.dumps(listed).encode() + b"\n" + b"".join(statistics)


def from_bytes(data: bytes, buffers: Sequence[Tensor], whose: str) -> dict[int, Changes]:
    """The changes to ``buffers`` by each micro-batch of another rank, ``whose``.

    Raises:
        Desync: a rank with the same buffers would not send this.
    """
    start = data.find(b"\n") + 1
    try:
        found: dict[int, Changes] = {}
        for index, changes in json.loads(data[:start]):
            found[int(index)] = own = []
            for fields in changes:
                change = _change(fields, len(buffers))
                is_wide = change.rule is Rule.ALL_IN_64
                dtype = torch.float64 if is_wide else buffers[change.buffers[0]].dtype
                num_elements = sum(buffers[b].numel() for b in change.buffers) * max(change.num_rows, 1)
                end = start + (0 if change.rule is Rule.COUNT else num_elements * dtype.itemsize)
                if len(data) < end:
                    raise ValueError("the message is too short")
                own.append((change, tensor_of(data[start:end], dtype)))
                start = end
    except (ValueError, TypeError, KeyError) as error:
        raise Desync(
            f"{whose} sent running statistics of other buffers than this rank has: build the same modules on "
            "every rank"
        ) from error
    return found


def _change(fields: Any, num_buffers: int) -> BufferChange:
    rule, buffers, momentum, counters, num_rows = fields
    change = BufferChange(Rule(rule), tuple(buffers), momentum, tuple(counters), num_rows)
    distinct = 0 < len(set(buffers)) == len(buffers)
    counted = len(counters) == (len(buffers) if momentum is None else 0)
    exist = all(type(b) is int and 0 <= b < num_buffers for b in (*buffers, *counters))
    numbers = type(num_rows) is int and num_rows >= 0 and isinstance(momentum, float | int | None)
    if not (distinct and counted and exist and numbers):
        raise ValueError(f"expected a change of distinct buffers, 0 to {num_buffers - 1}, got {fields!r}")
    return change


def apply(buffers: Sequence[Tensor], by_micro_batch: Mapping[int, Changes]) -> None:
    """Change ``buffers`` in place by the measurements of all micro-batches, in their order."""
    new: dict[int, Tensor] = {}  # values so far, flat
    added: dict[int, int] = {}  # to counters
    before: dict[int, int] = {}  # counts, read once: reading waits for the device

    def factor(counter: int) -> float:
        if counter not in before:
            before[counter] = int(buffers[counter].item())
        return 1.0 / float(before[counter] + added.get(counter, 0))

    for index in sorted(by_micro_batch):
        for change, statistics in by_micro_batch[index]:
            if change.rule is Rule.COUNT:
                assert change.momentum is not None
                for b in change.buffers:
                    added[b] = added.get(b, 0) + int(change.momentum)
                continue
            running = [new[b] if b in new else buffers[b].detach().reshape(-1) for b in change.buffers]
            sizes, device = [len(x) for x in running], running[0].device
            m = [factor(c) for c in change.counters] if change.counters else change.momentum
            momentum = torch.tensor(m, dtype=torch.float64, device="cpu")
            if change.counters:
                momentum = momentum.repeat_interleave(torch.tensor(sizes, device="cpu")).to(device)
            statistics = statistics.to(device)
            if change.num_rows:
                statistics = statistics.view(change.num_rows, -1)
            value = _updated(change.rule, torch.cat(running), statistics, momentum)
            value = value.mean(0) if change.num_rows else value
            new.update(zip(change.buffers, value.split(sizes), strict=True))
    for b, value in new.items():
        buffers[b].detach().copy_(value.view(buffers[b].shape))
    for b, number in added.items():
        buffers[b].detach().add_(number)


def _updated(rule: Rule, running: Tensor, statistic: Tensor, momentum: Tensor) -> Tensor:
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
