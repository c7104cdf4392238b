"""What a message between stages says of itself: a head of words, and a row of words per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from instep.memory import ALIGN_BYTES
from instep.pipeline.actions import SENDS, Action
from instep.pipeline.communication import send_of
from instep.state.homes import dense_strides, with_strides

MAX_TENSORS, MAX_DIMS = 16, 8
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
VERSION = 7
STAYS, LEAVES, GONE = range(3)  # LEAVES comes to the end of the step, GONE does not
ROW = 4 + 2 * MAX_DIMS  # words of a tensor: is it on a device, trained, dtype, 1 + dims, shape, strides
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
    num_tensors: int = 0  # a row follows for each

    @property
    def action(self) -> str:
        """What the sender calls it."""
        kind = KINDS[self.kind] if 0 <= self.kind < len(KINDS) else f" kind {self.kind} "
        return str(Action(self.stage, kind, self.micro_batch, self.tie))


NUM_KEYS = MessageHead._fields.index("number")  # of the words that say what it is
SENT_NS = MessageHead._fields.index("sent_ns")
HEAD = len(MessageHead._fields)


class TensorSpec(NamedTuple):
    """How a tensor looks."""

    on_device: bool  # that of each rank, and not the CPU
    requires_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # what is computed from a transposed tensor has other last bits

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, part: Tensor, device: torch.device) -> Tensor:
        """``part``, its bytes, as such a tensor; on ``device`` if it was on one."""
        part = part.to(device) if self.on_device else part
        x = part.view(self.dtype).as_strided(self.shape, self.strides)
        return x.requires_grad_() if self.requires_grad else x

    def row(self) -> list[int]:
        left = [0] * (MAX_DIMS - len(self.shape))
        head = [self.on_device, self.requires_grad, DTYPES.index(self.dtype), 1 + len(self.shape)]
        return [*head, *self.shape, *left, *self.strides, *left]


NOTHING = [0] * ROW  # of None


def specs_of(rows: Sequence[int]) -> list[TensorSpec | None]:
    """What the rows of a message describe."""
    found: list[TensorSpec | None] = []
    for at in range(0, len(rows), ROW):
        on_device, trained, dtype, dims, *rest = rows[at : at + ROW]
        shape, strides = tuple(rest[: dims - 1]), tuple(rest[MAX_DIMS : MAX_DIMS + dims - 1])
        found.append(
            TensorSpec(bool(on_device), bool(trained), DTYPES[dtype], shape, strides) if dims else None
        )
    return found


def described(action: Action, tensors: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    """The rows of ``tensors``, which are sent as ``action``; and those that are there, each as one row in the
    order of its memory.

    Raises:
        TypeError: they cannot be sent.
    """
    rows, found = list[int](), list[Tensor]()
    for x in tensors:
        if x is None:
            rows += NOTHING
            continue
        if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.ndim > MAX_DIMS:
            raise _not_sendable(action, tensors)
        own = x.detach()
        if not own.is_contiguous():
            own = with_strides(own, dense_strides(own))
        rows += TensorSpec(is_on_device(x), x.requires_grad, x.dtype, tuple(x.shape), own.stride()).row()
        found.append(own.as_strided((own.numel(),), (1,)))
    if len(tensors) > MAX_TENSORS:
        raise _not_sendable(action, tensors)
    return rows, found


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
