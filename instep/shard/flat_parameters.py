"""Flat memory that parameters live in, cut into a slice for every rank, and how new slices get to all ranks.

    rank 0    | new 0 | old 1 |      rank 0 has updated slice 0         | new 0 | new 1 |
    rank 1    | old 0 | new 1 |      rank 1 has updated slice 1   -->   | new 0 | new 1 |

Where ranks can reach into each other's memory (backend "shm"), each writes its slice into the memory of all
others. Else each sends it to them: S bytes of parameters, W ranks, S (W-1)/W bytes per rank in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from instep.comm import direct
from instep.comm.perform import perform
from instep.memory import align_bytes
from instep.net.messages import Messages
from instep.net.process_group import Group
from instep.shard.layout import FlatLayout, LayoutRule
from instep.shard.unit import Unit
from instep.state import homes
from instep.state.homes import Home, ParameterShard


class FlatParameters(Home):
    """``parameters`` of one dtype and device, whole on every rank, in flat memory laid out by ``rule``.

    At construction, collective: the parameters move into it, with the values that they have on the group's
    first rank, or, unless ``aligned``, on each. ``outer`` is a home that they stay in: what ranks of
    ``group`` have alike of it is divided here. An optimizer steps the pieces in ``held``; ``share`` brings
    them to all ranks. ``moved`` tells whose memory is another by now.
    """

    layout: FlatLayout

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rule: LayoutRule,
        group: Group,
        *,
        aligned: bool = True,
        outer: Home | None = None,
    ) -> None:
        first = parameters[0]
        self.outer = outer
        self.parameters, self.names = list(parameters), [""] * len(parameters)
        self.group = self.everyone = group
        granule = max(align_bytes(first.device) // first.itemsize, 16)
        self.layout = rule([p.numel() for p in parameters], group.size, granule)
        nbytes = self.layout.num_elements * first.itemsize
        segment = group.allocate(nbytes, align_bytes(first.device), first.device)
        flat = segment.elements(first.dtype)[: self.layout.num_elements]
        self.flat = flat if segment.fd is not None else flat.zero_()  # the padding travels too
        for parameter, offset in zip(parameters, self.layout.offsets, strict=True):
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.detach())
        if aligned:
            group.broadcast(self.flat.view(torch.uint8), "the first values of the parameters")
        self.others = self._expose()
        self._addresses = [(p.data_ptr(), p.shape) for p in parameters]
        self.held = []
        for x in self.layout.pieces(group.rank):
            p = self.parameters[x.parameter]
            whole = ParameterShard(p, x.first, x.last, p.detach(), p.shape)
            self.held.append(replace(whole, tensor=whole.part_of(p)))

    @property
    def bytes_to_share(self) -> int:
        """That ``share`` sends, or writes to others' memory."""
        return self.layout.slice_length * self.flat.itemsize * (self.group.size - 1)

    def slices_with(self, parameter: Tensor) -> list[int]:
        return self.layout.slices_with(next(i for i, p in enumerate(self.parameters) if p is parameter))

    def moved(self) -> Tensor | None:
        """A parameter whose memory other code has replaced, if there is one."""
        for parameter, place in zip(self.parameters, self._addresses, strict=True):
            if (parameter.data_ptr(), parameter.shape) != place:
                return parameter
        return None

    def share(self, operation: str) -> bool:
        """The own pieces are new; whether the others' are here only after a barrier. Collective."""
        if self.group.size == 1:
            return False
        length = self.layout.slice_length
        parts = self.flat.view(torch.uint8).split(length * self.flat.itemsize)
        if self.others is not None:
            begin = self.group.rank * length
            for other in self.others:
                other[begin : begin + length].copy_(self.flat[begin : begin + length])
            return True
        if self.group.prefers_messages and self.flat.device.type == "cpu":
            messages = Messages(self.group.pg, self.group.ranks)
            self.group.run(lambda: perform(direct.all_gather, parts, messages), operation)
        else:
            self.group.all_gather(self.flat.view(torch.uint8), parts[self.group.rank], operation)
        return False

    def _expose(self) -> list[Tensor] | None:
        """The same memory of the other ranks, the next one first; None where it cannot be reached."""
        size, rank = self.group.size, self.group.rank
        shown = self.group.map_all([self.flat], "the exchange of memory") if size > 1 else None
        if shown is None:
            return None
        return [shown[(rank + k) % size][0] for k in range(1, size)]


class ShardedParameters:
    """Trainable parameters of the groups of an optimizer: this rank's shards of units, and new
    ``FlatParameters``, laid out by ``rule``, one per dtype and device, for all others. Unless ``aligned``,
    new ones keep each rank's values. Of a home that may be divided further (``Home.replicas``), each rank has
    memory for what it holds of it.

    Parameters are numbered in the order of the groups, frozen ones too. ``held`` are the own pieces by
    number, in that order; ``owned`` all parameters that are sharded, here or elsewhere.
    """

    def __init__(self, group: Group, rule: LayoutRule, *, aligned: bool = True) -> None:
        self._group, self._rule, self._aligned = group, rule, aligned
        self.spaces: list[FlatParameters | Unit] = []
        self.held: dict[int, ParameterShard] = {}
        self.owned: list[Tensor] = []

    def take(self, groups: Sequence[Mapping[str, Any]], first_group: int) -> list[list[Tensor]]:
        """Take the parameters of the groups from ``first_group`` on; the own pieces of each. Collective."""
        numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        units: dict[int, Unit] = {}
        by_kind: dict[tuple[torch.dtype, torch.device, Home | None], list[Tensor]] = {}
        for p in (p for group in groups[first_group:] for p in group["params"] if p.requires_grad):
            self.owned.append(p)
            if isinstance(there := homes.home(p), Unit):
                units[id(there)] = there
            elif there is None or there.num_shares(p):
                by_kind.setdefault((p.dtype, p.device, there), []).append(p)
        with torch.no_grad():
            made = [self._make(members, outer) for (*_, outer), members in by_kind.items()]
        self.spaces += [*units.values(), *made]
        trainable = set(map(id, self.owned))
        pieces = [x for space in (*units.values(), *made) for x in space.held if id(x.parameter) in trainable]
        # The local optimizer is one of its own, whose steps are not those of the parameters' optimizer.
        held = {numbers[id(x.parameter)]: replace(x, tensor=x.tensor.detach()) for x in pieces}
        self.held |= {number: held[number] for number in sorted(held)}
        return [
            [held[numbers[id(p)]].tensor for p in group["params"] if numbers[id(p)] in held]
            for group in groups[first_group:]
        ]

    def _make(self, members: Sequence[Tensor], outer: Home | None) -> FlatParameters:
        if outer is not None:
            outer.make_room()
        return FlatParameters(members, self._rule, self._group, aligned=self._aligned, outer=outer)

    def moved(self) -> Tensor | None:
        """A parameter whose memory is not here any more, if there is one."""
        found = (space.moved() for space in self.spaces if isinstance(space, FlatParameters))
        return next((p for p in found if p is not None), None)

    def set_gradients(self) -> None:
        """Every piece gets its part of its parameter's gradient."""
        for held in self.held.values():
            gradient = held.parameter.grad
            if gradient is None:
                held.tensor.grad = None
            elif gradient.shape == held.tensor.shape:
                held.tensor.grad = gradient.detach()
            else:
                held.tensor.grad = held.part_of(gradient)

    def drop_gradients(self) -> None:
        """The pieces keep no gradient alive."""
        for held in self.held.values():
            held.tensor.grad = None

    @property
    def bytes_to_share(self) -> int:
        """That this rank sends or writes after each update."""
        return sum(space.bytes_to_share for space in self.spaces if isinstance(space, FlatParameters))

    def share(self, operation: str) -> None:
        """The own pieces are new: all ranks get them. No rank may compute with the old ones. Collective."""
        written = [space.share(operation) for space in self.spaces if isinstance(space, FlatParameters)]
        if any(written):
            self._group.barrier(operation)
