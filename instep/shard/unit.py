"""One unit of a fully sharded module: this rank's slice of its weights, and a buffer for all of them.

    master slice   | r |                      what the optimizer steps; lives as long as the unit
    gathered       | 0 | 1 | ... | W-1 |      in the dtype of computation; its bytes come and go
    p.data         NaN . . . . . . . NaN      one element, expanded: while nothing is gathered
    type(p)        Sliced                     while no module that needs it runs: a read gathers (``sliced``)

Where ranks share memory (backend "shm") all slices lie side by side in memory that every rank has mapped, and
the host has the weights once: then what is gathered is that memory, and comes and goes at no cost
(``mapped``; ``one_copy.MappedWeights``). For the computation it is mapped so that what a rank writes there is
its own, and is forgotten. Not where weights are cast, or shown in another order than they lie in.

Else the gathered memory is a buffer that the unit takes and gives back (``buffer_pool``). If other tensors
are views of it when it shall go, an output, a cache, the graph of a second derivative, then it stays theirs,
for as long as they live, and no unit takes it again: memory that was freed is never read.

Without memory (``is_vacant``) a slice is one NaN, expanded, too: what comes from the meta device before there
are ranks to share it out, and what has left its group. So no rank alone ever has memory for all weights.

What is cut lies in the slices in logical order (``flat_parameters``). A parameter whose own memory has
another one (channels_last, transposed) shows its values in a part of the buffer behind the slices then, to
which they are copied when they have come.

Parameters stay the same objects; ``p.data`` says which of the two they show. That does not count as a change
of ``p`` (``Tensor._version``): what was saved may be used when its values are back. A load does count.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.memory import align_bytes
from instep.mesh.axes import round_up
from instep.net.lane import Work
from instep.net.process_group import Group
from instep.shard.buffer_pool import BufferPool
from instep.shard.flat_parameters import FlatParameters, Stage2Parameters, uncuttable
from instep.shard.layout import cut
from instep.shard.one_copy import MappedWeights
from instep.shard.partition import UnitMembers
from instep.shard.sliced import UnitReader, sliced_class, without_dispatch
from instep.state import homes
from instep.state.homes import ParameterShard

_version: Any = Tensor._version


class Laid(NamedTuple):
    """Memory with all weights of a unit: the slices in a row, and each parameter where it is shown."""

    flat: Tensor  # (W * slice_length,)
    storage: torch.UntypedStorage  # of ``flat``
    views: list[Tensor]
    num_own: int  # how many tensors of ours share the storage


class Unit(FlatParameters):
    """The parameters of ``members``, which are of one kind (``partition.by_kind``), in slices over ``group``.

    At construction, collective: of the values of the group's first rank each rank keeps its slice, in the
    parameters' own dtype, or, where they compute in ``compute_dtype``, in float32 at least. Parameters on the
    meta device have none yet, and come to ``device``; ``vacant``, without memory until some come. In
    ``storages`` it is found by the memory that its parameters show, whole or not; ``buffers`` are those of
    all units of a module. Then ``open``, a gather that fills ``parts``, and ``show`` make the parameters
    usable, and ``free`` ends that; where they are mapped nothing has to fill them. In between, they are of
    their own classes from ``begin_use`` to ``end_use``; else ``reader`` is asked for what they show.
    ``vacate`` ends all of it, until ``lay_out``.
    """

    resident = False
    slice: Tensor  # (slice_length,), of the masters
    mapped: MappedWeights | None  # where the ranks of a host have the weights once, and may show them
    _laid_mapped: Laid | None
    _laid: Laid  # gathered; empty while there is nothing
    _buffer: Tensor | None = None  # that it was gathered into
    _is_mapped: bool = False  # it is ``mapped``, and shown where it lies

    def __init__(
        self,
        number: int,
        members: UnitMembers,
        group: Group,
        *,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        vacant: bool = False,
        storages: dict[int, Unit] | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        first = members.parameters[0]
        self.number, self.name = number, members.name
        self.group = self.everyone = group
        self.names, self.parameters = list(members.names), list(members.parameters)
        self.trainable = first.requires_grad
        self.own_dtype = first.dtype  # of the parameters when they came
        compute = first.dtype if compute_dtype is None or first.is_complex() else compute_dtype
        self.dtype = first.dtype  # of the masters
        if compute_dtype is not None:
            self.dtype = torch.promote_types(first.dtype, torch.float32)
        target = (device or torch.device("cpu")) if first.is_meta else first.device
        self.materialised, self.is_vacant = not first.is_meta, vacant and first.is_meta
        self.gradient_source: Callable[[ParameterShard], Tensor | None] | None = None
        self.work: Work | None = None  # that fills the gathered memory
        self.shown = False
        self.in_use = False  # parameters are of their own classes
        self.reader: weakref.ref[UnitReader] | None = None
        self.generation = 0  # of the masters
        self.changed: str | None = None  # the name of a parameter that was written to while it was shown
        self._storages = {} if storages is None else storages
        self._buffers = BufferPool() if buffers is None else buffers
        self._shapes = [p.shape for p in self.parameters]
        self._strides = [homes.dense_strides(p) for p in self.parameters]
        with torch.inference_mode(False), torch.no_grad():
            self._allocate(target, compute)
            self.held = self._hold()
            if self.materialised:
                self._adopt()
            elif not self.is_vacant:
                self.slice.fill_(torch.nan)
            for i, p in enumerate(self.parameters):
                give_value(p, self._hidden[i])
        self._classes = [type(p) for p in self.parameters]
        self._sliced = [sliced_class(kind, self) for kind in self._classes]
        self._dress(self._sliced)

    @property
    def device(self) -> torch.device:
        """Where its values are."""
        return self.slice.device

    def lay_out(self, group: Group, storages: dict[int, Unit], buffers: BufferPool) -> None:
        """In slices over another ``group`` from now on, without values until they are loaded.

        What the parameters are by themselves (their strides, dtype and class) is known since construction;
        they do not show it any more.
        """
        self.free(changed=True)
        self.group = self.everyone = group
        self._storages, self._buffers = storages, buffers
        self.materialised = self.is_vacant = False
        with torch.inference_mode(False), torch.no_grad():
            self._allocate(self.slice.device, self._compute)
            self.held = self._hold()
        self.hide()

    def vacate(self) -> None:
        """Hold no values, and no memory, until the unit is laid out for another group."""
        if self.work is None or self.work.done():  # else a lost rank may be waited for
            self.free(changed=True)
        self.materialised, self.is_vacant, self.mapped, self._laid_mapped = False, True, None, None
        self.slice = self._nothing(self.slice.shape)  # the old one may still be read by another rank
        for x in self.held:  # in place: optimizers step these
            x.tensor.data, x.tensor.grad = self._nothing(x.tensor.shape), None

    def make_room(self) -> None:
        """As ``Home`` says; in place."""
        if not self.is_vacant:
            self.edits()
            return
        self.is_vacant = False
        with torch.inference_mode(False), torch.no_grad():
            self.slice.data = self._memory()
            for x, new in zip(self.held, self._hold(), strict=True):
                x.tensor.data = new.tensor

    @property
    def has_values(self) -> bool:
        """Whether the masters have some."""
        return self.materialised

    @property
    def is_free(self) -> bool:
        """Nothing is gathered, nor being gathered: the unit has no buffer."""
        return self._buffer is None and not self._is_mapped

    @property
    def flat(self) -> Tensor:
        """(W * slice_length,), gathered; (0,) while there is nothing."""
        return self._laid.flat

    @property
    def storage(self) -> torch.UntypedStorage:
        """Of ``flat``."""
        return self._laid.storage

    @property
    def num_others_bytes(self) -> int:
        shown = self._is_mapped and self.shown
        return self.storage.nbytes() if shown else 0  # the own slice is mapped twice

    @property
    def gathered(self) -> list[Tensor]:
        return [] if self.is_free else [self.flat]

    @property
    def gathered_bytes(self) -> int:
        """What the gathered weights take now, beside the slices: nothing, where these are mapped."""
        return 0 if self._is_mapped else self.storage.nbytes()

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return self._strides[next(i for i, p in enumerate(self.parameters) if p is parameter)]

    def name_of(self, parameter: Tensor) -> str:
        """What the module calls ``parameter``."""
        return next(n for p, n in zip(self.parameters, self.names, strict=True) if p is parameter)

    def gradient_of(self, held: ParameterShard) -> Tensor | None:
        """What ``gradient_source`` has for ``held``, if its parameter has a gradient."""
        if held.parameter.grad is None or self.gradient_source is None:
            return None
        return self.gradient_source(held)

    def edits(self) -> int:
        """The masters are about to change: what is mapped is shown no more. There is nothing to tell."""
        if self.mapped is not None:
            self.free(changed=True)
        return 0

    def share(self, operation: str) -> bool:
        """The masters are new: what was gathered is out of date. Nothing is sent."""
        self.free(changed=True)
        self.rest()
        self._buffers.rest()  # between steps other things may need the memory
        self.generation += 1
        return False

    def loaded(self) -> None:
        super().loaded()
        self.materialised = True

    def open(self) -> bool:
        """Take memory for all weights. Whether they are there at once, and need not be gathered."""
        laid = self._laid_mapped
        if self.mapped is not None and laid is not None:
            self._is_mapped = self.mapped.take(used=_num_users(laid.storage) > laid.num_own)
        if self._is_mapped and laid is not None:
            self._laid = laid
        else:
            self._buffer = self._buffers.take(self._nbytes, self.slice.device)
            self._laid = self._lay(self._buffer)
        self._storages[self.storage._cdata] = self
        return self._is_mapped

    def parts(self) -> list[Tensor]:
        """The slice of every rank, in the gathered memory."""
        return list(self.flat.split(self.layout.slice_length))

    def arrange(self) -> None:
        """All slices have come: give those parameters their values that are not shown where they came."""
        for i in self._behind:
            self._laid.views[i].copy_(self._in(self.flat, i))

    def shown_at(self, offset: int) -> int:
        """The number of the parameter whose values are shown at ``offset``, in elements of the memory."""
        return self._shown[bisect_right(self._shown, (offset, len(self._shown))) - 1][1]

    def show(self) -> None:
        """The gathered weights are what the parameters are."""
        self.work = None
        self.shown = True
        self._point(self._laid.views)
        self._versions = self._count_writes()

    def begin_use(self) -> None:
        """A module that needs the weights, which are shown, begins to run."""
        if not self.in_use:
            self.in_use = True
            self._dress(self._classes)

    def end_use(self) -> None:
        """No module runs that needs them."""
        if self.in_use:
            self.in_use = False
            self._dress(self._sliced)

    def written(self) -> str | None:
        """The name of a parameter that was written to since its gathered weights were shown, in place."""
        if self.shown:
            for name, before, now in zip(self.names, self._versions, self._count_writes(), strict=True):
                if before != now:
                    return name
        return None

    def keep_written(self) -> None:
        """What was written to the gathered weights is what this rank's masters are."""
        self.slice.copy_(self.parts()[self.group.rank])
        for i in self._behind:
            self.keep(i, self._laid.views[i])
        self._versions = self._count_writes()
        self.generation += 1

    def rest(self, *, written: bool = False) -> None:
        """What is mapped shows what all ranks' masters are, whatever this rank has ``written`` to it."""
        if self.mapped is not None:
            self.mapped.rest(written=written)

    def is_used_elsewhere(self) -> bool:
        """Whether other tensors are views of the gathered weights."""
        own = self._laid.num_own + (len(self.parameters) if self.shown else 0)
        return not self.is_free and _num_users(self.storage) > own

    def look(self) -> None:
        """Note in ``changed`` if the gathered weights were written to, in place."""
        self.changed = self.written() or self.changed

    def free(self, *, changed: bool = False) -> None:
        """Give the buffer back, or leave it to the tensors that are views of it; the parameters show NaN.

        ``changed``: the parameters were written to, by ``Tensor._version``, and the masters know of it.
        """
        if self.is_free:
            return
        if not changed:
            self.look()
        if self.work is not None:
            self.work.arrive()
            self.work = None
        self.shown = False
        self.hide()
        del self._storages[self.storage._cdata]
        with_others = self.is_used_elsewhere()
        buffer, self._buffer = self._buffer, None
        self._without_buffer()
        if buffer is not None:
            (self._buffers.hand_over if with_others else self._buffers.give_back)(buffer)
        if self._is_mapped:
            assert self.mapped is not None
            self._is_mapped = False
            (self.mapped.hand_over if with_others else self.mapped.give_back)()
            if changed or self.changed is not None:
                self.rest(written=True)

    def hide(self) -> None:
        """The parameters show nothing, and are not in use."""
        self._point(self._hidden)
        self.end_use()

    def whole(self) -> Tensor:
        """New memory for all masters, laid out as the unit is."""
        with torch.inference_mode(False):
            return torch.empty(self.layout.num_elements, dtype=self.dtype, device=self.slice.device)

    def views_in(self, flat: Tensor) -> list[Tensor]:
        """The parameters in ``flat``, which is laid out as the unit is."""
        return [self._in(flat, i) for i in range(len(self.parameters))]

    def values_in(self, flat: Tensor) -> list[Tensor]:
        """The parameters in ``flat`` in their own order of memory: copies, where that is another one."""
        return list(map(homes.with_strides, self.views_in(flat), self._strides))

    def keep(self, i: int, values: Tensor) -> None:
        """Parameter i has ``values``, whole: keep what is this rank's."""
        self.make_room()
        self.generation += 1
        for held in self.held:
            if held.parameter is self.parameters[i]:
                held.tensor.copy_(held.part_of(values))

    def _in(self, flat: Tensor, i: int) -> Tensor:
        offset = flat.storage_offset() + self.layout.offsets[i]
        return flat.as_strided(self._shapes[i], self._in_slices[i], offset)

    def _lay(self, memory: Tensor) -> Laid:
        """All weights in ``memory``, of bytes."""
        with torch.inference_mode(False), torch.no_grad():
            flat = memory[: self.layout.num_elements * self._compute.itemsize].view(self._compute)
            views = self.views_in(flat)
            for i, offset in self._behind.items():
                views[i] = self._view_behind(memory, i, offset)
        storage = flat.untyped_storage()
        return Laid(flat, storage, views, _num_users(storage))

    def _view_behind(self, buffer: Tensor, i: int, offset: int) -> Tensor:
        size, shape = self._compute.itemsize, self._shapes[i]
        part = buffer[offset * size : (offset + shape.numel()) * size].view(self._compute)
        return part.as_strided(shape, self._strides[i])

    def _point(self, values: list[Tensor]) -> None:
        """The parameters show ``values``."""
        with without_dispatch():
            for p, value in zip(self.parameters, values, strict=True):
                p.data = value

    def _dress(self, classes: Sequence[type[Tensor]]) -> None:
        for p, kind in zip(self.parameters, classes, strict=True):
            p.__class__ = kind

    def _count_writes(self) -> list[tuple[int, int]]:
        """By parameter, a number that each write changes, and where its values are."""
        with without_dispatch():
            return [(_version.__get__(p), p.data_ptr()) for p in self.parameters]

    def _allocate(self, device: torch.device, compute: torch.dtype) -> None:
        align = align_bytes(device)
        granule = max(align // min(self.dtype.itemsize, compute.itemsize), 16)
        whole = uncuttable(self._shapes, self._strides, granule)
        self.layout = cut([shape.numel() for shape in self._shapes], self.group.size, granule, whole)
        self._in_slices = [self.strides_in_flat(i) for i in range(len(self.parameters))]
        self._device, self._align = device, align
        self._behind: dict[int, int] = {}  # by number of the parameter, where it is shown behind the slices
        end = self.layout.num_elements
        for i, shape in enumerate(self._shapes):
            if self._in_slices[i] != self._strides[i]:
                self._behind[i], end = end, round_up(end + shape.numel(), granule)
        self._shown = sorted((self._behind.get(i, offset), i) for i, offset in enumerate(self.layout.offsets))
        self._nbytes, self._compute = end * compute.itemsize, compute
        shares = self.group.size > 1 and self.group.backend == "shm" and device.type == "cpu"
        shares = shares and compute == self.dtype and not (self.is_vacant or self._behind)
        self.mapped = MappedWeights(self._nbytes, self.group) if shares else None
        self._laid_mapped = None if self.mapped is None else self._lay(self.mapped.memory)
        length = self.layout.slice_length
        self.slice = self._nothing((length,)) if self.is_vacant else self._memory()
        self._none = torch.empty(0, dtype=compute, device=device)  # of gathered weights
        self._without_buffer()
        self._nan = torch.full((), torch.nan, dtype=compute, device=device)
        self._storages[self._nan.untyped_storage()._cdata] = self
        self._hidden = [self._nan.expand(shape) for shape in self._shapes]

    def _memory(self) -> Tensor:
        """(slice_length,), of zeros: the padding travels too."""
        if self.mapped is not None:
            return self.mapped.own_slice().view(self.dtype)
        nbytes = self.layout.slice_length * self.dtype.itemsize
        return self.group.allocate(nbytes, self._align, self._device).elements(self.dtype).zero_()

    def _nothing(self, shape: Sequence[int]) -> Tensor:
        """NaN in the shape of masters, which takes the memory of one."""
        with torch.inference_mode(False):
            return torch.full((), torch.nan, dtype=self.dtype, device=self._device).expand(shape)

    def _without_buffer(self) -> None:
        self._laid = Laid(self._none, self._none.untyped_storage(), [], 0)

    def _hold(self) -> list[ParameterShard]:
        begin = self.group.rank * self.layout.slice_length
        held = []
        for x in self.layout.pieces(self.group.rank):
            shape = self._shapes[x.parameter]
            tensor = self.slice[x.offset - begin : x.offset - begin + x.last - x.first]
            is_whole = x.last - x.first == shape.numel()
            if self.is_vacant:
                tensor = self._nothing(shape if is_whole else tensor.shape)
            elif is_whole:
                tensor = tensor.as_strided(shape, self._in_slices[x.parameter])
            held.append(ParameterShard(self.parameters[x.parameter], x.first, x.last, tensor))
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


Divided = Stage2Parameters | Unit
"""Parameters whose gradients are in slices; in the second case the weights are too."""


def _num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors, and ``storage`` itself, share this memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def give_value(p: Tensor, value: Tensor) -> None:
    """``p`` is ``value`` from now on, and the same object, also when it was on the meta device."""
    if not p.is_meta:
        p.data = value
        return
    new = nn.Parameter(value, p.requires_grad)
    new.__dict__.update(p.__dict__)
    torch.utils.swap_tensors(p, new)
