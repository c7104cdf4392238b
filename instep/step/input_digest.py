"""What forwards were given in the first declared steps: two micro-batches with the same data are noticed.

A micro-batch's data has to follow from the step and its index. The natural mistake takes it from something
that each rank iterates over from the beginning:

    for micro_batch, (x, y) in zip(model.micro_batches(8), dataloader): ...

              micro-batch    0   1   2   3   4   5   6   7
    one rank      reads      a   b   c   d   e   f   g   h
    two ranks                a   b   c   d | a   b   c   d        other data, and no error

So in the first steps a digest of a sample of what forward was given travels with the headers, at no message.
The ranks' very first ones are compared; and each rank compares its own micro-batches of a step, because a
loop that gives all of them the same batch does its work several times over.

Not every likeness is a mistake. Inputs that stay the same for good (a benchmark's, a fixed grid) give the
same gradient on any number of ranks; a few distinct numbers may be alike by chance; and where some of a
rank's own are alike, and others not, a small data set comes round. Nothing is said then. Ranks that read
disjoint shares, by a ``DistributedSampler``, cannot be told from right ones, and are not noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from instep.memory import as_bytes

LOOKED = 4  # declared steps, from wrapping on
NUM_TENSORS = 16  # of a forward's that are looked at, at most
NUM_ELEMENTS = 256  # of each, about
LEAST = 8  # distinct values; fewer may be alike by chance
FIX = (
    "Pass an instep.Loader to micro_batches(), or take samples by the step and micro_batch.index; ignore "
    "this if it is meant"
)


class InputDigest(NamedTuple):
    """What a rank tells of its inputs: a digest of its first ones, 0 for nothing; has it had others since?"""

    digest: int
    varied: bool

    def word(self) -> int:
        """Both in one number, of 62 bits."""
        return self.digest << 1 | self.varied

    @classmethod
    def of(cls, word: int) -> InputDigest:
        """Back from the number."""
        return cls(word >> 1, bool(word & 1))


class InputWatch:
    """Watches what the forwards of this rank's micro-batches are given, in the first declared steps.

    A step: ``begin``; for each micro-batch ``opened``, and ``given`` in every forward, of which the first
    counts; then ``compare``, with what all ranks have told by then. ``digest`` is what this rank has to tell.
    """

    def __init__(self) -> None:
        self.digest = 0
        self._steps = 0
        self._waits = False  # for the first forward of the open micro-batch
        self._now: list[int] = []  # digests of the micro-batches of this step
        self._seen: list[int] = []  # different ones, of all steps
        self._leaves: Sequence[Sequence[int]] = ()  # of the first step
        self._firsts_own: Sequence[int] = ()  # of the first rank, in this step
        self._comes_round = False

    def begin(self, leaves: Sequence[Sequence[int]], *, looks: bool) -> None:
        """A step begins, of ``leaves`` by rank; not ``looks``: its data is known to be right."""
        self._steps = self._steps + 1 if looks else LOOKED + 1
        self._waits, self._now = False, []
        self._leaves, self._firsts_own = self._leaves or leaves, leaves[0]
        self.digest = 0

    def opened(self) -> None:
        """A micro-batch begins."""
        self._waits = self._steps <= LOOKED

    def given(self, inputs: Any) -> None:
        """A forward begins with ``inputs``, its arguments."""
        if not self._waits or torch.compiler.is_compiling():
            return
        self._waits = False
        digest = _digest(tensors_in(inputs))
        self._now.append(digest)
        if digest not in self._seen:
            self._seen.append(digest)
        if len(set(self._now)) < len(self._now) and len(set(self._now)) > 1:
            self._comes_round = True
        known = not self._comes_round and 0 not in self._seen
        self.digest = InputDigest(self._seen[0], len(self._seen) > 1).word() if known else 0

    def compare(self, said: Sequence[int], ranks: Sequence[int]) -> None:
        """The step has been made, and the ranks of the group, ``ranks``, have ``said`` this: warn?

        Call it on the group's first rank, which has as many micro-batches as any.
        """
        if self._steps > LOOKED or not self._now:
            return
        mine = InputDigest.of(self.digest)
        if mine.digest and mine.varied and len(self._now) > 1 and len(set(self._now)) == 1:
            self._warn(
                f"micro-batches {' and '.join(map(str, self._firsts_own[:2]))} of a declared step were given "
                "the same inputs, and those of another step others: each micro-batch of a step is to have "
                "samples of its own"
            )
        busy = [r for r, leaves in enumerate(self._leaves) if leaves]
        if len(said) != len(ranks) or len(busy) < 2:
            return
        told = [InputDigest.of(said[r]) for r in busy]
        if mine.digest and len({each.digest for each in told}) == 1 and any(each.varied for each in told):
            first, second = busy[:2]
            self._warn(
                f"micro-batch {self._leaves[first][0]} on rank {ranks[first]} and micro-batch "
                f"{self._leaves[second][0]} on rank {ranks[second]} were given the same inputs in the first "
                "declared step: each rank seems to read the same data from its beginning, as in "
                "zip(model.micro_batches(G), dataloader), so what is trained on depends on the number of "
                "ranks"
            )

    def _warn(self, what: str) -> None:
        if self._steps <= LOOKED:
            self._steps = LOOKED + 1
            warnings.warn(f"{what}. {FIX}", stacklevel=2)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses, and among the attributes of other objects."""
    for leaf in (values,) if isinstance(values, Tensor) else tree_leaves(values):
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
