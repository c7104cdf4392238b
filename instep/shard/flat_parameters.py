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

from instep.memory import align_bytes
from instep.net.process_group import Group
from instep.shard.layout import Cost, FlatLayout, cut, keep_whole
from instep.shard.matrices import OwnedParameters
from instep.shard.transfer import all_gather
from instep.shard.unit import Unit
from instep.state import homes
from instep.state.homes import Home, ParameterShard


class FlatParameters(Home):
    """``parameters`` of one dtype and device, whole on every rank, in flat memory: cut anywhere, or, where a
    ``cost`` of stepping each is given, whole in the slice of one rank.

    At construction, collective: the parameters move into it, with the values that they have on the group's
    first rank, or, unless ``aligned``, on each. ``outer`` is a home that they stay in: what ranks of
    ``group`` have alike of it is divided here. An optimizer steps the pieces in ``held``; ``share`` brings
    them to all ranks.
    """

    layout: FlatLayout

    def __init__(
        self,
        parameters: Sequence[Tensor],
        cost: Cost | None,
        group: Group,
        *,
        aligned: bool = True,
        outer: Home | None = None,
    ) -> None:
        first = parameters[0]
        self.outer = outer
        if outer is not None:
            outer.make_room()
        self.parameters, self.names = list(parameters), [""] * len(parameters)
        self.group = self.everyone = group
        granule = max(align_bytes(first.device) // first.itemsize, 16)
        lengths = [p.numel() for p in parameters]
        if cost is None:
            self.layout = cut(lengths, group.size, granule)
        else:
            self.layout = keep_whole(lengths, group.size, granule, [cost(p.shape) for p in parameters])
        nbytes = self.layout.num_elements * first.itemsize
        segment = group.allocate(nbytes, align_bytes(first.device), first.device)
        flat = segment.elements(first.dtype)[: self.layout.num_elements]
        self.flat = flat if segment.fd is not None else flat.zero_()  # the padding travels too
        for parameter, offset in zip(parameters, self.layout.offsets, strict=True):
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.detach())
        if aligned:
            group.broadcast(self.flat.view(torch.uint8), "the first values of the parameters")
        size, rank = group.size, group.rank
        shown = group.map_all([self.flat], "the exchange of memory") if size > 1 else None
        # The same memory of the other ranks, the next one first; None where it cannot be reached.
        self.others: list[Tensor] | None = None
        if shown is not None:
            self.others = [shown[(rank + k) % size][0] for k in range(1, size)]
        self.held = []
        for x in self.layout.pieces(group.rank):
            p = self.parameters[x.parameter]
            shape, box = (p.shape, None) if outer is None else (outer.shape_of(p), outer.box_of(p))
            whole = ParameterShard(p, x.first, x.last, p.detach(), shape, box)
            self.held.append(replace(whole, tensor=whole.part_of(p)))

    @property
    def bytes_to_share(self) -> int:
        """That ``share`` sends, or writes to others' memory."""
        return self.layout.slice_length * self.flat.itemsize * (self.group.size - 1)

    def slices_with(self, parameter: Tensor) -> list[int]:
        return self.layout.slices_with(next(i for i, p in enumerate(self.parameters) if p is parameter))

    def share(self, operation: str) -> bool:
        """The own pieces are new; whether the others' are here only after a barrier. Collective."""
        if self.others is None:
            all_gather(self.group, self.flat, operation)
            return False
        length = self.layout.slice_length
        begin = self.group.rank * length
        for other in self.others:
            other[begin : begin + length].copy_(self.flat[begin : begin + length])
        return True


class ShardedParameters:
    """Trainable parameters of the groups of an optimizer: this rank's shards of units, and new
    ``FlatParameters``, one per dtype and device, for all others. Unless ``aligned``, new ones keep each
    rank's values. Of a home that may be divided further (``Home.replicas``), each rank has memory for what it
    holds of it. Where a ``cost`` says that each is stepped whole, shards of units are ``OwnedParameters``.

    Parameters are numbered in the order of the groups, frozen ones too. ``held`` are the pieces that this
    rank steps by number, in that order; ``owned`` all parameters that are sharded, here or elsewhere, with
    address and shape of those that are in flat memory.
    """

    def __init__(self, group: Group, cost: Cost | None, *, aligned: bool = True) -> None:
        self._group, self.cost, self._aligned = group, cost, aligned
        self.spaces: list[FlatParameters | OwnedParameters | Unit] = []
        self.held: dict[int, ParameterShard] = {}
        self.owned: dict[Tensor, tuple[int, torch.Size] | None] = {}

    def take(self, groups: Sequence[Mapping[str, Any]], first_group: int) -> list[list[Tensor]]:
        """Take the parameters of the groups from ``first_group`` on; the own pieces of each. Collective."""
        numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        units: dict[int, Unit] = {}
        divided: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Unit]]] = {}
        flat: dict[tuple[torch.dtype, torch.device, Home | None], list[Tensor]] = {}
        for p in (p for group in groups[first_group:] for p in group["params"] if p.requires_grad):
            self.owned[p] = None
            if not isinstance(there := homes.home(p), Unit):
                if there is None or there.num_shares(p):
                    flat.setdefault((p.dtype, p.device, there), []).append(p)
            elif self.cost is None or self._group.size == 1:
                units[id(there)] = there
            else:
                divided.setdefault((p.dtype, p.device), []).append((p, there))
        with torch.no_grad():
            made = [
                FlatParameters(members, self.cost, self._group, aligned=self._aligned, outer=outer)
                for (*_, outer), members in flat.items()
            ]
            matrices = [OwnedParameters(x, self.cost, self._group) for x in divided.values() if self.cost]
        self.spaces += [unit for unit in units.values() if unit not in self.spaces]
        self.spaces += [*made, *matrices]
        self.owned |= {p: (p.data_ptr(), p.shape) for space in made for p in space.parameters}
        # The local optimizer is one of its own, whose steps are not those of the parameters' optimizer.
        new = {id(p) for group in groups[first_group:] for p in group["params"]}
        mine = [x for unit in units.values() for x in unit.held if id(x.parameter) in new]
        pieces = [replace(x, tensor=x.tensor.detach()) for x in mine]
        pieces += [x for space in (*made, *matrices) for x in space.held]
        held = {numbers[id(x.parameter)]: x for x in pieces if x.parameter in self.owned}
        self.held |= {number: held[number] for number in sorted(held)}
        return [
            [held[numbers[id(p)]].tensor for p in group["params"] if numbers[id(p)] in held]
            for group in groups[first_group:]
        ]

    @property
    def matrices(self) -> list[OwnedParameters]:
        return [space for space in self.spaces if isinstance(space, OwnedParameters)]

    def set_gradients(self) -> None:
        """Every piece gets its part of its parameter's gradient, unless it was gathered."""
        for held in self.held.values():
            gradient = held.parameter.grad
            if gradient is None or held.tensor.grad is not None:
                continue
            if gradient.shape == held.tensor.shape:
                held.tensor.grad = gradient.detach()
            else:
                held.tensor.grad = held.part_of(gradient)

    @property
    def bytes_to_share(self) -> int:
        """That this rank sends or writes after each update."""
        return sum(space.bytes_to_share for space in self.spaces if not isinstance(space, Unit))

    def share(self, operation: str) -> None:
        """The own pieces are new: all ranks get them. No rank may compute with the old ones. Collective."""
        written = [space.share(operation) for space in self.spaces if isinstance(space, FlatParameters)]
        if any(written):
            self._group.barrier(operation)
        for matrices in self.matrices:
            matrices.share(operation)
