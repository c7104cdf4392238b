"""Homes: how the memory of parameters is divided among ranks, and how wrappers and optimizers describe it.

Code that divides parameters settles them in a home, and code that needs to know where a parameter's elements
are asks ``home``. References are weak on both sides: an entry ends with its home. A wrapper, or an optimizer
of shards, describes itself by a method ``__instep_state__`` (``offered``), and a plain optimizer is described
by the home of its parameters; saving, hashing and counting never ask for classes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh
from instep.net.process_group import Group, alone
from instep.reduce.node_format import IN_FLOAT32
from instep.reduce.owners import entry, nobody, owner_of
from instep.state.shards import Box, elements, held_shape


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """One rank's part of a parameter: elements ``first`` to ``last`` (exclusive) in logical order, of its
    ``box``, or of all of it.

    ``tensor`` is stepped by an optimizer: in the parameter's shape where it is all of it, else in a column of
    as many dims, since optimizers are made with matrices in one group and vectors in another.
    """

    parameter: Tensor
    first: int
    last: int
    tensor: Tensor
    shape: torch.Size  # of all of the parameter
    box: Box | None = None

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.shape.numel()

    @property
    def box_shape(self) -> torch.Size:
        """Of the box, with as many dims as the parameter has."""
        return self.shape if self.box is None else box_shape(self.shape, self.box)

    @property
    def fills_box(self) -> bool:
        return self.last - self.first == self.box_shape.numel()

    @property
    def held_shape(self) -> torch.Size:
        """Of ``tensor``, also while it has no memory: with as many dims as the parameter has."""
        return self.box_shape if self.fills_box else part_shape(self.shape, self.last - self.first)

    def in_state(self, x: Tensor) -> Tensor:
        """``x``, shaped as ``tensor``, as a shard of the state has it: flat unless it fills the box."""
        if self.is_whole:
            return x
        return x.view(held_shape(tuple(self.shape), self.first, self.last, self.box))

    def part_of(self, x: Tensor) -> Tensor:
        """The same elements of ``x``, which has the shape of the box, laid out as ``tensor``; a view where
        possible.

        Fused optimizers read weight, gradient and moments in the order of memory, and compare no strides.
        """
        x = x.detach().resolve_conj().resolve_neg()
        if self.fills_box:
            return with_strides(x, self.tensor.stride())
        return elements(x, self.first, self.last).view(self.held_shape)


def box_shape(shape: torch.Size, box: Box) -> torch.Size:
    """Of the memory of ``box``, of a parameter of this ``shape``: with as many dims."""
    sizes = [stop - start for start, stop in box]
    fused = len(sizes) - len(shape)
    return torch.Size([math.prod(sizes[: fused + 1]), *sizes[fused + 1 :]])


def part_shape(shape: torch.Size, num_elements: int) -> torch.Size:
    """Of a shard that is a part of a parameter of this ``shape``."""
    return torch.Size([num_elements, *[1] * (len(shape) - 1)])


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x`` with these strides; ``x`` itself, if it has them."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of ``x`` without gaps between its elements, in the same order of memory."""
    return torch.empty_like(x, device="meta").stride()


def in_order(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether with ``strides`` the elements stand in memory in logical order, without gaps."""
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


class Home:
    """Memory that parameters live in, divided among the ranks of ``group``.

    ``everyone`` are all ranks that train these parameters, of which ``group`` may be one shard group of
    several.
    """

    group: Group
    everyone: Group
    names: list[str]
    parameters: Sequence[Tensor]
    held: list[ParameterShard]
    resident: bool = True  # every rank has all values between steps; else a rank has its ``held`` alone
    has_values: bool = True  # False: from the meta device, or waiting for another group
    outer: Home | None = None  # the home whose ``held`` this one divides further
    replicas: Mesh | None = None  # an optimizer may divide what is replicated along its data axes
    boxes: Home | None = None  # the home whose boxes ``parameters`` are, with ranks of its own

    @property
    def gathered(self) -> list[Tensor]:
        """Memory that holds other ranks' values for as long as they are needed."""
        return []

    def shape_of(self, parameter: Tensor) -> torch.Size:
        """The shape of all of ``parameter``, of which its memory here may have no elements."""
        return parameter.shape

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        """The strides of all of ``parameter``, which its memory does not show at all times."""
        return parameter.stride()

    def autograd_leaf(self, parameter: Tensor) -> Tensor:
        """What autograd accumulates the gradient of ``parameter`` into, in this rank's backward."""
        return parameter

    def box_of(self, parameter: Tensor) -> Box | None:
        """The box that this rank computes with; None: all of ``parameter``."""
        return None

    def slices_with(self, parameter: Tensor) -> list[int]:
        """The ranks of ``group`` that hold some of ``parameter``."""
        raise NotImplementedError

    def same_slice(self, parameter: Tensor) -> list[int]:
        """The ranks of ``group`` that hold the same of ``parameter`` as this one."""
        return [self.group.rank]

    def num_shares(self, parameter: Tensor) -> int:
        """Among how many ranks of ``group`` ``parameter`` is divided; 0: this rank holds none of it."""
        return self.group.size

    def make_room(self) -> None:
        """Allocate memory for ``held``, which are about to get values."""

    def loaded(self) -> None:
        """``held`` have new values, on all ranks."""

    def fetch(self, parameter: Tensor) -> Tensor | None:
        """All values of ``parameter``, in memory of their own, collective over ``group``; None: its module's
        state dict has them."""
        return None

    def divided(self, optimizer: Optimizer) -> DividedOptimizer | None:
        """The description of a plain ``optimizer`` of these parameters; None if each rank has all of it."""
        return None


def settle(new: Home) -> None:
    """The parameters of ``new`` live there, until it is collected or they are settled elsewhere."""
    for parameter in new.parameters:
        entry(parameter).home = weakref.ref(new)


def leave(old: Home) -> None:
    """The parameters of ``old`` live there no longer."""
    for parameter in old.parameters:
        if home(parameter) is old:
            entry(parameter).home = nobody


def home(parameter: Tensor) -> Home | None:
    """The home that ``parameter`` lives in, or None."""
    owner = owner_of(parameter)
    return None if owner is None else owner.home()


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape of all of ``parameter``, wherever its elements are."""
    there = home(parameter)
    return parameter.shape if there is None else there.shape_of(parameter)


def autograd_leaf(parameter: Tensor) -> Tensor:
    """What autograd accumulates the gradient of ``parameter`` into: the whole one of a shard."""
    there = home(parameter)
    return parameter if there is None else there.autograd_leaf(parameter)


def homes(tensors: Iterable[Tensor]) -> list[Home]:
    """The homes that some of ``tensors`` live in, each once."""
    found = [there for x in tensors if (there := home(x)) is not None]
    return list({id(there): there for there in found}.values())


def outermost(there: Home) -> Home:
    """The home that is the first to divide the parameters of ``there``."""
    return there if there.outer is None else outermost(there.outer)


def holders(there: Home, parameter: Tensor, everyone: Group, *, same: bool) -> tuple[int, ...]:
    """The ranks of ``everyone`` that have some of ``parameter``, or the ``same`` of it as this rank, in the
    group of ``there`` and in all others like it, by their place among everyone.

    Raises:
        ValueError: the ranks of a group are not at even distances.
    """
    slices = there.same_slice(parameter) if same else there.slices_with(parameter)
    size, ranks = there.group.size, list(everyone.ranks)
    places = [ranks.index(rank) for rank in there.group.ranks if rank in ranks]
    stride = places[1] - places[0] if len(places) > 1 else 1
    if [place // stride % size for place in places] != list(range(size)):
        raise ValueError(
            f"expected a shard group at even distances among ranks {ranks}, which train together, "
            f"got {list(there.group.ranks)}: shard over an axis of one mesh"
        )
    found = tuple(place for place in range(len(ranks)) if place // stride % size in slices)
    for further in (there.outer, there.boxes):
        if further is not None:
            has = holders(further, parameter, everyone, same=same)
            found = tuple(rank for rank in found if rank in has)
    return found


@dataclass(frozen=True)
class Wrapped:
    """The description that a wrapper gives of its module, by a method ``__instep_state__``.

    ``gradients`` is the memory of reduced gradients between steps, ``scratch`` the memory that reducing them
    takes beside it. ``counter`` counts declared steps; None where no random numbers are keyed. ``settled``
    is called on all ranks when their replicas have been compared: earlier writes are no edit of one
    rank alone. ``micro_batch()`` is the micro-batch of a declared step whose backward runs in this thread,
    or None.
    ``reductions`` sum the gradients over the ranks (``step/reduction.py``), by the name of their part of the
    module: "" for all of it. ``nodes`` says in words what the sums of gradients are rounded to.

    ``leave`` gives up the group and waits for no rank, whatever has happened. A step under way is given up:
    gradients are None, partial sums are gone, no declared step is open. ``join`` takes part in another mesh,
    with the arguments of the wrapping; collective over it. Module and parameters stay the same objects,
    trained and frozen as when wrapped, and ``no_sync`` stays on or off. Replicated values stay each rank's
    own; those of divided parameters are of no step from ``leave`` until a state is put there
    (``TrainingState``), and take no memory until ``join``; where no rank has a state, ``fill`` gives values
    to parameters from the meta device, collective over the mesh. A ``join`` that raises is followed by
    ``leave``, and may be tried again. Optimizers leave before the wrappers, whose memory they step, and join
    after them. A description from before a ``join`` is out of date after it.
    """

    module: nn.Module
    group: Group
    gradients: Callable[[], Iterable[Tensor]]
    scratch: Callable[[], Iterable[Tensor]]
    counter: Any  # its ``next_step`` is the number of the next declared step
    leave: Callable[[], None]
    join: Callable[[Mesh], None]
    settled: Callable[[], None] = lambda: None
    fill: Callable[[], None] = lambda: None
    micro_batch: Callable[[], int | None] = lambda: None
    reductions: Mapping[str, Any] = field(default_factory=dict)
    nodes: str = str(IN_FLOAT32)


@dataclass(frozen=True)
class DividedOptimizer:
    """The description of an optimizer whose state is divided among the ranks of ``group``, by
    ``__instep_state__``.

    ``locals`` step this rank's ``held``, by the number of the parameter: one optimizer, or several described
    as one, each with groups of its own, in their order. ``homes`` are the memories of the parameters.
    ``num_replicas`` groups like this one make the same steps. ``load`` takes states by the number of the
    parameter, and groups in the form of ``state_dict``; collective.

    ``leave`` and ``join`` are as those of ``Wrapped``. The optimizer, its groups and their options stay;
    moments are gone with ``leave``, and weights are of no step until a state is put there.
    """

    group: Group
    locals: tuple[Optimizer, ...]
    held: Mapping[int, ParameterShard]
    homes: Sequence[Home]
    num_replicas: int
    load: Callable[[Mapping[int, dict[str, Any]], list[dict[str, Any]]], None] = field(repr=False)
    leave: Callable[[], None] = field(default=lambda: None, repr=False)
    join: Callable[[Mesh], None] = field(default=lambda mesh: None, repr=False)

    def state_of(self, x: ParameterShard) -> dict[str, Any]:
        """The optimizer's state for ``x``: live, and empty before the first step."""
        found = (local.state[x.tensor] for local in self.locals if x.tensor in local.state)
        return next(found, {})


def undivided(optimizer: Optimizer) -> DividedOptimizer:
    """The description of a plain ``optimizer``, which steps whole parameters, with or without values here."""
    whole = [(p, shape_of(p)) for p in _parameters(optimizer)]
    held = {i: ParameterShard(p, 0, shape.numel(), p, shape) for i, (p, shape) in enumerate(whole)}
    return _plain(optimizer, held, alone(), (), 1)


def divided_over(optimizer: Optimizer, group: Group, num_replicas: int) -> DividedOptimizer:
    """The description of a plain ``optimizer`` whose parameters are shards of one module or more."""
    spaces = homes(_parameters(optimizer))
    shards = {id(x.parameter): x for there in spaces for x in there.held}
    held = {i: shards[id(p)] for i, p in enumerate(_parameters(optimizer)) if id(p) in shards}
    return _plain(optimizer, held, group, spaces, num_replicas)


def _plain(
    optimizer: Optimizer,
    held: Mapping[int, ParameterShard],
    group: Group,
    spaces: Sequence[Home],
    num_replicas: int,
) -> DividedOptimizer:
    parameters = _parameters(optimizer)

    def load(states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        for number, state in states.items():
            for key, live in optimizer.state.get(parameters[number], {}).items():
                if isinstance(live, Tensor) and isinstance(value := state.get(key), Tensor):
                    same = (live.shape, live.dtype) == (value.shape, value.dtype)
                    state[key] = live.copy_(value) if same else value
        optimizer.load_state_dict({"state": {i: x for i, x in states.items() if x}, "param_groups": groups})

    def leave() -> None:
        if spaces:
            optimizer.state.clear()

    return DividedOptimizer(group, (optimizer,), held, spaces, num_replicas, load, leave)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def joined(optimizers: Sequence[Optimizer]) -> DividedOptimizer:
    """The description of several as one: all their groups, in order, and their parameters numbered through.

    Each may be divided or not. Together they are divided as the divided ones are.
    """
    parts: list[DividedOptimizer] = [offered(x) or undivided(x) for x in optimizers]
    counts = [sum(len(group["params"]) for group in x.param_groups) for x in optimizers]
    begins = [0, *accumulate(counts)]  # the number of each one's first parameter

    def load(states: Mapping[int, dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
        left = iter(groups)
        for part, optimizer, (begin, end) in zip(parts, optimizers, pairwise(begins), strict=True):
            own = {number - begin: state for number, state in states.items() if begin <= number < end}
            numbered = [
                {**group, "params": [number - begin for number in group["params"]]}
                for group in islice(left, len(optimizer.param_groups))
            ]
            part.load(own, numbered)

    return DividedOptimizer(
        group=max((part.group for part in parts), key=lambda group: group.size, default=alone()),
        locals=tuple(local for part in parts for local in part.locals),
        held={begin + i: x for begin, part in zip(begins, parts, strict=False) for i, x in part.held.items()},
        homes=list({id(there): there for part in parts for there in part.homes}.values()),
        num_replicas=max((part.num_replicas for part in parts), default=1),
        load=load,
    )


def offered(x: object) -> Any:
    """The description of ``x``, ``Wrapped`` or ``DividedOptimizer``, by itself or by the homes of its
    parameters; None if there is none."""
    method = getattr(type(x), "__instep_state__", None)
    if method is not None:
        return method(x)
    if not isinstance(x, Optimizer):
        return None
    said = (there.divided(x) for there in homes(p for group in x.param_groups for p in group["params"]))
    return next((found for found in said if found is not None), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside another library's wrapper: ``model.module`` if it has all of ``model``'s tensors."""

    def tensors(module: nn.Module) -> set[int]:
        return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) and tensors(inner) == tensors(model) else model


def not_compiled(model: Any) -> Any:
    """What ``torch.compile`` was given: that is the wrapper, and has the names of the model."""
    return getattr(model, "_orig_mod", model)
