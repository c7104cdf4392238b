"""What a message between stages says of itself: a head of words, and in the first step a row per tensor.

A *route* is all that one rank sends another for one stage and kind of action. What travels there looks alike
in all micro-batches and steps, so it is described in the first step alone:

    first step     | head | row per tensor |     | tensors |
    later steps    | head | tensors |            in memory that was there before they came

A tensor may be None now and then; one that never came before is described when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from instep.memory import ALIGN_BYTES
from instep.mesh.axes import round_up
from instep.pipeline.actions import SENDS, Action
from instep.pipeline.communication import send_of
from instep.state.homes import dense_strides, with_strides

MAX_TENSORS, MAX_DIMS = 16, 8
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
VERSION = 6
STAYS, LEAVES, GONE = range(3)  # LEAVES comes to the end of the step, GONE does not
ROW = 3 + 2 * MAX_DIMS  # words of a tensor: whether it is on a device, dtype, number of dims, shape, strides
WORD, ALIGN = 8, ALIGN_BYTES["cpu"]
VALUES = "VALUES"  # the kind of a message that is no part of a schedule: both ends name it alike
KINDS = (*SENDS, VALUES)
EVALUATION = -1  # in the place of a step
NO_STAGE = -1  # of what goes through an evaluation
ENDING = "the end of a pipeline's step"


class MessageHead(NamedTuple):
    """The words that every message begins with."""

    version: int
    left: int  # one of STAYS, LEAVES, GONE
    step: int
    num_micro_batches: int
    data_identity: int
    data_position: int
    stage: int
    kind: int  # in KINDS
    micro_batch: int
    tie: int
    number: int = 0  # which goes along
    sent_ns: int = 0
    num_tensors: int = 0
    there: int = 0  # bit i: tensor i is not None
    trained: int = 0  # bit i: it requires a gradient
    num_rows: int = 0  # that follow

    @property
    def action(self) -> str:
        """What the sender calls it."""
        kind = KINDS[self.kind] if 0 <= self.kind < len(KINDS) else f" kind {self.kind} "
        return str(Action(self.stage, kind, self.micro_batch, self.tie))


NUM_KEYS = MessageHead._fields.index("number")  # of the words that say what it is
SENT_NS = MessageHead._fields.index("sent_ns")
NUM_WORDS = len(MessageHead._fields) + 1  # behind the head, in a packet, how long it is
HEAD_BYTES = round_up(NUM_WORDS * WORD, ALIGN)
FIRST_BYTES = HEAD_BYTES + round_up((MAX_TENSORS * ROW + 1) * WORD, ALIGN)


class TensorSpec(NamedTuple):
    """How a tensor looks."""

    on_device: bool  # that of each rank, and not the CPU
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # what is computed from a transposed tensor has other last bits

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, part: Tensor) -> Tensor:
        """``part``, its bytes, as such a tensor."""
        return part.view(self.dtype).as_strided(self.shape, self.strides)

    def row(self) -> list[int]:
        left = [0] * (MAX_DIMS - len(self.shape))
        head = [int(self.on_device), DTYPES.index(self.dtype), len(self.shape)]
        return [*head, *self.shape, *left, *self.strides, *left]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> TensorSpec:
        on_device, dtype, ndim, *rest = row
        return cls(
            bool(on_device), DTYPES[dtype], tuple(rest[:ndim]), tuple(rest[MAX_DIMS : MAX_DIMS + ndim])
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


Described: TypeAlias = tuple[int, int, list[int], list[Tensor]]
"""``there`` and ``trained`` as in a head, rows, tensors."""


class Route:
    """How tensors look that travel between two ranks, by their place in a message; None: not known yet.

    ``specs`` were described last, ``fixed`` are those that both ends knew when the step began.
    """

    def __init__(self) -> None:
        self.specs: list[TensorSpec | None] = [None] * MAX_TENSORS
        self.begin()

    def begin(self) -> None:
        """A step begins, for both ends."""
        self.fixed = list(self.specs)
        # Of one packet: the memory that a receive is posted with.
        sizes = (round_up(spec.nbytes, ALIGN) for spec in self.fixed if spec is not None)
        self.packet_bytes = max(FIRST_BYTES, HEAD_BYTES + sum(sizes) + WORD)

    def describe(self, action: Action, tensors: Sequence[Tensor | None]) -> Described:
        """How ``tensors`` are sent as ``action``: which are there and trained, rows unless all look as both
        ends know, and those that are there, each as one row in the order of its memory.

        Raises:
            TypeError, ValueError: they cannot be sent, or have other shapes than the first ones.
        """
        there = trained = 0
        found: dict[int, tuple[TensorSpec, Tensor]] = {}
        for i, x in enumerate(tensors):
            if x is None:
                continue
            if not isinstance(x, Tensor) or x.dtype not in DTYPES or i >= MAX_TENSORS or x.ndim > MAX_DIMS:
                raise _not_sendable(action, tensors)
            there |= 1 << i
            trained |= int(x.requires_grad) << i
            x = x.detach()
            if not x.is_contiguous():
                x = with_strides(x, dense_strides(x))
            spec, known = TensorSpec(is_on_device(x), x.dtype, tuple(x.shape), x.stride()), self.specs[i]
            if known is not None and spec[:3] != known[:3] and action.stage != NO_STAGE:
                raise ValueError(
                    f"{action}: stage {action.stage} sends a tensor of {spec}, and the first micro-batch had "
                    f"{known}: what goes between stages has the same shape in every micro-batch: pad the "
                    "inputs, or what this stage gives"
                )
            found[i] = spec, x
        rows: list[int] = []
        if action.stage == NO_STAGE or any(self.fixed[i] != spec for i, (spec, _) in found.items()):
            for i, (spec, _) in found.items():
                self.specs[i] = spec
                rows += spec.row()
        return there, trained, rows, [x.as_strided((x.numel(),), (1,)) for _, x in found.values()]

    def understand(self, head: MessageHead, rows: Sequence[int]) -> list[TensorSpec]:
        """The specs of the tensors that are there."""
        places = [i for i in range(head.num_tensors) if head.there >> i & 1]
        for k, i in enumerate(places if head.num_rows else ()):
            self.specs[i] = TensorSpec.from_row(rows[k * ROW : (k + 1) * ROW])
        known = self.specs if head.num_rows else self.fixed
        return [spec for i in places if (spec := known[i]) is not None]


def is_on_device(x: Tensor) -> bool:
    return not x.is_cpu


def _not_sendable(action: Action, tensors: Sequence[object]) -> Exception:
    listed = ", ".join(
        f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in tensors
    )
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    return TypeError(
        f"{action}: expected from stage {action.stage} to the next at most {MAX_TENSORS} tensors, or None, "
        f"of at most {MAX_DIMS} dimensions and of {known}, got {listed}: cut elsewhere, or let the next "
        "layer make or convert it"
    )


def sent_for(action: Action) -> Action:
    """What the other one has sent, where ``action`` receives it."""
    return action if action.kind == VALUES else send_of(action)


def numbers_of(action: Action) -> tuple[int, int, int, int]:
    return action.stage, KINDS.index(action.kind), action.micro_batch, action.tie


def places_of(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor of a packet begins, and where its last word ends, in bytes."""
    starts, end = [], HEAD_BYTES
    for nbytes in lengths:
        starts.append(end)
        end += round_up(nbytes, ALIGN)
    return starts, end + WORD
