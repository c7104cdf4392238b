"""Parameters in boxes, one per rank: for tensor and expert parallelism.

    weight (8, K), Cut("tp", dim=0), tp = 2          rank 0: rows 0 to 3    rank 1: rows 4 to 7
    qkv (12, K), Cut("tp", dim=0, parts=3)           of query, key and value: half of the rows of each
    norm (K,), no cut                                all of it on both

The parameter stays the same object and becomes smaller: ``weight.shape`` is (4, K) on each rank. Optimizers
step it, and gradients are reduced over the ranks with the same box, the mesh's data axes. Checkpoints,
hashes and recovery ask the home for box and shape.

Sizes and norms have to be the same for any number of ranks, so a cut dim has units (``Cut.unit``): boxes
consist of whole units, and the norm of a gradient is added unit by unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.memory import bytes_of, tensor_of
from instep.mesh.axes import MODEL_AXES, resolve
from instep.mesh.mesh import Mesh, no_store
from instep.net.process_group import Group
from instep.reduce.norm import GRADIENT_NORM, gather_sums
from instep.reduce.owners import GradientPeers, entry
from instep.state.alignment import align
from instep.state.homes import (
    DividedOptimizer,
    Home,
    ParameterShard,
    box_shape,
    dense_strides,
    home,
    homes,
    settle,
    undivided,
)
from instep.state.shards import Box, grid, in_box

MAX_DIFFERENCE = 0.01  # of gradients that several ranks compute, relative to the sum of absolute values


class Cut(NamedTuple):
    """How one parameter is cut: along ``dim``, over the mesh's axis ``axis``, in boxes of whole units.

    A unit has ``unit`` elements of ``dim``, the last one perhaps fewer. A fused weight (dim 0 only) has
    ``parts``, and each is cut. ``heads`` stay whole; 0: none.
    """

    axis: str
    dim: int
    unit: int
    parts: int = 1
    heads: int = 0

    def num_units(self, shape: Sequence[int]) -> int:
        """Of the whole parameter, which has this ``shape``."""
        return -(-shape[self.dim] // (self.parts * self.unit))

    def require_ranks(self, name: str, shape: Sequence[int], size: int) -> None:
        """Raise ``ValueError`` unless ``size`` ranks can share parameter ``name`` equally."""
        for what, count in (("heads", self.heads), ("chunks", self.num_units(shape))):
            if count % size:
                fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                raise ValueError(
                    f"{name!r} has {count} {what}, which {self.axis}({size}) ranks cannot share equally: "
                    f"expected {self.axis} among {fits}"
                )

    def units(self, shape: Sequence[int], rank: int, size: int) -> range:
        """The units of ``rank`` of ``size`` ranks; ``shape`` is the whole parameter's."""
        count = self.num_units(shape)
        return range(rank * count // size, (rank + 1) * count // size)

    def box(self, shape: Sequence[int], units: range) -> Box:
        """The elements of ``units``."""
        box = [(0, size) for size in shape]
        length = shape[self.dim] // self.parts
        box[self.dim] = (units.start * self.unit, min(units.stop * self.unit, length))
        return ((0, self.parts), *box) if self.parts > 1 else tuple(box)


class BoxHome(Home):
    """The parameters of a module: boxes of those with a cut, the others whole on each rank.

    ``group`` has the ranks that compute a micro-batch together (``mesh.model``). ``join`` moves to another
    mesh, perhaps with other boxes: values are lost until a state is loaded, unless this rank had all of them.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        named = dict(module.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self._cuts: dict[int, Cut] = {}
        self._shapes = {id(p): p.shape for p in self.parameters}
        self._gradients = {axis: BoxGradients(self, axis) for axis in MODEL_AXES}
        align(self.parameters)
        self.bind(mesh)
        settle(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a module whose layers ranks share cannot be copied or pickled: copy it before shard")

    def cut(self, cuts: Mapping[str, Cut]) -> None:
        """Cut parameters by name: each rank keeps its boxes."""
        named = dict(zip(self.names, self.parameters, strict=True))
        for name, cut in cuts.items():
            if id(named[name]) in self._cuts:
                raise ValueError(f"parameter {name!r} is cut already: shard a module once")
            cut.require_ranks(name, named[name].shape, self.mesh.along[cut.axis].size)
        for name, cut in cuts.items():
            self._cuts[id(named[name])] = cut
            entry(named[name]).peers = weakref.ref(self._gradients[cut.axis])
        self._take_boxes([named[name] for name in cuts])
        self._list_held()

    @property
    def resident(self) -> bool:  # type: ignore[override]
        """As ``Home`` says."""
        return self.group.size == 1

    def join(self, mesh: Mesh) -> None:
        """Move to ``mesh``, with boxes as its axes cut them. No communication."""
        had_all = self.resident and self.has_values
        self.bind(mesh)
        if had_all:
            self._take_boxes(self.parameters)
            return
        self.has_values = self.resident
        for p in self.parameters:
            p.data = p.new_empty(self.local_shape(p))

    def bind(self, mesh: Mesh) -> None:
        """Move to ``mesh``, but leave memory as it is."""
        for name, p in zip(self.names, self.parameters, strict=True):
            if (cut := self.cut_of(p)) is not None:
                cut.require_ranks(name, self.shape_of(p), mesh.along[cut.axis].size)
        self.mesh = self.replicas = mesh
        self.group, self.everyone = mesh.model.group, mesh.world.group
        self._list_held()

    def _list_held(self) -> None:
        """A run asks several times per step for ``held``: of each parameter the box, or all of it."""
        self.held = [
            ParameterShard(p, 0, self.local_shape(p).numel(), p, self.shape_of(p), self.box_of(p))
            for p in self.parameters
        ]

    def _take_boxes(self, whole: Sequence[Tensor]) -> None:
        for p in whole:
            if self.box_of(p) is not None:
                p.data = self.part_of(p, p.detach()).clone(memory_format=torch.contiguous_format)

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's box of ``whole``, a tensor like the whole ``parameter``."""
        if (box := self.box_of(parameter)) is None:
            return whole
        return in_box(whole.view(grid(tuple(whole.shape), box)), box).reshape(box_shape(whole.shape, box))

    @contextmanager
    def as_one_rank(self, module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
        """Inside, ``module`` computes as on one rank, with whole parameters: yields them, by the id of ours.

        Entering is collective over ``group``.
        """
        whole = {id(p): nn.Parameter(self.whole(p, p.detach()), p.requires_grad) for p in self.parameters}
        tables = [part._parameters for part in module.modules()]
        places = [(table, key, p) for table in tables for key, p in table.items() if id(p) in whole]
        mesh, self.mesh = self.mesh, Mesh(resolve(1), 0, None, no_store)
        for table, key, p in places:
            table[key] = whole[id(p)]
        try:
            yield whole
        finally:
            self.mesh = mesh
            for table, key, p in places:
                table[key] = p

    def units(self, parameter: Tensor) -> range:
        """This rank's units of a parameter that is cut."""
        cut = self._cuts[id(parameter)]
        axis = self.mesh.along[cut.axis]
        return cut.units(self.shape_of(parameter), axis.rank, axis.size)

    def cut_of(self, parameter: Tensor) -> Cut | None:
        return self._cuts.get(id(parameter))

    def gradients_of(self, parameter: Tensor) -> BoxGradients | None:
        """The peers of ``parameter``; None if it is not cut."""
        cut = self.cut_of(parameter)
        return None if cut is None else self._gradients[cut.axis]

    def shape_of(self, parameter: Tensor) -> torch.Size:
        return self._shapes[id(parameter)]

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return dense_strides(torch.empty(self.shape_of(parameter), device="meta"))

    def box_of(self, parameter: Tensor) -> Box | None:
        cut = self.cut_of(parameter)
        if cut is None or self.mesh.along[cut.axis].size == 1:
            return None
        return cut.box(self.shape_of(parameter), self.units(parameter))

    def local_shape(self, parameter: Tensor) -> torch.Size:
        """Of the memory that ``parameter`` has on this rank."""
        box, shape = self.box_of(parameter), self.shape_of(parameter)
        return shape if box is None else box_shape(shape, box)

    def slices_with(self, parameter: Tensor) -> list[int]:
        return list(range(self.group.size))

    def same_slice(self, parameter: Tensor) -> list[int]:
        """As ``Home`` says: those at this rank's place on the axis of the cut."""
        if (cut := self.cut_of(parameter)) is None:
            return list(range(self.group.size))
        places = [self.mesh.axes.coordinates(rank)[cut.axis] for rank in self.group.ranks]
        mine = self.mesh.along[cut.axis].rank
        return [i for i, place in enumerate(places) if place == mine]

    def num_shares(self, parameter: Tensor) -> int:
        """As ``Home`` says."""
        cut = self.cut_of(parameter)
        return 1 if cut is None else self.mesh.along[cut.axis].size

    def require_same_gradients(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the gradients of parameters that ranks along tp or ep have whole, by sums. Collective.

        Up to rounding: kernels of GPUs may add in any order.

        Raises:
            ValueError: ranks have other gradients; on all ranks.
        """
        for name in MODEL_AXES:
            axis = self.mesh.along[name]
            cuts = [(key, p, self.cut_of(p)) for key, p in named]
            shared = [(key, p) for key, p, cut in cuts if cut is None or cut.axis != name]
            if axis.size == 1 or not shared:
                continue
            sums = torch.stack([_sums(p) for _, p in shared])
            rows = axis.group.all_gather_bytes(bytes_of(sums), "the comparison of gradients")
            every = torch.stack([tensor_of(row, torch.float64).view(-1, 2) for row in rows])
            differs = (every.amax(0) - every.amin(0)).amax(1) > MAX_DIFFERENCE * every[..., 1].amax(0)
            if odd := [key for (key, _), is_odd in zip(shared, differs.tolist(), strict=True) if is_odd]:
                raise ValueError(
                    f"the gradient of {', '.join(map(repr, odd[-3:]))} differs between ranks along {name}, "
                    "which have all of the parameter: they compute it from their own features, tokens or "
                    "batch. Cut the layer in the plan, freeze the parameter, or give the ranks the same batch"
                )

    def loaded(self) -> None:
        self.has_values = True

    def fetch(self, parameter: Tensor) -> Tensor | None:
        """As ``Home`` says."""
        return None if self.resident else self.whole(parameter, parameter.detach().clone())

    def whole(self, parameter: Tensor, own: Tensor) -> Tensor:
        """The whole tensor of which this rank has ``own``. Collective over the axis that cuts."""
        if (box := self.box_of(parameter)) is None:
            return own
        cut, shape = self._cuts[id(parameter)], self.shape_of(parameter)
        axis = self.mesh.along[cut.axis]
        boxes = [cut.box(shape, cut.units(shape, rank, axis.size)) for rank in range(axis.size)]
        lengths = [box_shape(shape, each).numel() for each in boxes]
        out, padded = own.new_empty(axis.size, max(lengths)), own.new_zeros(max(lengths))
        padded[: own.numel()] = own.reshape(-1)
        axis.group.all_gather(out.view(-1), padded, "the gathering of whole parameters")
        whole = own.new_empty(grid(tuple(shape), box))
        for row, length, each in zip(out, lengths, boxes, strict=True):
            place = in_box(whole, each)
            place.copy_(row[:length].view(place.shape))
        return whole.view(shape)

    def divided(self, optimizer: Optimizer) -> DividedOptimizer | None:
        """As ``Home`` says: it steps this rank's boxes."""
        if self.resident:
            return None
        whole, held = undivided(optimizer), {id(x.parameter): x for x in self.held}
        return DividedOptimizer(
            group=self.group,
            locals=(optimizer,),
            held={i: held[id(x.parameter)] for i, x in whole.held.items()},
            homes=[self],
            num_replicas=self.everyone.size // self.group.size,
            load=whole.load,
            leave=optimizer.state.clear,
        )


def _sums(parameter: Tensor) -> Tensor:
    """The sum of the elements of a gradient, and that of their absolute values: (2,) float64."""
    x = torch.zeros(1) if parameter.grad is None else parameter.grad
    x = torch.view_as_real(x) if x.is_complex() else x
    return torch.stack([x.sum(dtype=torch.float64), x.abs().sum(dtype=torch.float64)]).cpu()


class BoxGradients(GradientPeers):
    """Gradients of the parameters of ``home`` that are cut over ``axis``: a rank has boxes of them."""

    cut = True

    def __init__(self, home: BoxHome, axis: str) -> None:
        self._home, self._axis = weakref.ref(home), axis

    def pieces(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """``gradients`` by units, flat, so that canonical blocks do not depend on the boxes."""
        home = self._living_home
        of = {id(p.grad): p for p in home.parameters if p.grad is not None}
        found: list[Tensor] = []
        for gradient in gradients:
            cut = home.cut_of(of[id(gradient)])
            assert cut is not None
            x = gradient.detach()
            if cut.parts > 1:
                x = x.view(cut.parts, -1, *x.shape[1:])
            found += [unit.reshape(-1) for unit in x.split(cut.unit, cut.dim + (cut.parts > 1))]
        return found

    def square_sums(self, own: Sequence[float]) -> list[float]:
        return gather_sums(own, self._group)

    def all_found_inf(self, found_inf: Tensor) -> None:
        rows = self._group.all_gather_bytes(bytes_of(found_inf.cpu()), GRADIENT_NORM)
        found_inf.fill_(max(tensor_of(row, found_inf.dtype).item() for row in rows))

    @property
    def _living_home(self) -> BoxHome:
        home = self._home()
        assert home is not None
        return home

    @property
    def _group(self) -> Group:
        return self._living_home.mesh.along[self._axis].group


def boxes_of(parameter: Tensor) -> BoxHome | None:
    """The home of ``parameter``, alone or in a pipeline, if it has boxes."""
    there = home(parameter)
    boxes = there if isinstance(there, BoxHome) else None if there is None else there.boxes
    return boxes if isinstance(boxes, BoxHome) else None


def is_cut(parameter: Tensor) -> bool:
    """Whether a rank along some axis has a part of ``parameter``, alone or in a pipeline."""
    boxes = boxes_of(parameter)
    return boxes is not None and boxes.cut_of(parameter) is not None


def refuse_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook: a state dict of parts would be saved by one rank and be taken for the model."""
    for key, p in module._parameters.items():
        boxes = None if p is None else boxes_of(p)
        if p is not None and boxes is not None and boxes.box_of(p) and state.get(prefix + key, p) is not p:
            raise RuntimeError(
                f"state_dict(): parameter {prefix + key!r} is this rank's part: all ranks together have "
                "instep.full_state_dict(model), and instep.save writes each rank's part"
            )


def divide(module: nn.Module, mesh: Mesh, cuts: Mapping[str, Cut]) -> BoxHome:
    """Cut parameters of ``module`` by name: each rank of ``mesh.model`` keeps its boxes.

    Raises:
        ValueError: a parameter has no values yet, or is divided in another way.
    """
    found = homes(module.parameters())
    for name, p in module.named_parameters():
        if p.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: give the module values first, for example with "
                "instep.initialize(module, seed), then divide it"
            )
    if len(found) == 1 and isinstance(found[0], BoxHome) and found[0].mesh.along is mesh.along:
        there = found[0]
    elif found:
        raise ValueError(
            "the parameters of the module are divided among ranks already: cut layers first, then wrap the "
            "module, once"
        )
    else:
        there = BoxHome(module, mesh)
        module.__dict__["_instep_boxes"] = there  # which lives as long as the module
    there.cut(cuts)
    return there
