"""Flat memory that parameters live in, cut into a slice for every rank, and how new slices get to all ranks.

    rank 0    | new 0 | old 1 |      rank 0 has updated slice 0         | new 0 | new 1 |
    rank 1    | old 0 | new 1 |      rank 1 has updated slice 1   -->   | new 0 | new 1 |

Where ranks can reach into each other's memory (backend "shm"), each writes its slice into the memory of all
others. Else each sends it to them: S bytes of parameters, W ranks, S (W-1)/W bytes per rank in one step.

One copy: ranks that can reach into each other's memory need not have the weights W times. All use the same
flat memory, each updates its slice of it in place, and nothing has to travel (``one_copy``):

    one memory    | old 0 | old 1 |    all have come, each updates its slice    | new 0 | new 1 |    all go on

Order. A piece of a parameter is a range of its elements in logical order, as in hashes, norms and files. So a
parameter that is cut, and whose memory has another order (channels_last, transposed), cannot live in flat
memory and keep its strides, which the bits of forward depend on. It lives beside it, and its place there is
for the exchange: its owners take their pieces from it before an update, and after it all copy the new values
into it. What is not cut keeps its order in flat memory too.

A fused optimizer rounds what is left of a tensor after the last whole vector in another way, and in another
order these are other elements. So where there is such a rest, a parameter in another order is not cut
(``uncuttable``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from instep.comm import direct
from instep.comm.perform import perform
from instep.memory import align_bytes
from instep.mesh.axes import round_up
from instep.net.messages import Messages
from instep.net.process_group import Group
from instep.shard.layout import FlatLayout, LayoutRule
from instep.shard.one_copy import OneCopy
from instep.state import homes
from instep.state.homes import DividedOptimizer, Home, ParameterShard
from instep.state.shards import put_elements


class FlatParameters(Home):
    """Parameters of one dtype and device, laid out in a flat space that is cut into a slice for every rank.

    Once made, ``held`` are this rank's pieces, which an optimizer steps: ``gradient_of`` each before,
    ``share`` after. Pieces of frozen parameters may be among them, and are not stepped.

    ``resident``      every rank has all values between steps; else others read this rank's pieces
    ``one_copy``      all ranks have the same memory, and read what optimizers write there

    ``parameters``    in the order of ``layout``, ``names`` beside them for errors ("" where none is known)
    ``group``         the ranks of the slices
    ``everyone``      all ranks that train these parameters, of whose shard groups ``group`` is one

    With one copy, or where a space is not resident, an optimizer steps no piece before all ranks have come to
    the step. In no case does a rank return from it before all have stepped. An optimizer of parameters that
    have a home already (``state.homes.settle``) takes all of that space.
    """

    layout: FlatLayout
    divide: Callable[[Optimizer], DividedOptimizer] | None = None  # the state of a plain optimizer

    @property
    def own_bytes(self) -> int:
        """Of this rank's slice."""
        return sum(x.tensor.numel() * x.tensor.itemsize for x in self.held)

    @property
    def bytes_to_share(self) -> int:
        """That ``share`` sends, or writes to others' memory."""
        return 0

    def slices_with(self, parameter: Tensor) -> list[int]:
        """The ranks of ``group`` that hold some of ``parameter``."""
        return self.layout.slices_with(next(i for i, p in enumerate(self.parameters) if p is parameter))

    def loaded(self) -> None:
        """``held`` have new values, as on all ranks."""
        self.share("weights that were loaded")
        increment_version(self.parameters)  # a graph from before must not use the new values

    def values_of(self, held: ParameterShard) -> Tensor:
        """What this rank's program reads of ``held`` between steps."""
        return held.tensor

    def edits(self) -> int:
        """A number for what this rank's program has written to memory that ``publish`` brings to others."""
        return 0

    def publish(self) -> None:
        """All ranks have come to the step: they get what this one has written to its slice."""

    def strides_in_flat(self, number: int) -> tuple[int, ...]:
        """Those of a parameter, by its number, in the flat space: in logical order, where it is cut."""
        parameter = self.parameters[number]
        own = self.strides_of(parameter)
        return homes.strides_in_order(parameter.shape, own) if self.layout.is_cut(number) else own

    def gradient_of(self, held: ParameterShard) -> Tensor | None:
        """What ``held.tensor`` is to be stepped with, in its dtype and shape; None for a step without it."""
        gradient = held.parameter.grad
        return None if gradient is None else held.part_of(gradient)

    def moved(self) -> Tensor | None:
        """A parameter whose memory other code has replaced, if there is one."""
        return None

    def collect(self) -> None:
        """An update follows: ``held`` are to have the values that the parameters have."""

    def share(self, operation: str) -> bool:
        """The own pieces are new; whether the others' are here only after a barrier. Collective."""
        return False

    def distribute(self) -> None:
        """All pieces are here, after ``share``: the parameters are to have their values."""

    def release(self) -> None:
        """The optimizer that made this space is closed."""

    def divided(self, optimizer: Optimizer) -> DividedOptimizer | None:
        """What a plain ``optimizer`` of these parameters would say of itself; None where it has it whole."""
        return None if self.divide is None else self.divide(optimizer)


class OwnParameters(FlatParameters):
    """Parameters that no memory divides, beside others of an optimizer: each rank steps all of them."""

    def __init__(self, parameters: Sequence[Tensor], group: Group) -> None:
        self.parameters, self.names = list(parameters), [""] * len(parameters)
        self.group = self.everyone = group
        self.held = [ParameterShard(p, 0, p.numel(), p.detach()) for p in parameters]

    def num_shares(self, parameter: Tensor) -> int:
        """As ``Home`` says: this rank has all of it."""
        return 1

    def collect(self) -> None:
        for held in self.held:
            if held.tensor.data_ptr() != held.parameter.data_ptr():
                held.tensor.data = held.parameter.data


class Beside(NamedTuple):
    """A parameter that lies beside flat memory, as optimizers of all ranks see it: its values, and its place
    in flat memory, in logical order."""

    values: Tensor
    place: Tensor


class WholeParameters(FlatParameters):
    """``parameters`` of one dtype and device, whole on every rank, in flat memory laid out by ``rule``.

    At construction, collective: the parameters move into it, or beside it (see above), with the values that
    they have on the group's first rank, or, unless ``aligned``, on each; with ``one_copy`` into memory that
    all have. ``outer`` is a home that they stay in: what ranks of ``group`` hold alike of it is divided here.
    ``collect`` before each update of ``held``, ``share`` and ``distribute`` after it. ``moved`` tells whose
    memory is another by now. ``release`` gives every rank a copy of its own again.

    ``flat`` is what parameters lie in, ``stepped`` what optimizers step: with one copy the same memory, but
    that what this rank writes to ``flat`` is its own until the step. What lies beside is behind the slices,
    and with one copy of it too:

        | slice 0 | slice 1 | beside |
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rule: LayoutRule,
        group: Group,
        names: Sequence[str] = (),
        *,
        one_copy: bool = False,
        aligned: bool = True,
        outer: Home | None = None,
    ) -> None:
        first = parameters[0]
        self.outer = outer
        self.parameters = list(parameters)
        self.names = list(names) or [""] * len(parameters)
        self.group = self.everyone = group
        self._itemsize = first.dtype.itemsize
        align = align_bytes(first.device)
        granule = max(align // first.dtype.itemsize, 16)
        whole = uncuttable([p.shape for p in parameters], list(map(homes.dense_strides, parameters)), granule)
        self.layout = rule([p.numel() for p in parameters], group.size, granule, whole)
        self.one_copy = one_copy and group.size > 1
        self._copy: OneCopy | None = None
        behind, num_elements = self._places_behind(granule)
        memory, stepped = self._allocate(num_elements, align, first)
        self.flat, self.stepped = (x[: self.layout.num_elements] for x in (memory, stepped))
        self._beside: dict[int, Beside] = {}  # by number of the parameter
        for number in range(len(parameters)):
            self._move(number, behind.get(number), memory, stepped)
        if self.one_copy:
            group.barrier("the first values of the parameters")
        elif aligned:
            group.broadcast(self.flat.view(torch.uint8), "the first values of the parameters")
            self.distribute()
        self.others = None if self.one_copy else self._expose()
        self._places = [(p.data_ptr(), p.shape, p.stride()) for p in parameters]
        self.held = [self._hold(*piece) for piece in self._own_pieces()]

    @property
    def own_bytes(self) -> int:
        return self.layout.slice_length * self._itemsize

    @property
    def num_others_bytes(self) -> int:
        if not self.one_copy:
            return 0
        times = 2 if self.held else 1  # ``held`` lie in ``stepped``
        mapped = self.flat.untyped_storage().nbytes()
        beside = mapped - self.flat.nbytes if self.group.rank == 0 else 0  # which the first rank counts
        return times * mapped - self.own_bytes - beside

    @property
    def bytes_to_share(self) -> int:
        return 0 if self.one_copy else self.own_bytes * (self.group.size - 1)

    def values_of(self, held: ParameterShard) -> Tensor:
        return held.part_of(held.parameter)

    def edits(self) -> int:
        return 0 if self._copy is None else self._copy.digest()

    def publish(self) -> None:
        if self._copy is not None:
            begin = self.group.rank * self.own_bytes
            self._copy.publish(begin, begin + self.own_bytes)

    def moved(self) -> Tensor | None:
        for parameter, place in zip(self.parameters, self._places, strict=True):
            if (parameter.data_ptr(), parameter.shape, parameter.stride()) != place:
                return parameter
        return None

    def collect(self) -> None:
        for held, _ in self._held_beside:
            held.tensor.copy_(held.part_of(held.parameter))

    def distribute(self) -> None:
        if not self.one_copy:
            for beside in self._beside.values():
                # Not the parameter, because what was not stepped has not changed for autograd.
                beside.values.copy_(beside.place)

    def share(self, operation: str) -> bool:
        """This rank's slice is new: give it to all, and take theirs.

        Written to other ranks' memory it is theirs only after a barrier, and must not be before one: until
        then they may still compute with the old values.
        """
        if self._copy is not None:
            self._copy.drop()
            for held, beside in self._held_beside:
                put_elements(beside.values, held.first, held.tensor.detach())
            return bool(self._beside)
        if self.group.size == 1:
            return False
        length = self.layout.slice_length
        parts = self.flat.view(torch.uint8).split(self.own_bytes)
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

    def release(self) -> None:
        self.others = None
        if not self.one_copy:
            return
        for parameter, (address, *_) in zip(self.parameters, self._places, strict=True):
            if parameter.data_ptr() == address:  # a plain optimizer of every rank would step the one copy
                parameter.data = parameter.detach().clone()

    @property
    def _held_beside(self) -> list[tuple[ParameterShard, Beside]]:
        """The own pieces of parameters that do not live in flat memory."""
        beside = {id(self.parameters[number]): there for number, there in self._beside.items()}
        return [(held, beside[id(held.parameter)]) for held in self.held if id(held.parameter) in beside]

    def _places_behind(self, granule: int) -> tuple[dict[int, int], int]:
        """Where, by number of the parameter, those begin that lie behind the slices, and where they end."""
        places, end = {}, self.layout.num_elements
        for number, p in enumerate(self.parameters):
            if self.layout.is_cut(number) and not homes.in_order(p.shape, homes.dense_strides(p)):
                places[number] = end
                end += round_up(p.numel(), granule)
        return places, end

    def _allocate(self, num_elements: int, align: int, first: Tensor) -> tuple[Tensor, Tensor]:
        """Memory, zeroed, for the padding travels too: what parameters lie in, and what optimizers step."""
        nbytes = num_elements * self._itemsize
        if self.one_copy:
            self._copy = OneCopy(nbytes, self.group)
            with torch.inference_mode(False):
                memories = self._copy.private, self._copy.shared
                private, shared = (x[:nbytes].view(first.dtype) for x in memories)
                return private, shared
        segment = self.group.allocate(nbytes, align, first.device)
        flat = segment.elements(first.dtype)
        flat = flat if segment.fd is not None else flat.zero_()
        return flat, flat

    def _move(self, number: int, behind: int | None, memory: Tensor, stepped: Tensor) -> None:
        """A parameter moves, with its values and order in memory, without gaps: into its place in flat
        memory, or to element ``behind``."""
        parameter, offset = self.parameters[number], self.layout.offsets[number]
        shape, strides = parameter.shape, homes.dense_strides(parameter)
        begin = offset if behind is None else behind
        views = [_view(stepped, begin, shape, strides)]
        if behind is not None:
            views.append(_view(stepped, offset, shape, homes.strides_in_order(shape, strides)))
            self._beside[number] = Beside(*views)
        if not self.one_copy or self.group.rank == 0:
            for view in views:
                view.copy_(parameter.detach())
        parameter.data = _view(memory, begin, shape, strides)

    def _expose(self) -> list[Tensor] | None:
        """The same memory of the other ranks, the next one first; None where it cannot be reached."""
        size, rank = self.group.size, self.group.rank
        shown = self.group.map_all([self.flat], "the exchange of memory") if size > 1 else None
        if shown is None:
            return None
        return [shown[(rank + k) % size][0] for k in range(1, size)]

    def _own_pieces(self) -> list[tuple[Tensor, int, int, int]]:
        pieces = self.layout.pieces(self.group.rank)
        return [(self.parameters[x.parameter], x.first, x.last, x.offset) for x in pieces]

    def _hold(self, parameter: Tensor, first: int, last: int, offset: int) -> ParameterShard:
        if last - first < parameter.numel():
            return ParameterShard(parameter, first, last, self.stepped[offset : offset + last - first])
        if self._copy is None:
            return ParameterShard(parameter, first, last, parameter.detach())
        whole = _view(self.stepped, offset, parameter.shape, parameter.stride())
        return ParameterShard(parameter, first, last, whole)


def _view(flat: Tensor, offset: int, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    return flat[offset : offset + shape.numel()].as_strided(shape, strides)


def uncuttable(
    shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]], granule: int
) -> frozenset[int]:
    """The numbers of parameters that must not be cut: in another order than the logical one, and no multiple
    of ``granule`` elements, which is one of a vector."""
    return frozenset(
        i
        for i, (shape, own) in enumerate(zip(shapes, strides, strict=True))
        if shape.numel() % granule and not homes.in_order(shape, own)
    )


class Stage2Parameters(WholeParameters):
    """Weights whole on every rank, gradients in slices, which ``gradient_source`` has."""

    gradient_source: Callable[[ParameterShard], Tensor | None] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.flat.dtype

    def gradient_of(self, held: ParameterShard) -> Tensor | None:
        return None if self.gradient_source is None else self.gradient_source(held)


class ShardedParameters:
    """Trainable parameters of the groups of an optimizer: the flat spaces where some live already, and new
    ``WholeParameters``, laid out by ``rule``, one per dtype and device, for all others; without a ``rule``
    these stay each rank's own. Unless ``aligned``, new ones keep each rank's values. Of a home that may be
    divided further (``Home.replicas``), each rank has spaces for what it holds of it.

    Parameters are numbered in the order of the groups, frozen ones too. ``held`` are the own pieces by
    number, in that order; ``owned`` all parameters that are sharded, here or elsewhere.
    """

    def __init__(
        self,
        group: Group,
        rule: LayoutRule | None,
        *,
        one_copy: bool = False,
        aligned: bool = True,
        barrier: Callable[[str], None] | None = None,
    ) -> None:
        self._group, self._rule = group, rule
        self._barrier = barrier or group.barrier
        self.wants_one_copy, self._aligned = one_copy, aligned
        self.spaces: list[FlatParameters] = []
        self.held: dict[int, ParameterShard] = {}
        self.owned: list[Tensor] = []
        self._made: list[FlatParameters] = []  # for this optimizer alone
        self._space_of: dict[int, FlatParameters] = {}  # by the identity of what is owned

    def take(self, groups: Sequence[Mapping[str, Any]], first_group: int) -> list[list[Tensor]]:
        """Take the parameters of the groups from ``first_group`` on; the own pieces of each. Collective."""
        numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        spaces_there: dict[int, FlatParameters] = {}
        by_kind: dict[tuple[torch.dtype, torch.device, Home | None], list[Tensor]] = {}
        for p in (p for group in groups[first_group:] for p in group["params"] if p.requires_grad):
            self.owned.append(p)
            if isinstance(there := homes.home(p), FlatParameters):
                spaces_there[id(there)] = there
            elif there is None or there.num_shares(p):
                by_kind.setdefault((p.dtype, p.device, there), []).append(p)
        with torch.no_grad():
            made = [self._make(members, outer) for (*_, outer), members in by_kind.items()]
        self._made += made
        spaces = [*spaces_there.values(), *made]
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

    def _make(self, members: Sequence[Tensor], outer: Home | None) -> FlatParameters:
        if self._rule is None:
            return OwnParameters(members, self._group)
        if outer is not None:
            outer.make_room()
        return WholeParameters(
            members,
            self._rule,
            self._group,
            one_copy=self.wants_one_copy,
            aligned=self._aligned,
            outer=outer,
        )

    @property
    def others_read(self) -> bool:
        """Whether other ranks compute with, or gather, what this rank updates: not before all have come."""
        return self._group.size > 1 and any(space.one_copy or not space.resident for space in self.spaces)

    def edits(self) -> int:
        """A number for what this rank's program has written to memory that ranks have once; 0 for nothing."""
        found = [space.edits() for space in self.spaces]
        return zlib.crc32(repr(found).encode()) if any(found) else 0

    def publish(self) -> None:
        """All ranks have come to the step: what each has written to its slices is theirs."""
        for space in self.spaces:
            space.publish()

    def values_of(self, held: ParameterShard) -> Tensor:
        """What this rank's program reads of ``held`` between steps."""
        return self._space_of[id(held.parameter)].values_of(held)

    def moved(self) -> Tensor | None:
        """A parameter whose memory is not here any more, if there is one."""
        return next((p for p in (space.moved() for space in self.spaces) if p is not None), None)

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Those of ``parameter`` where all of it lies in memory."""
        there = self._space_of.get(id(parameter)) or homes.home(parameter)
        return parameter.stride() if there is None else there.strides_of(parameter)

    def collect(self) -> None:
        """The own pieces have the values that the parameters have."""
        with torch.no_grad():
            for space in self.spaces:
                space.collect()

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
            self._barrier(operation)
        for space in self.spaces:
            space.distribute()

    def release(self) -> None:
        """End the spaces that were made for this optimizer; homes outlive it."""
        for space in self._made:
            space.release()
