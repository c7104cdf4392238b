"""Do replicas still hold the same weights? What each rank says of its own with every exchange, at no message.

Ranks drift apart by what happens on one of them alone: a state dict is loaded, parameters are reset, a weight
or a gradient is edited, the learning rate is another. No loss curve tells. So every header has two numbers,
which have to be the same on all ranks:

    edited     how often each parameter was written to since the last optimizer step: autograd counts its
               versions, so that a state dict loaded on one rank is seen in the next exchange
    sampled    a CRC-32 of some of the weights that the last optimizer step has left: of every R-th of P
               parameters, R = max(1, P // 16), the next piece, so that all has had its turn in 1024 steps

    step                            0    1    2    3    4    5    R = 2
    parameters 0, 2, 4, ...         piece 0   piece 1   piece 2
    parameters 1, 3, 5, ...              piece 0   piece 1   piece 2

They only cast doubt, since a rank may write what was there. In doubt all ranks hash all that they hold alike,
and raise where that differs (``state.replicas``). Weights are sampled where an optimizer has left them, not
where they are used: a loop may move them aside between two backwards, on each rank in its own way, if it puts
them back before the step. Frozen parameters and buffers may be each rank's own, as with torch's DDP.

It costs the reading of a 1024th of the weights per step, and some 0.2 us per parameter.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter

import torch
from torch import Tensor

from instep.memory import as_bytes
from instep.net.device import fetch
from instep.net.process_group import Group
from instep.reduce.header import Header, describe_step
from instep.state.replicas import compare_replicas, odd_one_out, ranks_listed
from instep.state.shards import MODEL, Shard, elements

AT_ONCE = 16  # parameters in a sample, at least
PERIOD = 1024  # steps in which every element has its turn, of up to 16384 parameters
LEAST_BYTES = 64  # of a parameter in a sample
WRITTEN = "(a state dict loaded, parameters reset, weights edited in place)"
UPDATED = (
    "the last optimizer step did not leave the same: on one rank alone another learning rate, an "
    "optimizer's state loaded, gradients edited, or weights changed past autograd (.data); or an update "
    "computed otherwise"
)
FIX = "Do on every rank what is done on one, and go on from a checkpoint of before"
UNWATCHED = (
    ". Where hosts compute updates in different ways, take hosts of one kind, or "
    "DataParallel(check_replicas=False), which trains without this comparison; fully_shard always compares"
)
_claims, _version, _tensor = attrgetter("sampled", "edited"), attrgetter("_version"), itemgetter(1)
Replica = tuple[str, Tensor]
"""The name and the live memory of what other ranks hold, too."""


class ReplicaWatch:
    """What this rank holds as others do, ``held()``: in an order that they have, too.

    Each of ``alike`` are ranks of ``group`` that hold the same. In a step: ``begin`` before an exchange;
    ``compare`` in it, with the headers of all ranks; ``stepped`` after the optimizer's step. ``settled`` when
    parameters were written to on all ranks alike.
    """

    def __init__(
        self, group: Group, held: Callable[[], Sequence[Replica]], alike: Sequence[Sequence[int]]
    ) -> None:
        self._group, self._held, self._alike = group, held, alike
        self._mine = tuple(next((ranks for ranks in alike if group.rank in ranks), ()))
        self._is_on = any(len(ranks) > 1 for ranks in alike)
        self._versions: list[int] = []
        self._late: Callable[[], Tensor] | None = None  # what a device had in the sample before
        self.sampled = self.edited = 0
        self.steps = 0  # of the optimizer, that the sample is of
        self.settled()

    def settled(self) -> None:
        """What is held counts as not written to."""
        if self._is_on:
            self._versions = [*map(_version, map(_tensor, self._held()))]

    def stepped(self, steps: int) -> None:
        """An optimizer has made ``steps`` by now."""
        self.steps = steps
        if self._is_on:
            self.settled()
            self.sampled = self._sample(steps)

    def begin(self) -> None:
        """An exchange begins: what was written to since the last step?"""
        if not self._is_on:
            return
        versions = [*map(_version, map(_tensor, self._held()))]
        self.edited = 0
        if versions != self._versions:
            times = [now - before for now, before in zip(versions, self._versions, strict=True)]
            self.edited = zlib.crc32(repr(times).encode())

    def compare(self, headers: Sequence[Header]) -> None:
        """Where ``headers`` cast doubt, compare all that is held. Collective.

        Raises:
            ReplicasDiffer: on every rank, naming step, parameters and ranks, and which of these have written.
        """
        if not self._is_on or len(set(map(_claims, headers))) == 1:
            return
        if any(len({_claims(headers[r]) for r in ranks}) > 1 for ranks in self._alike):
            shards = [Shard.whole(MODEL + name, x, self._mine) for name, x in self._held()]
            when = f"{describe_step(headers[self._group.rank])},"
            compare_replicas(shards, self.steps, self._group, self._words(headers), when)

    def _words(self, headers: Sequence[Header]) -> tuple[str, str]:
        """The cause and the fix: was it written to since the last optimizer step, or left so by that?"""
        edited = dict(zip(self._group.ranks, (header.edited for header in headers), strict=True))
        votes = [{self._group.ranks[r]: {"": str(headers[r].edited)} for r in ranks} for ranks in self._alike]
        odd = odd_one_out(*votes)
        if odd is None:
            return UPDATED, FIX + UNWATCHED
        since = f"since the last optimizer step {WRITTEN}"
        if writers := tuple(rank for rank in odd.ranks if edited[rank]):
            return f"{ranks_listed(writers)} wrote to parameters {since}, and not as other ranks did", FIX
        return f"{ranks_listed(odd.ranks)} did not write to parameters as the other ranks did {since}", FIX

    def _sample(self, steps: int) -> int:
        """The CRC-32 of what has its turn; of what a device has, that of the step before."""
        held = self._held()
        every = max(1, len(held) // AT_ONCE)
        crc, aside = 0, list[Tensor]()
        visit, num_visits = steps // every, max(1, PERIOD // every)
        for _, x in held[steps % every :: every]:
            length, itemsize = x.numel(), x.itemsize
            piece = max(LEAST_BYTES // itemsize, -(-length // num_visits))
            first = visit % max(1, -(-length // piece)) * piece
            last = min(first + piece, length)
            if x.is_cpu and x.is_contiguous():  # read where it lies: a view would take ten times as long
                at = x.data_ptr() + first * itemsize
                crc = zlib.crc32(ctypes.string_at(at, (last - first) * itemsize), crc)
                continue
            values = as_bytes(elements(x.detach(), first, last))
            if x.is_cpu:
                crc = zlib.crc32(values.numpy().data, crc)
            else:
                aside.append(values.to(aside[0].device) if aside else values)
        late, self._late = self._late, fetch(torch.cat(aside)) if aside else None
        return crc if late is None else zlib.crc32(late().numpy().data, crc)
