"""Homes: where a parameter's memory is divided among ranks, and what wrappers and optimizers say of it.

Whatever divides parameters settles them in a home, and code that needs to know where a parameter's elements
are asks ``home``. Weak on both sides: it ends with the home. What wraps a module, or steps shards, says so
itself by a method ``__instep_state__`` (``offered``), and for a plain optimizer the home of its parameters
does; saving, hashing and counting call that, and never ask which class they have before them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from instep.mesh.mesh import Mesh
from instep.mesh.process_group import Group, alone
from instep.ordered.node_format import IN_FLOAT32
from instep.ordered.shards import elements


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """What one rank holds of a parameter: elements ``first`` to ``last`` (exclusive) in logical order.

    ``tensor`` is what the local optimizer steps, and a plain one's parameter itself: in the parameter's shape
    where it is all of it, else flat.
    """

    parameter: Tensor
    first: int
    last: int
    tensor: Tensor

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.parameter.numel()

    def part_of(self, x: Tensor) -> Tensor:
        """The same elements of ``x``, which has the parameter's shape, laid out as ``tensor``: a view where
        they are.

        Fused optimizers read weight, gradient and moments in the order of memory, and compare no strides.
        """
        x = x.detach().resolve_conj().resolve_neg()
        return with_strides(x, self.tensor.stride()) if self.is_whole else elements(x, self.first, self.last)


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x`` with these strides; itself, if it has them."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of ``x`` without gaps between its elements, in the same order of memory."""
    return torch.empty_like(x, device="meta").stride()


def in_order(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether with ``strides`` the elements stand in memory in logical order, without gaps."""
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def strides_in_order(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """``strides`` if they are ``in_order``, else those of a contiguous tensor."""
    return strides if in_order(shape, strides) else torch.empty(shape, device="meta").stride()


class Home(Protocol):
    """Memory that parameters live in, divided among the ranks of ``group``.

    ``resident``: every rank has all values between steps; else a rank has its ``held`` alone. ``everyone``
    are all ranks that train these parameters, of which ``group`` may be one shard group of several.
    ``one_copy``: all ranks of ``group`` have the same memory. ``outer`` is the home whose ``held`` this one
    divides further, if there is one. ``replicas`` is a mesh along whose data axes ranks hold just the same,
    so that an optimizer may divide it further; None: it may not.
    """

    group: Group
    everyone: Group
    names: list[str]
    parameters: list[Tensor]
    held: list[ParameterShard]

    @property
    def outer(self) -> Home | None: ...

    @property
    def replicas(self) -> Mesh | None: ...

    @property
    def resident(self) -> bool: ...

    @property
    def has_values(self) -> bool:
        """Whether parameters have some: those from the meta device, and those that wait for another group,
        have none."""

    @property
    def one_copy(self) -> bool: ...

    @property
    def num_others_bytes(self) -> int:
        """Of memory that this rank has mapped, what other ranks count, or what it has mapped twice."""

    @property
    def gathered(self) -> list[Tensor]:
        """Memory that other ranks' values have been brought to, for as long as they are needed."""

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Those of all of ``parameter``, which its memory cannot tell at all times."""

    def slices_with(self, parameter: Tensor) -> list[int]:
        """The ranks of ``group`` that hold some of ``parameter``."""

    def num_shares(self, parameter: Tensor) -> int:
        """Among how many ranks of ``group`` the elements of ``parameter`` are divided, of which this rank
        holds its share; 0: it holds none."""

    def make_room(self) -> None:
        """``held`` are about to get values: they have memory, if they had none."""

    def loaded(self) -> None:
        """``held`` have new values, as on all ranks."""

    def fetch(self, parameter: Tensor) -> Tensor | None:
        """All values of ``parameter``, in memory of their own, collective over ``group``; None: its module's
        state dict has them."""

    def divided(self, optimizer: Optimizer) -> DividedOptimizer | None:
        """What a plain ``optimizer`` of these parameters would say of itself; None where it has it whole."""


_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> reference to its home


def settle(new: Home) -> None:
    """The parameters of ``new`` live there, until it is collected or they are settled elsewhere."""
    for parameter in new.parameters:
        _homes[parameter] = weakref.ref(new)


def leave(old: Home) -> None:
    """The parameters of ``old`` live there no longer."""
    for parameter in old.parameters:
        if home(parameter) is old:
            del _homes[parameter]


def home(parameter: Tensor) -> Home | None:
    """The home that ``parameter`` was settled in, if it still is there, else None."""
    known = _homes.get(parameter)
    return None if known is None else known()


def homes(tensors: Iterable[Tensor]) -> list[Home]:
    """The homes that some of ``tensors`` live in, each once."""
    found = [there for x in tensors if (there := home(x)) is not None]
    return list({id(there): there for there in found}.values())


def outermost(there: Home) -> Home:
    """The home that is first to divide what ``there`` divides."""
    return there if there.outer is None else outermost(there.outer)


def holders(there: Home, parameter: Tensor, slices: Sequence[int], everyone: Group) -> tuple[int, ...]:
    """The ranks of ``everyone`` that have one of ``slices`` of ``parameter``, in the group of ``there`` and
    in all others like it, by their place among everyone.

    Raises:
        ValueError: the ranks of a group are not at even distances.
    """
    numbers = _numbers(tuple(there.group.ranks), tuple(everyone.ranks))
    found = tuple(rank for rank, number in enumerate(numbers) if number in slices)
    if there.outer is None:
        return found
    outside = holders(there.outer, parameter, there.outer.slices_with(parameter), everyone)
    return tuple(rank for rank in found if rank in outside)


@cache
def _numbers(ranks: tuple[int, ...], everyone: tuple[int, ...]) -> tuple[int, ...]:
    """For each of ``everyone`` its number in its own group, which is like that of ``ranks``: groups follow on
    each other, or take turns."""
    places = [everyone.index(rank) for rank in ranks if rank in everyone]
    stride = places[1] - places[0] if len(places) > 1 else 1
    if [place // stride % len(ranks) for place in places] != list(range(len(ranks))):
        raise ValueError(
            f"expected a shard group at even distances among ranks {list(everyone)}, which train together, "
            f"got {list(ranks)}: shard over an axis of one mesh"
        )
    return tuple(place // stride % len(ranks) for place in range(len(everyone)))


class CountsSteps(Protocol):
    """What counts declared steps, by which their random numbers are keyed: ``next_step`` is the next one."""

    next_step: int


@dataclass(frozen=True)
class Wrapped:
    """What a wrapper says of the module that it wraps, by a method ``__instep_state__``.

    ``gradients`` is the memory that reduced gradients lie in between steps, ``scratch`` what reducing them
    takes beside it. ``counter`` counts declared steps; None where no random numbers are keyed. ``steppers``
    are the ranks of ``group`` that have the optimizer's state; None means all. ``settled`` is called on all
    ranks when what they hold alike has been compared: what was written to it before is no edit of one alone.
    ``micro_batch()`` is the one of a declared step whose backward is under way in this thread; None if there
    is none. ``reductions`` add the gradients up over the ranks (``step/reduction.py``), each those of one
    part of the module, by the part's name on all ranks: "" where it is all of it. ``nodes`` says in words
    what the sums of gradients are rounded to.

    ``leave`` gives the group back and waits for no rank, whatever has happened. A step that is under way is
    given up: gradients are None, partial sums are gone, a declared step is open no longer. ``join`` takes
    part in another mesh, with the arguments of the wrapping; collective over it. Module and parameters stay
    the same objects, what is trained and frozen is what was when it was wrapped, and ``no_sync`` stays on or
    off. Replicated values stay each rank's own; those of divided parameters are of no step from ``leave``
    until a state has been put there (``TrainingState``), and take no memory until ``join``; where there is
    none anywhere, ``fill`` gives values to those from the meta device, collective over the mesh. A ``join``
    that raises is followed by ``leave``, and may be tried again. Optimizers leave before the wrappers, whose
    memory they step, and join after them. What was offered before a ``join`` is out of date after it.
    """

    module: nn.Module
    group: Group
    gradients: Callable[[], Iterable[Tensor]]
    scratch: Callable[[], Iterable[Tensor]]
    counter: CountsSteps | None
    leave: Callable[[], None]
    join: Callable[[Mesh], None]
    steppers: tuple[int, ...] | None = None
    settled: Callable[[], None] = field(default=lambda: None)
    fill: Callable[[], None] = field(default=lambda: None)
    micro_batch: Callable[[], int | None] = field(default=lambda: None)
    reductions: Mapping[str, Any] = field(default_factory=dict)
    nodes: str = str(IN_FLOAT32)


@dataclass(frozen=True)
class DividedOptimizer:
    """What an optimizer says whose state is divided among the ranks of ``group``, by ``__instep_state__``.

    ``local`` steps this rank's ``held``, by the number of the parameter. ``homes`` are the memories of its
    parameters. ``num_replicas`` groups like this one make the same steps. ``load`` takes states by the number
    of the parameter, and groups in the form of ``state_dict``; collective. ``others`` are further local
    optimizers, where several are described as one (``JoinedOptimizers``).

    ``leave`` and ``join`` are as those of ``Wrapped``, whose order is written there. The optimizer, its
    groups and their options stay; moments are gone with ``leave``, and weights are of no step until a state
    has been put there.
    """

    group: Group
    local: Optimizer
    held: Mapping[int, ParameterShard]
    homes: Sequence[Home]
    num_replicas: int
    load: Callable[[Mapping[int, dict[str, Any]], list[dict[str, Any]]], None] = field(repr=False)
    leave: Callable[[], None] = field(default=lambda: None, repr=False)
    join: Callable[[Mesh], None] = field(default=lambda mesh: None, repr=False)
    others: Sequence[Optimizer] = ()

    @property
    def locals(self) -> tuple[Optimizer, ...]:
        """All local optimizers, of which each has groups of its own, in the order of the groups."""
        return (self.local, *self.others)

    def state_of(self, x: ParameterShard) -> dict[str, Any]:
        """What is kept for ``x``: live, and nothing before the first step."""
        found = (local.state[x.tensor] for local in self.locals if x.tensor in local.state)
        return next(found, {})


def undivided(optimizer: Optimizer) -> DividedOptimizer:
    """What a plain ``optimizer``, which steps whole parameters, would say of itself."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def load(states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        for number, state in states.items():
            live = optimizer.state.get(parameters[number], {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = _placed(live.get(key), value)
        optimizer.load_state_dict({"state": {i: x for i, x in states.items() if x}, "param_groups": groups})

    held = {i: ParameterShard(p, 0, p.numel(), p) for i, p in enumerate(parameters)}
    return DividedOptimizer(alone(), optimizer, held, (), 1, load)


def _placed(live: Any, value: Tensor) -> Tensor:
    """``value`` in the live tensor if there is one like it, else where it is."""
    if isinstance(live, Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            return live.copy_(value)
    return value


class JoinedOptimizers:
    """Several optimizers as one: all their groups, in order, and their parameters numbered through.

    Each may be divided or not. Together they are divided as those are that are.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all, as they are now."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def __instep_state__(self) -> DividedOptimizer:
        parts: list[DividedOptimizer] = [offered(x) or undivided(x) for x in self.optimizers]
        local, *others = (x for part in parts for x in part.locals)
        begins = self._begins()
        lived_in = {id(there): there for part in parts for there in part.homes}
        return DividedOptimizer(
            group=max((part.group for part in parts), key=lambda group: group.size),
            local=local,
            held={
                begin + i: x for begin, part in zip(begins, parts, strict=False) for i, x in part.held.items()
            },
            homes=list(lived_in.values()),
            num_replicas=max(part.num_replicas for part in parts),
            load=lambda states, groups: self._load(parts, states, groups),
            others=others,
        )

    def _begins(self) -> list[int]:
        """The number of the first parameter of each, and how many there are."""
        counts = [sum(len(group["params"]) for group in x.param_groups) for x in self.optimizers]
        return [0, *accumulate(counts)]

    def _load(
        self,
        parts: Sequence[DividedOptimizer],
        states: Mapping[int, dict[str, Any]],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """Each gets its own, by its own numbers."""
        left = iter(groups)
        for part, optimizer, (begin, end) in zip(
            parts, self.optimizers, pairwise(self._begins()), strict=True
        ):
            own = {number - begin: state for number, state in states.items() if begin <= number < end}
            numbered = [
                {**group, "params": [number - begin for number in group["params"]]}
                for group in islice(left, len(optimizer.param_groups))
            ]
            part.load(own, numbered)


def offered(x: object) -> Any:
    """What ``x`` says of itself, or homes of its parameters do, ``Wrapped`` or ``DividedOptimizer``; None if
    there is nothing to say."""
    method = getattr(type(x), "__instep_state__", None)
    if method is not None:
        return method(x)
    if not isinstance(x, Optimizer):
        return None
    said = (there.divided(x) for there in homes(p for group in x.param_groups for p in group["params"]))
    return next((found for found in said if found is not None), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a data-parallel wrapper: ``model.module`` if it holds all of ``model``'s tensors."""
    inner = getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        return model
    return inner if _identities(inner) == _identities(model) else model


def _identities(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
