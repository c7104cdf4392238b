"""What a sharded optimizer needs of the memory that parameters live in, and what one rank holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from instep.mesh.group import Group
from instep.shard.layout import Layout


@dataclass(frozen=True, eq=False)
class Held:
    """What one rank holds of a parameter: elements ``first`` to ``last`` in the order of memory.

    ``tensor`` is what the local optimizer steps: a view of the memory that counts between steps, in the
    parameter's shape and strides where it is all of it, else flat. ``strides`` are those of all of the
    parameter, where its memory cannot tell at all times.
    """

    parameter: Tensor
    first: int
    last: int
    tensor: Tensor
    strides: tuple[int, ...] | None = None

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.parameter.numel()

    def part_of(self, x: Tensor) -> Tensor:
        """The same elements of ``x``, which has the parameter's shape: a view where it is laid out alike."""
        x = with_strides(x, self.strides or self.parameter.stride())
        return x if self.is_whole else in_memory_order(x)[self.first : self.last]


class Space:
    """Parameters of one dtype and device, laid out in a row that is cut into a slice for every rank.

    Once made, ``held`` are this rank's pieces, which an optimizer steps: ``gradient_of`` each before,
    ``share`` after. Pieces of frozen parameters may be among them, and are not stepped.

    ``resident``      every rank has all values between steps; else others read this rank's pieces
    ``one_copy``      all ranks have the same memory: who writes to it writes for all

    ``parameters``    in the order of ``layout``, ``names`` beside them for errors ("" where none is known)
    ``group``         the ranks of the slices

    With one copy, or where a space is not resident, an optimizer steps no piece before all ranks have come to
    the step. In no case does a rank return from it before all have stepped. An optimizer of parameters that
    have a home already (``claims.settle``) takes all of that space.
    """

    resident: ClassVar[bool] = True
    one_copy: bool = False
    group: Group
    layout: Layout
    parameters: list[Tensor]
    names: list[str]
    held: list[Held]

    @property
    def own_bytes(self) -> int:
        """Of this rank's slice."""
        return sum(x.tensor.numel() * x.tensor.itemsize for x in self.held)

    @property
    def bytes_to_share(self) -> int:
        """That ``share`` sends, or writes to others' memory."""
        return 0

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Those of ``parameter`` where all of it lies in memory."""
        return parameter.stride()

    def gradient_of(self, held: Held) -> Tensor | None:
        """What ``held.tensor`` is to be stepped with, in its dtype and shape; None for a step without it."""
        gradient = held.parameter.grad
        return None if gradient is None else held.part_of(gradient)

    def moved(self) -> Tensor | None:
        """A parameter whose memory somebody else has replaced, if there is one."""
        return None

    def share(self, operation: str) -> bool:
        """The own pieces are new; whether the others' are here only after a barrier. Collective."""
        return False

    def let_go(self) -> None:
        """The optimizer that made this space is closed."""


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x`` with these strides; itself, if it has them."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def in_memory_order(x: Tensor) -> Tensor:
    """The memory of a dense ``x`` as one row, (numel,)."""
    return x.as_strided((x.numel(),), (1,))
