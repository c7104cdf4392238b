"""What ``verify`` has to know of a model: all that is different where gradients and weights are in slices.

replicas    rank 0  | d d d d |    rank 1  | d d d d |     two copies of the gradient d
slices      rank 0  | d d . . |    rank 1  | . . d d |     one copy, of both ranks together
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.step.backward import Backward


class Piece(NamedTuple):
    """What this rank has of the gradient of trainable parameter number ``position``.

    ``of(x)`` are the same elements of ``x``, which has the parameter's shape. ``gradient()`` is the piece,
    after an exchange; None if there is none.
    """

    position: int
    of: Callable[[Tensor], Tensor]
    gradient: Callable[[], Tensor | None]


class Value(NamedTuple):
    """A parameter or buffer as it counts between steps, or the piece from element ``first`` that is here."""

    name: str
    first: int
    tensor: Tensor


@dataclass(frozen=True)
class Subject:
    """A model on trial, and what this rank has of it.

    ``model``      what is called; ``backward.module`` is the same without its wrapper, if it has one
    ``strategy``   what a report calls the way in which gradients travel
    ``seed``       keys the random numbers of the trial
    ``copy``       number of the copy of the gradient that this rank has, or has ``pieces`` of; rank 0's is 0
    ``values``     of all parameters, frozen ones too
    ``memory``     what else a step writes to
    ``apart``      inside it, forwards and backwards leave nothing behind that only the wrapper knows of
    """

    model: nn.Module
    backward: Backward
    strategy: str
    seed: int
    copy: int
    pieces: Sequence[Piece]
    values: Sequence[Value]
    memory: Sequence[Tensor] = ()
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
