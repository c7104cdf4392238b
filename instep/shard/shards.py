"""All spaces of one optimizer, and this rank's pieces of them by the number of the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.mesh.group import Group
from instep.shard import claims
from instep.shard.flat import Flat
from instep.shard.kinds import Place
from instep.shard.space import Held, Space


class Shards:
    """Trainable parameters of the groups of an optimizer: the spaces that they have for a home, and one
    ``Flat`` per dtype and device for all others.

    Parameters are numbered in the order of the groups, frozen ones too. ``held`` are the own pieces by
    number, in that order; ``owned`` all parameters that are sharded.
    """

    def __init__(self, group: Group, place: Place, *, one_copy: bool = False) -> None:
        self._group, self._place = group, place
        self.wants_one_copy = one_copy
        self.spaces: list[Space] = []
        self.held: dict[int, Held] = {}
        self.owned: list[Tensor] = []
        self._made: list[Space] = []  # for this optimizer alone
        self._space_of: dict[int, Space] = {}  # by the identity of what is owned

    def take(self, groups: Sequence[Mapping[str, Any]], first_group: int) -> list[list[Tensor]]:
        """Take the parameters of the groups from ``first_group`` on; the own pieces of each. Collective."""
        numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        homes: dict[int, Space] = {}
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in (p for group in groups[first_group:] for p in group["params"] if p.requires_grad):
            self.owned.append(p)
            if (home := claims.home(p)) is not None:
                homes[id(home)] = home
            else:
                by_kind.setdefault((p.dtype, p.device), []).append(p)
        with torch.no_grad():
            made = [
                Flat(members, self._place, self._group, one_copy=self.wants_one_copy)
                for members in by_kind.values()
            ]
        self._made += made
        spaces = [*homes.values(), *made]
        self.spaces += spaces
        trainable = set(map(id, self.owned))
        self._space_of |= {id(p): space for space in spaces for p in space.parameters if id(p) in trainable}
        held = {
            numbers[id(x.parameter)]: x
            for space in spaces
            for x in space.held
            if id(x.parameter) in trainable
        }
        self.held |= {number: held[number] for number in sorted(held)}
        return [
            [held[numbers[id(p)]].tensor for p in group["params"] if numbers[id(p)] in held]
            for group in groups[first_group:]
        ]

    @property
    def others_read(self) -> bool:
        """Whether other ranks compute with, or gather, what this rank updates: not before all have come."""
        return self._group.size > 1 and any(space.one_copy or not space.resident for space in self.spaces)

    def moved(self) -> Tensor | None:
        """A parameter whose memory is not here any more, if there is one."""
        return next((p for p in (space.moved() for space in self.spaces) if p is not None), None)

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Those of ``parameter`` where all of it lies in memory."""
        space = self._space_of.get(id(parameter))
        return parameter.stride() if space is None else space.strides_of(parameter)

    def set_gradients(self) -> None:
        """Every piece gets the gradient that its space has for it."""
        for held in self.held.values():
            held.tensor.grad = self._space_of[id(held.parameter)].gradient_of(held)

    def drop_gradients(self) -> None:
        """The pieces keep no gradient alive."""
        for held in self.held.values():
            held.tensor.grad = None

    @property
    def bytes_to_share(self) -> int:
        """That this rank sends or writes after each update."""
        return sum(space.bytes_to_share for space in self.spaces)

    def share(self, operation: str) -> None:
        """The own pieces are new: all ranks get them. No rank may compute with the old ones. Collective."""
        written = [space.share(operation) for space in self.spaces]
        if any(written):
            self._group.barrier(operation)

    def let_go(self) -> None:
        """End the spaces that were made for this optimizer; homes outlive it."""
        for space in self._made:
            space.let_go()
