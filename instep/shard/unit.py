"""One unit of a sharded module: this rank's shards of its parameters, and whole ones while they are needed.

    module.weight    outside of forward and backward: the user's parameter, this rank's shard
    shards           | r |                   in the dtype of the optimizer
    flat             | 0 | 1 | ... | W-1 |   gathered, in the dtype of computation
    module.weight    inside: a parameter of its own, a view of ``flat`` in the full shape

Autograd saves views of weights for backward. So ``flat`` is the same tensor in every step: ``free`` resizes
its storage to nothing, and ``allocate`` brings the storage back for the next gather. What was saved in
forward shows the weights again in backward. It must not be read in between: some of torch's functions raise
an error about storage of size 0, and most kernels on CPUs (clone, add, sum) end the process with SIGSEGV.

In stage 2, and in a world of one, weights of the same dtype are never freed: the shards are a part of
``flat``.

Source: torch's ``_fully_shard/_fsdp_param.py`` (FSDP2), which resizes storages in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from instep.memory import align_bytes
from instep.net.lane import Work
from instep.net.process_group import Group
from instep.shard.layout import cut
from instep.shard.partition import UnitMembers
from instep.state.homes import DividedOptimizer, Home, ParameterShard, divided_over, part_shape


class Unit(Home):
    """The parameters of ``members``, which are of one dtype and device, sharded over ``group``.

    At construction each rank keeps its shards of the values, which are the same on all ranks, in the
    parameters' own dtype, or in float32 at least where they compute in ``compute_dtype``. Then, for every
    use: ``allocate``, a gather that fills ``flat``, ``show``, ``hide``, ``free``. ``leave`` drops all values;
    ``lay_out`` shards over another group, without values until they are loaded.

    Args:
        root: the module that is sharded.
        weights: the ranks of ``group`` again, which gather over this one.
        keeps: the gathered weights stay until the shards change (stage 2).
        device: where parameters from the meta device shall live.
        vacant: no memory until ``make_room``.
    """

    resident = False
    flat: Tensor  # (W * slice_length,)
    slice: Tensor  # (slice_length,), of ``parameters``

    def __init__(
        self,
        number: int,
        members: UnitMembers,
        root: nn.Module,
        group: Group,
        weights: Group,
        *,
        keeps: bool = False,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        vacant: bool = False,
    ) -> None:
        first = members.parameters[0]
        self.parameters: list[nn.Parameter] = list(members.parameters)
        self.number, self.name, self.module = number, members.name, members.module
        self.gathering = f"the gather of unit {self.name!r}"
        self.names = list(members.names)
        self.shapes = [p.shape for p in self.parameters]  # whole
        self.trainable = first.requires_grad
        self.dtype = self.compute_dtype = first.dtype
        if compute_dtype is not None:
            self.dtype = torch.promote_types(first.dtype, torch.float32)
            self.compute_dtype = first.dtype if first.is_complex() else compute_dtype
        self.own_dtype = first.dtype  # of the parameters as they came
        self.device = (device or torch.device("cpu")) if first.is_meta else first.device
        self.keeps = keeps
        self.is_vacant = vacant and first.is_meta
        self.has_values = not first.is_meta
        self.when_loaded: Callable[[], None] = lambda: None
        self.is_made_whole = False  # the user's parameters are whole
        self.is_shown = False  # the module has the whole ones
        self._gathered_versions: list[int] = []  # of the shards, when ``flat`` had their values
        self._seen_versions: list[int] = []
        self.work: Work | None = None  # the gather that fills ``flat``
        self._places: dict[int, list[tuple[nn.Module, str]]] = {id(p): [] for p in self.parameters}
        for owner in root.modules():
            for key, p in owner._parameters.items():
                if id(p) in self._places:
                    self._places[id(p)].append((owner, key))
        values = [p.detach() for p in self.parameters] if self.has_values else None
        with torch.inference_mode(False), torch.no_grad():
            empty = partial(torch.empty, 0, dtype=self.compute_dtype, device=self.device)
            self.whole = [nn.Parameter(empty(), self.trainable) for _ in self.parameters]
            for p, whole in zip(self.parameters, self.whole, strict=True):
                whole.__dict__.update(p.__dict__)
            self._lay_out(group, weights)
            if values is not None:
                self._write(values)

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory for the whole weights."""
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def is_current(self) -> bool:
        """Whether ``flat`` has the values of the shards, as they are now on all ranks."""
        return self._gathered_versions == self._shard_versions()

    @property
    def gathered(self) -> list[Tensor]:
        return [] if self._shares_memory or not self.is_allocated else [self.flat]

    def empty(self, i: int) -> Tensor:
        return torch.empty(self.shapes[i], dtype=self.own_dtype, device=self.device)

    def shape_of(self, parameter: Tensor) -> torch.Size:
        return self.shapes[self.number_of(parameter)]

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return torch.empty(self.shape_of(parameter), device="meta").stride()

    def autograd_leaf(self, parameter: Tensor) -> Tensor:
        return self.whole[self.number_of(parameter)]

    def slices_with(self, parameter: Tensor) -> list[int]:
        return self.layout.slices_with(self.number_of(parameter))

    def divided(self, optimizer: Optimizer) -> DividedOptimizer:
        return divided_over(optimizer, self.group, self.everyone.size // self.group.size)

    def require_untouched(self) -> None:
        """Raise ``ValueError`` if other code has replaced the memory of a shard, or has hooks on it."""
        if self.is_made_whole:
            raise ValueError(
                f"forward inside of instep.gathered(), where parameter {self.names[0]!r} is whole to be read "
                "and written alone: call the module outside of the block, which gathers what it needs"
            )
        for name, p, shard in zip(self.names, self.parameters, self._shards, strict=True):
            if p.data_ptr() != shard.data_ptr() or p.dtype != self.dtype:
                raise ValueError(
                    f"parameter {name!r} has other memory than when it was sharded (module.to(), .data = "
                    "..., vector_to_parameters): convert first, then call fully_shard; change values in "
                    "place, with p.copy_(values) under no_grad()"
                )
            if len(p._backward_hooks or ()) > self.trainable or p._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter {name!r} has a hook, and is a shard, to which autograd never comes: edit "
                    "gradients after backward, or use a hook of the module or of its output"
                )

    def allocate(self) -> None:
        """Memory for the whole weights."""
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.layout.num_elements * self.compute_dtype.itemsize)

    def cast(self, flat: Tensor) -> Tensor | None:
        """What this rank sends in the gather of ``flat``, in its dtype; None if it is in place."""
        if self._shares_memory and flat is self.flat:
            return None
        if self.dtype == self.compute_dtype:
            return self.slice.detach()
        self.own_part(flat).copy_(self.slice)
        return None

    def filled(self) -> None:
        """``flat`` has the values of all ranks."""
        self.work = None
        self._gathered_versions = self._shard_versions()
        if self._gathered_versions != self._seen_versions:  # a graph from before must not use the new values
            increment_version(self.whole)
            self._seen_versions = self._gathered_versions

    def show(self) -> None:
        """The module has the whole parameters."""
        if not self.is_shown:
            self.is_shown = True
            for p, whole in zip(self.parameters, self.whole, strict=True):
                if whole.requires_grad != p.requires_grad:
                    whole.requires_grad_(p.requires_grad)
            self._put(self.whole)
            self._whole_versions = [x._version for x in self.whole]

    def hide(self) -> str | None:
        """The module has the shards; the name of a whole parameter that was written to, or None."""
        if not self.is_shown:
            return None
        self.is_shown = False
        self._put(self.parameters)
        for name, x, before in zip(self.names, self.whole, self._whole_versions, strict=True):
            if x._version != before:
                return name
        return None

    def free(self) -> None:
        """Give the memory of the whole weights back, unless it is kept."""
        if self.work is not None:
            self.work.arrive()
            came = self.work.error is None
            self.work, self._gathered_versions = None, []
            if self.keeps and came:  # on every rank, whichever of them use it
                self.filled()
        if not (self.keeps or self._shares_memory):
            self.flat.untyped_storage().resize_(0)
            self._gathered_versions = []

    def views_in(self, flat: Tensor) -> list[Tensor]:
        """All parameters in ``flat``, which is laid out as the unit is."""
        offsets = zip(self.layout.offsets, self.shapes, strict=True)
        return [flat[offset : offset + shape.numel()].view(shape) for offset, shape in offsets]

    def shards_in(self, own: Tensor) -> list[Tensor]:
        """This rank's shard of each parameter in ``own``, which is laid out as ``slice``."""
        begin = self.group.rank * self.layout.slice_length
        found = [own[:0].view(part_shape(shape, 0)) for shape in self.shapes]
        for x, held in zip(self.layout.pieces(self.group.rank), self.held, strict=True):
            found[x.parameter] = own[x.offset - begin :][: x.last - x.first].view(held.held_shape)
        return found

    @contextmanager
    def made_whole(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the user's parameters are ``values``, whole; what was written to them is kept.

        All of it, as torch does not count what is written through ``.data``.
        """
        self.is_made_whole = True
        for p, value in zip(self.parameters, values, strict=True):
            p.data = value
        before = [p._version for p in self.parameters]
        try:
            yield
        finally:
            written = [p for p, v in zip(self.parameters, before, strict=True) if p._version != v]
            values = [p.detach() for p in self.parameters]
            self.is_made_whole = False
            for p, shard in zip(self.parameters, self._shards, strict=True):
                p.data = shard
            if not self.is_vacant:
                self._write(values)
                increment_version(written)  # once on all ranks, also where one has none of it
                self.free()
                self._gathered_versions = []  # of values from before, if it is kept

    def _write(self, values: Sequence[Tensor]) -> None:
        """The shards are this rank's parts of ``values``, which are whole."""
        whole = dict(zip(map(id, self.parameters), values, strict=True))
        for held in self.held:
            held.tensor.data.copy_(held.part_of(whole[id(held.parameter)]))

    def make_room(self) -> None:
        if self.is_vacant:
            self.is_vacant = False
            with torch.inference_mode(False), torch.no_grad():
                self._make_shards()

    def loaded(self) -> None:
        self.has_values = True
        increment_version(self.parameters)
        self.when_loaded()

    def leave(self) -> None:
        """Drop all values, and their memory."""
        self.hide()
        self.free()
        self.has_values, self.is_vacant = False, True
        self._make_shards()
        self.flat, self._gathered_versions = self.flat.new_empty(0), []
        for whole in self.whole:
            whole.data = self.flat

    def lay_out(self, group: Group, weights: Group) -> None:
        """Shard over ``group`` from now on, without values until they are loaded."""
        self.has_values = self.is_vacant = False
        with torch.inference_mode(False), torch.no_grad():
            self._lay_out(group, weights)

    def own_part(self, flat: Tensor) -> Tensor:
        """The part of ``flat`` that this rank's shards are gathered from."""
        return flat.split(self.layout.slice_length)[self.group.rank]

    def number_of(self, parameter: Tensor) -> int:
        return next(i for i, p in enumerate(self.parameters) if p is parameter)

    def _shard_versions(self) -> list[int]:
        return [p._version for p in self.parameters]

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for x, places in zip(parameters, self._places.values(), strict=True):
            for owner, key in places:
                if type(owner).__setattr__ is nn.Module.__setattr__:
                    owner._parameters[key] = x
                else:  # an RNN has a list of its weights beside
                    setattr(owner, key, x)

    def _lay_out(self, group: Group, weights: Group) -> None:
        self.group, self.everyone, self._weights = group, group, weights
        granule = max(align_bytes(self.device) // min(self.dtype.itemsize, self.compute_dtype.itemsize), 16)
        self.layout = cut([shape.numel() for shape in self.shapes], group.size, granule)
        same = self.dtype == self.compute_dtype
        self._shares_memory = same and (self.keeps or group.size == 1)
        stays = self._shares_memory and self.keeps
        make = self._shared if stays else partial(torch.zeros, dtype=self.compute_dtype, device=self.device)
        self.flat = make(self.layout.num_elements)
        for whole, view in zip(self.whole, self.views_in(self.flat), strict=True):
            whole.data = view
        self.is_shown = False
        self._gathered_versions, self._seen_versions = [], []
        if not stays:
            self.flat.untyped_storage().resize_(0)
        self._make_shards()

    def _shared(self, num_elements: int) -> Tensor:
        """Zeros for shards, in memory that the ranks which gather them read in place, where they can."""
        nbytes = num_elements * self.dtype.itemsize
        memory = self._weights.allocate(nbytes, align_bytes(self.device), self.device).tensor
        return memory.view(self.dtype).zero_()

    def _make_shards(self) -> None:
        """The user's parameters become this rank's shards; of nothing, while the unit is vacant."""
        self.held = [
            ParameterShard(p, x.first, x.last, p, self.shapes[x.parameter])
            for x in self.layout.pieces(self.group.rank)
            for p in [self.parameters[x.parameter]]
        ]
        if self.is_vacant:
            self.slice = torch.zeros(0, dtype=self.dtype, device=self.device)
            self._shards = [self.slice.view(part_shape(shape, 0)) for shape in self.shapes]
        else:
            if self._shares_memory:
                self.allocate()
                self.slice = self.own_part(self.flat.zero_())
            else:
                self.slice = self._shared(self.layout.slice_length)  # the padding travels too
            self._shards = self.shards_in(self.slice)
        for p, shard in zip(self.parameters, self._shards, strict=True):
            become(p, shard)


def become(p: Tensor, value: Tensor) -> None:
    """``p`` has the memory of ``value`` from now on, and stays the same object, also from the meta device."""
    if not p.is_meta:
        p.data = value
        return
    new = nn.Parameter(value, p.requires_grad)
    new.__dict__.update(p.__dict__)
    torch.utils.swap_tensors(p, new)
