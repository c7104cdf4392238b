"""One unit of a fully sharded module: this rank's slice of its weights, and room for all of them.

    master slice   | r |                      what the optimizer steps; lives as long as the unit
    gathered       | 0 | 1 | ... | W-1 |      in the dtype of computation; its bytes come and go
    p.data         NaN . . . . . . . NaN      one element, expanded: while nothing is gathered

The gathered memory is a room that the unit takes and gives back (``pages``). If somebody else has a view of
it when it shall go, an output, a cache, the graph of a second derivative, then it stays theirs, for as long
as they have it, and no unit takes it again: nobody ever reads memory that was freed.

Parameters stay the same objects; ``p.data`` says which of the two they show. That does not count as a change
of ``p`` (``Tensor._version``): what was saved may be used when its values are back. Who reads a parameter at
the wrong time reads NaN; who writes to it gets an error: from torch, at once, or, after ``fill_`` and
``zero_``, which torch lets pass, at the next gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from instep.memory import align_bytes
from instep.mesh.group import Group
from instep.shard.layout import cut
from instep.shard.pages import Rooms
from instep.shard.space import Held, Space
from instep.shard.units import Members
from instep.work import Work


class Unit(Space):
    """The parameters of ``members``, which are of one kind (``units.by_kind``), in slices over ``group``.

    At construction, collective: of the values of the group's first rank each rank keeps its slice, in the
    parameters' own dtype, or, where they compute in ``compute_dtype``, in float32 at least. Parameters on the
    meta device have none yet, and come to ``device``. In ``storages`` it is found by the memory that its
    parameters show, whole or not; ``rooms`` are those of all units of a module. Then ``open``, whatever fills
    ``parts``, and ``show`` make the parameters usable, and ``free`` ends that.
    """

    resident: ClassVar[bool] = False
    flat: Tensor  # (W * slice_length,), gathered; (0,) while there is no room
    storage: torch.UntypedStorage  # of ``flat``
    _room: Tensor | None = None
    _views: list[Tensor]
    _num_own: int  # how many share the storage where nobody else does

    def __init__(
        self,
        number: int,
        members: Members,
        group: Group,
        *,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        storages: dict[int, Unit] | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        first = members.parameters[0]
        self.number, self.name, self.group = number, members.name, group
        self.names, self.parameters = list(members.names), list(members.parameters)
        self.trainable = first.requires_grad
        self.own_dtype = first.dtype  # of the parameters when they came
        compute = first.dtype if compute_dtype is None or first.is_complex() else compute_dtype
        self.dtype = first.dtype  # of the masters
        if compute_dtype is not None:
            self.dtype = torch.promote_types(first.dtype, torch.float32)
        target = (device or torch.device("cpu")) if first.is_meta else first.device
        self.materialised = not first.is_meta
        self.gradient_source: Callable[[Held], Tensor | None] | None = None
        self.work: Work | None = None  # that fills the gathered memory
        self.shown = False
        self.generation = 0  # of the masters
        self.changed: str | None = None  # the name of a parameter that was written to while it was shown
        self._storages = {} if storages is None else storages
        self._rooms = Rooms() if rooms is None else rooms
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        self._shapes = [p.shape for p in self.parameters]
        with torch.inference_mode(False), torch.no_grad():
            self._allocate(target, compute)
            self.held = self._hold()
            if self.materialised:
                self._adopt()
            else:
                self.slice.fill_(torch.nan)
            for i, p in enumerate(self.parameters):
                _replace(p, self._hidden[i])

    @property
    def is_free(self) -> bool:
        """Nothing is gathered, nor being: there is no room for it."""
        return self._room is None

    @property
    def gathered_bytes(self) -> int:
        """What the gathered weights take now."""
        return self.storage.nbytes()

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return self._strides[next(i for i, p in enumerate(self.parameters) if p is parameter)]

    def gradient_of(self, held: Held) -> Tensor | None:
        """What ``gradient_source`` has for ``held``, if its parameter has a gradient."""
        if held.parameter.grad is None or self.gradient_source is None:
            return None
        return self.gradient_source(held)

    def moved(self) -> Tensor | None:
        for p, expected in zip(self.parameters, self._views if self.shown else self._hidden, strict=True):
            if (p.data_ptr(), p.shape, p.dtype) != (expected.data_ptr(), expected.shape, expected.dtype):
                return p
        return None

    def share(self, operation: str) -> bool:
        """The masters are new: what was gathered is not true any more. Nothing is sent."""
        self.free(changed=True)
        self._rooms.drop()  # between steps other things need memory
        self.generation += 1
        return False

    def open(self) -> None:
        """Take memory for all weights.

        Raises:
            ValueError: somebody has written to a parameter while nothing was gathered; on the CPU alone.
        """
        if self._nan.device.type == "cpu" and not math.isnan(abs(self._nan.item())):
            value = self._nan.item()
            self._nan.fill_(torch.nan)
            raise ValueError(
                f"one of {', '.join(map(repr, self.names))} was filled with {value} while its weights were "
                "in slices, where that has no effect: set values before fully_shard(), or load them"
            )
        room = self._rooms.take(self._nbytes, self.slice.device)
        with torch.inference_mode(False), torch.no_grad():
            self.flat = room.view(self._compute)
            self._views = self.views_in(self.flat)
        self.storage = self.flat.untyped_storage()
        self._storages[self.storage._cdata] = self
        self._num_own = _num_users(self.storage)
        self._room = room

    def parts(self) -> list[Tensor]:
        """The slice of every rank, in the gathered memory."""
        return list(self.flat.split(self.layout.slice_length))

    def show(self) -> None:
        """The gathered weights are what the parameters are."""
        self.work = None
        self.shown = True
        for p, view in zip(self.parameters, self._views, strict=True):
            p.data = view
        self._versions = [p._version for p in self.parameters]

    def look(self) -> None:
        """Note in ``changed`` if somebody has written to the gathered weights, in place."""
        if self.shown:
            for p, name, version in zip(self.parameters, self.names, self._versions, strict=True):
                if p._version != version:
                    self.changed = name

    def free(self, *, changed: bool = False) -> None:
        """Give the memory back, or leave it to those who have views of it; the parameters show NaN.

        ``changed`` says that whoever wrote to the parameters, by ``Tensor._version``, has told the masters.
        """
        if self.is_free:
            return
        if not changed:
            self.look()
        if self.work is not None:
            self.work.finished.wait()
            self.work = None
        self.shown = False
        for p, hidden in zip(self.parameters, self._hidden, strict=True):
            p.data = hidden
        del self._storages[self.storage._cdata]
        with_others = _num_users(self.storage) > self._num_own
        room, self._room = self._room, None
        self._without_room()
        assert room is not None
        if with_others:
            self._rooms.leave(room)
        else:
            self._rooms.give(room)

    def whole(self) -> Tensor:
        """New memory for all masters, laid out as the unit is."""
        with torch.inference_mode(False):
            return torch.empty(self.layout.num_elements, dtype=self.dtype, device=self.slice.device)

    def views_in(self, flat: Tensor) -> list[Tensor]:
        """The parameters in ``flat``, which is laid out as the unit is."""
        found = []
        for shape, strides, offset in zip(self._shapes, self._strides, self.layout.offsets, strict=True):
            found.append(flat[offset : offset + shape.numel()].as_strided(shape, strides))
        return found

    def keep(self, i: int, values: Tensor) -> None:
        """Parameter i has ``values``, whole: keep what is this rank's."""
        self.generation += 1
        for held in self.held:
            if held.parameter is self.parameters[i]:
                held.tensor.copy_(held.part_of(values))

    def _allocate(self, device: torch.device, compute: torch.dtype) -> None:
        align = align_bytes(device)
        granule = max(align // min(self.dtype.itemsize, compute.itemsize), 16)
        self.layout = cut([shape.numel() for shape in self._shapes], self.group.size, granule)
        segment = self.group.allocate(self.layout.slice_length * self.dtype.itemsize, align, device)
        self.slice = segment.elements(self.dtype).zero_()  # (slice_length,); the padding travels too
        self._nbytes, self._compute = self.layout.num_elements * compute.itemsize, compute
        self._without_room()
        self._nan = torch.full((), torch.nan, dtype=compute, device=device)
        self._storages[self._nan.untyped_storage()._cdata] = self
        self._hidden = [self._nan.expand(shape) for shape in self._shapes]

    def _without_room(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.empty(0, dtype=self._compute, device=self.slice.device)
        self.storage, self._views = self.flat.untyped_storage(), []

    def _hold(self) -> list[Held]:
        begin = self.group.rank * self.layout.slice_length
        held = []
        for x in self.layout.pieces(self.group.rank):
            shape, strides = self._shapes[x.parameter], self._strides[x.parameter]
            tensor = self.slice[x.offset - begin : x.offset - begin + x.last - x.first]
            if x.last - x.first == shape.numel():
                tensor = tensor.as_strided(shape, strides)
            held.append(Held(self.parameters[x.parameter], x.first, x.last, tensor, strides))
        return held

    def _adopt(self) -> None:
        """Keep the own slice of the first rank's values."""
        whole = self.whole()
        if self.group.rank == 0:
            whole.zero_()
            for p, view in zip(self.parameters, self.views_in(whole), strict=True):
                view.copy_(p.detach())
        self.group.broadcast(whole.view(torch.uint8), f"the first values of unit {self.name!r}")
        self.slice.copy_(whole.split(self.layout.slice_length)[self.group.rank])


def _num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors, and ``storage`` itself, share this memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _replace(p: Tensor, value: Tensor) -> None:
    """``p`` is ``value`` from now on, and the same object, also when it was on the meta device."""
    if not p.is_meta:
        p.data = value
        return
    new = nn.Parameter(value, p.requires_grad)
    new.__dict__.update(p.__dict__)
    torch.utils.swap_tensors(p, new)
