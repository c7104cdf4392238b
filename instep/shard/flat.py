"""Flat memory with the weights whole on every rank, and the way from one rank's slice to all ranks.

    rank 0    | new 0 | old 1 |      rank 0 has updated slice 0         | new 0 | new 1 |
    rank 1    | old 0 | new 1 |      rank 1 has updated slice 1   -->   | new 0 | new 1 |

Where ranks can reach into each other's memory (backend "shm"), each writes its slice into everybody's. Else
each sends it to everybody: S bytes of parameters, W ranks, S (W-1)/W bytes per rank in one step.

One copy: ranks that can reach into each other's memory need not have the weights W times. The first rank's
flat memory is everybody's, each updates its slice of it in place, and nothing has to travel:

    one memory    | old 0 | old 1 |    all have come, each updates its slice    | new 0 | new 1 |    all go on
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm import direct
from instep.comm.messages import Messages
from instep.memory import align_bytes
from instep.mesh.group import Group
from instep.shard.kinds import Place
from instep.shard.space import Held, Space


class Flat(Space):
    """Flat memory for ``parameters`` of one dtype and device, laid out by ``place``.

    At construction, collective: the parameters move into it, with the values that they have on the group's
    first rank; with ``one_copy`` into memory of that rank. ``share`` after each update of ``held``. ``moved``
    tells whose memory is another by now. ``let_go`` gives every rank a copy of its own again.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        place: Place,
        group: Group,
        names: Sequence[str] = (),
        *,
        one_copy: bool = False,
    ) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.names = list(names) or [""] * len(parameters)
        self.group, self._itemsize = group, first.dtype.itemsize
        align = align_bytes(first.device)
        granule = max(align // first.dtype.itemsize, 16)
        self.layout = place([p.numel() for p in parameters], group.size, granule)
        self.one_copy = one_copy and group.size > 1
        self.flat = self._allocate(align, first)  # (W * slice_length,)
        for parameter, offset in zip(parameters, self.layout.offsets, strict=True):
            self._move(parameter, offset)
        if self.one_copy:
            group.barrier("the first values of the parameters")
        else:
            group.broadcast(self.flat.view(torch.uint8), "the first values of the parameters")
        self.others = None if self.one_copy else self._expose()
        self._places = [(p.data_ptr(), p.shape, p.stride()) for p in parameters]
        self.held = [self._hold(*piece) for piece in self._own_pieces()]

    @property
    def own_bytes(self) -> int:
        return self.layout.slice_length * self._itemsize

    @property
    def bytes_to_share(self) -> int:
        return 0 if self.one_copy else self.own_bytes * (self.group.size - 1)

    def moved(self) -> Tensor | None:
        for parameter, place in zip(self.parameters, self._places, strict=True):
            if (parameter.data_ptr(), parameter.shape, parameter.stride()) != place:
                return parameter
        return None

    def share(self, operation: str) -> bool:
        """This rank's slice is new: give it to all, and take theirs.

        Written to other ranks' memory it is theirs only after a barrier, and must not be before one: until
        then they may still compute with the old values.
        """
        if self.one_copy:
            return False
        length = self.layout.slice_length
        parts = self.flat.view(torch.uint8).split(self.own_bytes)
        if self.others is not None:
            begin = self.group.rank * length
            for other in self.others:
                other[begin : begin + length].copy_(self.flat[begin : begin + length])
            return True
        if self.group.sends_best and self.flat.device.type == "cpu":
            messages = Messages(self.group.pg, self.group.ranks)
            self.group.run(lambda: direct.all_gather(parts, messages), operation)
        elif self.group.size > 1:
            self.group.all_gather(self.flat.view(torch.uint8), parts[self.group.rank], operation)
        return False

    def let_go(self) -> None:
        self.others = None
        if not self.one_copy:
            return
        for parameter, (address, *_) in zip(self.parameters, self._places, strict=True):
            if parameter.data_ptr() == address:  # a plain optimizer of every rank would step the one copy
                parameter.data = parameter.detach().clone()

    def _allocate(self, align: int, first: Tensor) -> Tensor:
        """Memory for all of the layout, zeroed: the padding travels too."""
        group, nbytes = self.group, self.layout.num_elements * self._itemsize
        if self.one_copy:
            mine = group.allocate(nbytes if group.rank == 0 else align, align, first.device)
            shown = group.expose([mine.elements(first.dtype)], "the mapping of the one copy")
            assert shown is not None, "checked before: checks.require_one_copy"
            return shown[0][0]
        segment = group.allocate(nbytes, align, first.device)
        flat = segment.elements(first.dtype)
        return flat if segment.fd is not None else flat.zero_()

    def _move(self, parameter: Tensor, offset: int) -> None:
        """``parameter`` moves to ``offset``, with its values and, if it is dense, its strides."""
        strides = torch.empty_like(parameter, device="meta").stride()
        view = self.flat[offset : offset + parameter.numel()].as_strided(parameter.shape, strides)
        if not self.one_copy or self.group.rank == 0:
            view.copy_(parameter.detach())
        parameter.data = view

    def _expose(self) -> list[Tensor] | None:
        """The same memory of the other ranks, the next one first; None where it cannot be reached."""
        size, rank = self.group.size, self.group.rank
        shown = self.group.expose([self.flat], "the exchange of memory") if size > 1 else None
        if shown is None:
            return None
        return [shown[(rank + k) % size][0] for k in range(1, size)]

    def _own_pieces(self) -> list[tuple[Tensor, int, int, int]]:
        pieces = self.layout.pieces(self.group.rank)
        return [(self.parameters[x.parameter], x.first, x.last, x.offset) for x in pieces]

    def _hold(self, parameter: Tensor, first: int, last: int, offset: int) -> Held:
        if last - first == parameter.numel():
            return Held(parameter, first, last, parameter.detach())
        return Held(parameter, first, last, self.flat[offset : offset + last - first])
