"""What forwards were given in the first declared steps: ranks that all read the same data are noticed.

A micro-batch's data has to follow from the step and its index. The natural mistake takes it from something
that each rank iterates over from the beginning:

    for micro_batch, (x, y) in zip(model.micro_batches(8), dataloader): ...

              micro-batch    0   1   2   3   4   5   6   7
    one rank      reads      a   b   c   d   e   f   g   h
    two ranks                a   b   c   d | a   b   c   d        other data, and no error

So in the first steps each rank's exchange header carries a digest of the inputs of its first micro-batch, and
the first rank compares them. Inputs that stay the same for good (a benchmark's, a fixed grid) are right on
any number of ranks, and a few distinct numbers may be the same by chance: no warning then. Ranks that read
disjoint shares, by a ``DistributedSampler``, cannot be told from right ones, and are not noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from instep.memory import as_bytes

LOOKED = 4  # declared steps, from wrapping on
NUM_TENSORS = 16  # of a forward's that are looked at, at most
NUM_ELEMENTS = 256  # of each, about
LEAST = 8  # distinct values; fewer may be the same by chance


class InputDigest:
    """A digest of the first inputs of this rank's micro-batches, in the first declared steps.

    A step: ``begin``; for each micro-batch ``opened``, and ``given`` in every forward, of which the first
    counts, while it ``waits``; then ``compare``, with the ``word`` of every rank.
    """

    def __init__(self) -> None:
        self._steps = 0
        self.waits = False  # for the first forward of the open micro-batch
        self._first: int | None = None
        self._varied = False  # whether later inputs were others
        self._leaves: Sequence[Sequence[int]] = ()  # by rank, of the first step

    @property
    def word(self) -> int:
        """What this rank has to report: 62 bits, 0 for nothing."""
        return 0 if self._steps > LOOKED or not self._first else self._first << 1 | self._varied

    def begin(self, leaves: Sequence[Sequence[int]], *, looks: bool) -> None:
        """A step begins, of ``leaves`` by rank; not ``looks``: its data is known to be right."""
        self._steps = self._steps + 1 if looks else LOOKED + 1
        self.waits = False
        self._leaves = self._leaves or leaves

    def opened(self) -> None:
        """A micro-batch begins."""
        self.waits = self._steps <= LOOKED

    def given(self, inputs: Any) -> None:
        """A forward begins with ``inputs``, its arguments."""
        if torch.compiler.is_compiling():
            return
        self.waits = False
        digest = _digest(tensors_in(inputs))
        if self._first is None:
            self._first = digest
        self._varied |= digest != self._first

    def compare(self, words: Sequence[int], ranks: Sequence[int]) -> None:
        """The step has been made: warn if all ``ranks`` of the group, by their ``words``, read the same."""
        known = self._leaves  # of ranks that share micro-batches, the first
        busy = [r for r, leaves in enumerate(known) if leaves and known.index(leaves) == r]
        if self._steps > LOOKED or len(words) != len(ranks) or len(busy) < 2:
            return
        found = [words[r] for r in busy]
        if found[0] and len({word >> 1 for word in found}) == 1 and any(word & 1 for word in found):
            self._steps = LOOKED + 1
            first, second = busy[:2]
            warnings.warn(
                f"micro-batch {self._leaves[first][0]} on rank {ranks[first]} and micro-batch "
                f"{self._leaves[second][0]} on rank {ranks[second]} were given the same inputs in the first "
                "declared step: each rank seems to read the same data from its beginning, as in "
                "zip(model.micro_batches(G), dataloader), so what is trained on depends on the number of "
                "ranks. Pass an instep.Loader to micro_batches(), or take samples by the step and "
                "micro_batch.index; ignore this if it is meant",
                stacklevel=2,
            )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses, and among the attributes of other objects."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            attributes = getattr(leaf, "__dict__", {}).values()
            yield from (value for value in attributes if isinstance(value, Tensor))


def _digest(tensors: Iterator[Tensor]) -> int:
    """60 bits of a sample of ``tensors``; 0 where it has too few values, or cannot be looked at."""
    hashed, distinct = hashlib.blake2b(digest_size=8), 0
    try:
        for x in islice(tensors, NUM_TENSORS):
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return 0
            # An odd distance: an even one may come to the same column of every row, a border of images.
            sample = x.detach().flatten()[:: x.numel() // NUM_ELEMENTS | 1].cpu()
            hashed.update(f"{x.dtype} {tuple(x.shape)}".encode())
            hashed.update(as_bytes(sample).numpy().data)
            distinct = max(distinct, len(set(sample.tolist())))
    except (RuntimeError, NotImplementedError):  # without values, or not to be read now: sparse, meta, vmap
        return 0
    return int.from_bytes(hashed.digest(), "little") >> 4 if distinct >= LEAST else 0
