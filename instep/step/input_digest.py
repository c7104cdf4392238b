"""Warns when all ranks read the same data, by the inputs of the first forwards.

In a plain loop, a ``DataLoader`` without a ``DistributedSampler`` gives every rank the same batches: W ranks
do the work of one, W times. In a declared step the data of a micro-batch has to follow from the step and the
index of the micro-batch, and the common mistake takes it from an iterator that every rank begins anew:

    for micro_batch, (x, y) in zip(model.micro_batches(8), dataloader): ...

              micro-batch    0   1   2   3   4   5   6   7
    one rank      reads      a   b   c   d   e   f   g   h
    two ranks                a   b   c   d | a   b   c   d        other data, and no error

So in the first steps the header of an exchange carries a digest of this rank's first inputs, and the first
rank compares. Inputs that stay the same for good (a benchmark's, a fixed grid) are right on any number of
ranks, and a few distinct numbers may be equal by chance: no warning then. Disjoint shares in a declared step,
by a ``DistributedSampler``, look like correct data, and are not noticed.

With an ``instep.Loader`` the header carries the digest of the loader's first sample instead, which has to be
the same on all ranks (``reduce/header.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from instep.errors import warn
from instep.state.sampled_digest import sampled_digest

NUM_STEPS = 4  # that are compared, from wrapping on
MIN_DISTINCT = 8  # values of an input; fewer may be equal by chance


class HasDigest(Protocol):
    """A data source whose first sample has a ``digest``: 0 if this rank has read none."""

    digest: int


class InputDigest:
    """A digest of this rank's first inputs, in the first steps.

    A step: ``begin``; ``given`` in a forward while it ``waits``, which is once for each micro-batch that was
    ``opened``, and once before ``begin`` in an undeclared step; ``compare`` with the ``word`` of all ranks.
    """

    def __init__(self) -> None:
        self.looks = True  # in this step
        self._declared = False
        self._source: HasDigest | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._steps = 0
        self.waits = True  # for the next forward
        self._first: int | None = None  # of a plain loop the newest
        self._varied = False  # whether later inputs differed
        self._num_alike = 0  # steps in which all ranks had the same inputs, and others than before
        self._leaves: Sequence[Sequence[int]] = ()  # by rank, of the first step

    @property
    def word(self) -> int:
        """What this rank reports: 62 bits, 0 for nothing."""
        if self._source is not None:
            return self._source.digest
        return self._first << 1 | self._varied if self.looks and self._first else 0

    def begin(
        self, leaves: Sequence[Sequence[int]], *, declared: bool, source: HasDigest | None = None
    ) -> None:
        """A step begins, of ``leaves`` by rank, with data from ``source``."""
        if declared != self._declared:
            self._begin_anew()
        self._steps += 1
        self.looks, self.waits = source is None and self._steps <= NUM_STEPS, False
        self._leaves, self._declared, self._source = self._leaves or leaves, declared, source

    def opened(self) -> None:
        """A micro-batch begins."""
        self.waits = self.looks

    def given(self, inputs: Any) -> None:
        """A forward begins with ``inputs``, its arguments."""
        if torch.compiler.is_compiling():
            return
        self.waits = False
        digest = sampled_digest(inputs, min_distinct=MIN_DISTINCT)
        if not self._declared:  # the newest counts: the first batch may be one to warm up on
            self._varied = self._first not in (None, digest)
            self._first = digest
            return
        if self._first is None:
            self._first = digest
        self._varied |= digest != self._first

    def compare(self, words: Sequence[int], ranks: Sequence[int], rank: int) -> None:
        """The step is done: ``rank`` 0 of the group warns if all ``ranks``, by their ``words``, agree."""
        self.waits = not self._declared and self._steps < NUM_STEPS
        known = self._leaves  # of ranks that share micro-batches, the first
        busy = [r for r, leaves in enumerate(known) if leaves and known.index(leaves) == r]
        if rank or not self.looks or len(words) != len(ranks) or len(busy) < 2:
            return
        found = [words[r] for r in busy]
        if found[0] and len({word >> 1 for word in found}) == 1 and any(word & 1 for word in found):
            self._num_alike += 1
        needed = 1 if self._declared else 2  # a plain loop may have had another batch before, to warm up
        if self._num_alike >= needed:
            self._steps, self.waits = NUM_STEPS, False
            first, second = (f"rank {ranks[r]}" for r in busy[:2])
            if self._declared:
                first, second = (f"micro-batch {known[r][0]} on rank {ranks[r]}" for r in busy[:2])
                fix = (
                    "as in zip(model.micro_batches(G), dataloader), so the result depends on the number of "
                    "ranks. Pass an instep.Loader to micro_batches(), or index the data by the step and "
                    "micro_batch.index"
                )
            else:
                fix = (
                    "so all ranks compute the same gradients. Give each rank its own share of the data "
                    "(torch.utils.data.DistributedSampler)"
                )
            warn(
                f"{first} and {second} were given the same inputs in the first steps: each rank seems to "
                f"read the same data from the beginning, {fix}. Ignore this if it is intended",
            )
