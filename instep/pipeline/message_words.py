"""What a message between stages says of itself: a line of words, with a row for each of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from instep.memory import ALIGN_BYTES
from instep.mesh.axes import round_up
from instep.pipeline.actions import SENDS, Action
from instep.pipeline.communication import send_of

MAX_TENSORS, MAX_DIMS = 16, 8
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
VERSION = 5
# Version, whether the sender has left the step, step, its number of micro-batches, identity and position of
# their data; of the action stage, kind, micro-batch and tie; a number that goes along, when it was sent,
# where a short message ends, in bytes (its last word says again when it was sent), or by which tag, negated,
# the tensors of a long one follow; number of tensors.
FIELDS = 14
LEFT, ACTION, NUMBER, SENT_NS, END = 1, 6, 10, 11, 12
STAYS, LEAVES, GONE = range(3)  # what word LEFT says: LEAVES comes to the end of the step, GONE does not
# Of a tensor: whether it is there, and needs a gradient; whether it is on the rank's own device, and not on
# the CPU; dtype, number of dimensions, shape, strides.
ROW = 4 + 2 * MAX_DIMS
ABSENT, CONSTANT, TRAINED = range(3)  # an input without a gradient, say, is absent
NUM_WORDS = FIELDS + MAX_TENSORS * ROW
WORD, ALIGN = 8, ALIGN_BYTES["cpu"]
HEAD_BYTES = round_up(NUM_WORDS * WORD, ALIGN)
VALUES = "VALUES"  # the kind of a message that is no part of a schedule: both ends name it alike
KINDS = (*SENDS, VALUES)
EVALUATION = -1  # in the place of a step
NO_STAGE = -1  # of what goes through an evaluation
ENDING = "the end of a pipeline's step"

Check: TypeAlias = Callable[[Sequence[int], Action], None]
"""Raises if the words are not those that an action waits for."""


class TensorSpec(NamedTuple):
    """What there is to know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, part: Tensor) -> Tensor:
        """``part``, its bytes, as such a tensor."""
        return part.view(self.dtype).view(self.shape)


def sent_for(action: Action) -> Action:
    """What the other one has sent, where ``action`` receives it."""
    return action if action.kind == VALUES else send_of(action)


def numbers_of(action: Action) -> list[int]:
    return [action.stage, KINDS.index(action.kind), action.micro_batch, action.tie]


def rows_for(action: Action, tensors: Sequence[Tensor | None], dense: Sequence[Tensor | None]) -> list[int]:
    """``dense`` are the ``tensors`` with the strides that they are sent with."""
    there = [x for x in tensors if x is not None]
    if others := [x for x in there if x.dtype not in DTYPES]:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"{action}: expected tensors of {known} between two stages, got {others[0].dtype}: cut "
            "elsewhere, or convert it before and after"
        )
    if len(tensors) > MAX_TENSORS or any(x.ndim > MAX_DIMS for x in there):
        listed = ", ".join("None" if x is None else f"{x.dtype} {tuple(x.shape)}" for x in tensors)
        raise ValueError(
            f"{action}: expected at most {MAX_TENSORS} tensors of at most {MAX_DIMS} dimensions between two "
            f"stages, got {listed}: cut elsewhere, or pack them into fewer"
        )
    words = []
    for x, its in zip(tensors, dense, strict=True):
        if x is None or its is None:
            words += [ABSENT] + [0] * (ROW - 1)
        else:
            state, left = TRAINED if x.requires_grad else CONSTANT, [0] * (MAX_DIMS - x.ndim)
            here, dtype = int(_is_on_device(x)), DTYPES.index(x.dtype)
            words += [state, here, dtype, x.ndim, *x.shape, *left, *its.stride(), *left]
    return words


def _is_on_device(x: Tensor) -> bool:
    return not x.is_cpu


def specs_of(words: Sequence[int]) -> list[TensorSpec]:
    """Of the tensors that are there."""
    rows = [row[2:] for row in _rows_of(words) if row[0] != ABSENT]
    return [TensorSpec(DTYPES[dtype], tuple(shape[:ndim])) for dtype, ndim, *shape in rows]


def as_sent(
    words: Sequence[int], contiguous: Sequence[Tensor], device: torch.device
) -> Iterator[Tensor | None]:
    """All tensors of a message: those that are there as they were sent."""
    found = iter(contiguous)
    for state, is_on_device, *row in _rows_of(words):
        if state == ABSENT:
            yield None
        else:
            x = next(found)
            x = x.to(device) if is_on_device else x
            strides = row[2 + MAX_DIMS : 2 + MAX_DIMS + x.ndim]
            yield x.as_strided(x.shape, strides).requires_grad_(state == TRAINED)


def _rows_of(words: Sequence[int]) -> list[Sequence[int]]:
    return [words[FIELDS + i * ROW : FIELDS + (i + 1) * ROW] for i in range(words[FIELDS - 1])]


def places_of(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor of a message begins, after its words, and where its last word ends, in bytes."""
    starts, end = [], HEAD_BYTES
    for nbytes in lengths:
        starts.append(end)
        end += round_up(nbytes, ALIGN)
    return starts, end + WORD
