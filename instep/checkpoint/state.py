"""The state of training as this rank holds it: a module and its optimizer as shards and JSON, and back.

torch numbers an optimizer's parameters in the order of its groups, so a state saved by index goes to the
wrong parameters, without an error, after layers changed places. Here everything goes by the parameter's name:

    shards    "model:block.0.weight", "optimizer:exp_avg/block.0.weight", and, where a hyper-parameter is
              a tensor, "optimizer:param_groups.0/lr"
    JSON      {"class": "AdamW", "groups": [{"parameters": [...], "options": {"lr": 0.001, ...}}],
               "scalars": {"key/block.0.weight": ...}}

It is the same object whether the state is divided or not: where every rank has all of it, the shards are
whole tensors that all ranks hold, and the group that has to come together for it is this rank alone.

One idea in one file, though long: what is read here has to be what was written here, field by field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import module_state, moments, tensors
from instep.checkpoint.manifest import Json, require_json
from instep.checkpoint.tensors import Layout
from instep.errors import CheckpointRejected
from instep.net.process_group import Group, alone
from instep.shard.fully import gathered
from instep.state.homes import (
    DividedOptimizer,
    Home,
    JoinedOptimizers,
    ParameterShard,
    Wrapped,
    holders,
    home,
    homes,
    not_compiled,
    offered,
    outermost,
    shape_of,
    undivided,
    unwrapped,
)
from instep.state.shards import MODEL, OPTIMIZER, Order, Shard, held_shape, owned
from instep.state.stored import Source

MAX_NUMBER = 2**1023  # an integer of JSON can be longer than a float
OPTIONS = "param_groups."
BESIDE = {"objects": dict, "declared_steps": dict}  # of a registered state, beside its optimizers


class TrainingState:
    """What ``model`` and ``optimizer`` carry from step to step.

    ``everyone`` are the ranks that train together, by default those that ``model`` is wrapped for; ``group``
    those that have to come together for all of the state: everyone where it is divided (``is_divided``), else
    this rank alone. ``is_complete`` says whether this rank alone has everything. Of several models, several
    optimizers and other objects see ``checkpoint/registered.py``.

    It may be kept while the parameters, the optimizer's groups and the wrapper stay the same; values and
    moments are looked at anew in each call.

    Raises:
        ValueError: ``optimizer`` has a parameter that ``model`` does not have.
    """

    def __init__(
        self, model: Any, optimizer: Optimizer | JoinedOptimizers | None = None, group: Group | None = None
    ) -> None:
        wrapped = offered(model := not_compiled(model))
        self.module = wrapped.module if isinstance(wrapped, Wrapped) else unwrapped(model)
        self.optimizer = optimizer
        self._wrapped: Wrapped | None = wrapped
        self._parameters = dict(self.module.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._homes: list[Home] = homes(self._parameters.values())
        self._stepping: dict[int, tuple[int, ...]] = {}  # which ranks, by the identity of a parameter
        self.steps: DividedOptimizer | None = None if optimizer is None else offered(optimizer)
        divided = [self.steps.group] if self.steps is not None else []
        divided += [there.group for there in self._homes]
        shard_group = max(divided, key=lambda found: found.size, default=None)
        if optimizer is not None:
            _parameter_names(self.module, optimizer)
            if isinstance(optimizer, Optimizer):
                self.steps = self.steps or undivided(optimizer)
        self.everyone = self._find_everyone(group, shard_group)
        self.is_divided = shard_group is not None and shard_group.size > 1
        self.group = self.everyone if self.is_divided else _alone(self.everyone)
        self._every = tuple(range(self.everyone.size))

    def _find_everyone(self, group: Group | None, shard_group: Group | None) -> Group:
        if group is None and self._wrapped is not None:
            group = self._wrapped.group
        if group is None:
            group = max((x.everyone for x in self._homes), key=lambda x: x.size, default=None)
        if shard_group is not None and (group is None or group.size <= shard_group.size):
            return shard_group
        return group or alone()

    def require_all_replicas(self) -> None:
        """Raise ``ValueError`` where this rank knows of one shard group of several, which all would write."""
        if self.steps is None or self.steps.num_replicas == 1 or not self.is_divided:
            return
        if self.everyone.size == self.steps.group.size:
            raise ValueError(
                f"{self.steps.num_replicas} shard groups of {self.steps.group.size} ranks have the "
                "optimizer's state, and the module does not know that the others exist: pass the "
                "DataParallel that wraps it"
            )

    def shards(self) -> list[Shard]:
        """What this rank holds: live memory, without communication.

        Parameters, persistent buffers and moments in the order of the hash, then what else a state dict has,
        and options of the optimizer that are tensors. What is one number for a parameter (a count of steps)
        is with every shard of it.

        Raises:
            ValueError: the module keeps something that is neither data nor a tensor, or changes a shard.
        """
        return [*self.hashed(), *self.beside(), *self._options()]

    def hashed(self) -> list[Shard]:
        """Of what this rank holds, what the state's hash is over, in its order."""
        buffers = module_state.buffers(self.module)
        return [*self._model(buffers), *self._moments(len(self._parameters) + len(buffers))]

    def has_values(self, shard: Shard) -> bool:
        """Whether ``shard`` has any: what belongs to a parameter that is still to be filled has none."""
        p = self._parameters.get(self._parameter_of(shard) or "")
        return p is None or (there := home(p)) is None or there.has_values

    @property
    def goes_with_its_group(self) -> bool:
        """Whether some of it is gone, on a rank alone too, when wrappers and optimizers leave their group."""
        return any(not there.resident for there in self._homes) or bool(self.steps and self.steps.homes)

    def owned(self, shards: Iterable[Shard] | None = None) -> list[Shard]:
        """What this rank writes of ``shards``, by default of all that it holds, for ``group``.

        Of buffers, and of options that are tensors, the first rank writes all: ranks whose steps are not
        declared may have different ones, and then those of one rank belong together.
        """
        held = self.shards() if shards is None else shards
        if not self.is_divided:
            return list(held)
        of_one = (x if self._parameter_of(x) else x._replace(holders=x.holders[:1]) for x in held)
        return list(owned(of_one, self.everyone.rank))

    def _parameter_of(self, shard: Shard) -> str | None:
        """The name of the parameter that it belongs to, of which all holders have the same bits."""
        if shard.name.startswith(OPTIMIZER):
            return None if shard.order is None else moments.split(shard.name.removeprefix(OPTIMIZER))[1]
        name = shard.name.removeprefix(MODEL)
        return name if name in self._parameters else None

    def options(self) -> Json:
        """What of the optimizer is no tensor, as this rank knows it (see ``merged``); None without one.

        Raises:
            ValueError: JSON cannot carry it.
        """
        if self.optimizer is None or self.steps is None:
            return None
        for local in self.steps.locals:
            _require_state_by_parameter(local)
        found = {
            "class": _classes(self.steps),
            "groups": _optimizer_groups(self.module, self.optimizer),
            "scalars": {
                f"{_plain(key)}/{self._names[id(x.parameter)]}": value
                for x in self.steps.held.values()
                for key, value in self.steps.state_of(x).items()
                if not isinstance(value, Tensor)
            },
        }
        require_json("optimizer", found)
        return found

    def ties(self) -> dict[str, str]:
        """The further names of parameters and buffers in the state dict, each with the first one."""
        return dict(self._ties)

    @cached_property
    def _ties(self) -> dict[str, str]:
        found = module_state.divided(self.module, self._away)[0]
        if all(there.resident for there in self._homes):
            return tensors.split_ties(found)[1]
        firsts: dict[int, str] = {}  # weights that are not here have no address
        return {name: firsts[id(x)] for name, x in found.items() if firsts.setdefault(id(x), name) != name}

    @cached_property
    def _keeps_state(self) -> bool:
        return module_state.keeps_state(self.module)

    @cached_property
    def _away(self) -> set[int]:
        """The identities of parameters of which this rank has a part, or none."""
        return {id(p) for there in self._homes if not there.resident for p in there.parameters}

    def read(self, source: Source, options: Json) -> list[Shard]:
        """What this rank is to hold of the state in ``source``, in memory of its own; nothing is changed.

        Raises:
            CheckpointRejected: it is of another model or optimizer, or cannot be read.
        """
        firsts = self._firsts_in(source)
        self._require_model(source, firsts)
        if self.optimizer is not None:
            if options is None:
                raise CheckpointRejected(
                    "expected the state of an optimizer, got none: load without an optimizer"
                )
            self._require_optimizer(options, source.layout(OPTIMIZER))
        buffers = module_state.buffers(self.module)
        wanted = list(self._model(buffers))
        if self.optimizer is not None:
            wanted += self._moments_in(source, len(self._parameters) + len(buffers))
        found = [*(_read(source, shard, firsts) for shard in wanted), *self._beside_in(source)]
        self._given(_values(found))  # or it is rejected before any change
        return found

    def is_all_of(self, options: Json) -> bool:
        """Whether a state that was saved with ``options`` is no more than this one: its hash is over this."""
        return self.optimizer is not None or options is None

    def put(self, values: Sequence[Shard], options: Json) -> None:
        """Take over what ``read`` has given, in place. Collective over ``group``."""
        self._put_model(_values(values))
        if self.optimizer is not None:
            self._put_optimizer([x for x in values if x.name.startswith(OPTIMIZER)], options)
        self.group.barrier("the loading of a state")

    def counters(self) -> dict[str, Any]:
        """What counts the declared steps of each model, by its name, where a wrapper does."""
        counter = None if self._wrapped is None else self._wrapped.counter
        return {} if counter is None else {"model": counter}

    def resume_at(self, step: int, options: Json) -> None:
        """Random numbers are keyed by the number of a declared step: count on from where a state with
        ``options`` was saved, or from ``step`` where nothing counted."""
        counters, counted = self.counters(), (options or {}).get("declared_steps", {})
        if len(counters) == len(counted) == 1:
            counted = dict.fromkeys(counters, *counted.values())
        for name, counter in counters.items():
            counter.next_step = counted.get(name, step)

    def settled(self) -> None:
        """All ranks have compared the hash of this state. Of a divided one that is each shard once, and not
        what several shard groups hold alike."""
        if self._wrapped is not None and not self.is_divided:
            self._wrapped.settled()

    def _model(self, buffers: Mapping[str, Tensor]) -> Iterator[Shard]:
        held = {id(x.parameter): x for there in self._homes for x in there.held}
        for place, (name, p) in enumerate(self._parameters.items()):
            there = home(p) if self._homes else None
            if there is None or there.resident:
                yield Shard.whole(MODEL + name, p, self._every, (place, ""))
            elif (x := held.get(id(p))) is not None:
                yield self._of_parameter(MODEL + name, x, x.flat(x.tensor.detach()), (place, ""), there)
        for i, (name, b) in enumerate(buffers.items(), start=len(self._parameters)):
            yield Shard.whole(MODEL + name, b, self._every, (i, ""))

    def beside(self) -> Iterator[Shard]:
        """What a state dict has that is neither parameter nor buffer."""
        if self._keeps_state:
            for value, x in module_state.divided(self.module, self._away)[1].items():
                for name, part in module_state.to_tensors({value: x}).items():
                    yield Shard.whole(MODEL + name, part, self._keepers(value), None)

    def _beside_in(self, source: Source) -> Iterator[Shard]:
        """The same, as it is in ``source``."""
        there = source.layout(MODEL)
        for value in module_state.divided(self.module, self._away)[1] if self._keeps_state else ():
            for name in module_state.names_of(value, there):
                yield Shard.whole(MODEL + name, source.read_whole(MODEL + name), self._keepers(value), None)

    def _keepers(self, value: str) -> tuple[int, ...]:
        """The ranks that compute with the module that keeps ``value``: all, but in a pipeline."""
        module, found = value, set[tuple[int, ...]]()
        while not found and (module := module.rpartition(".")[0]):
            inside = (p for name, p in self._parameters.items() if name.startswith(f"{module}."))
            found = set(map(self._stages, inside))
        if not found and "." in value:
            found = set(map(self._stages, self._parameters.values()))
        if len(found) > 1:
            raise ValueError(
                f"{value}: its module has no parameters, by which a pipeline knows its rank: keep it in a "
                "layer that has some"
            )
        return next(iter(found), self._every)

    def _stages(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks of a pipeline that compute with ``parameter``; without one all do."""
        there = home(parameter)
        there = None if there is None else outermost(there)
        if there is None or there.replicas is None:
            return self._every
        return holders(there, parameter, there.slices_with(parameter), self.everyone)

    def _moments(self, first: int) -> Iterator[Shard]:
        if self.steps is None:
            return
        kept = {self._names[id(x.parameter)]: x for x in self.steps.held.values()}
        for place, name in enumerate(self._parameters, start=first):
            if (x := kept.get(name)) is None:
                continue
            state = self.steps.state_of(x)
            for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                full = f"{OPTIMIZER}{_plain(key)}/{name}"
                yield self._moment(full, x, state[key], (place, key))

    def _moments_in(self, source: Source, first: int) -> Iterator[Shard]:
        """What is to be here of the moments and tensor options in ``source``; without values."""
        assert self.steps is not None
        kept = {self._names[id(x.parameter)]: x for x in self.steps.held.values()}
        places = {name: place for place, name in enumerate(self._parameters, start=first)}
        unstepped = {n for n, p in self._parameters.items() if not (p.requires_grad or self._stepped_in(p))}
        for full, stored in source.tensors.items():
            if not full.startswith(OPTIMIZER):
                continue
            key, name = moments.split(full.removeprefix(OPTIMIZER))
            nothing = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            if key.startswith(OPTIONS):
                yield Shard.whole(full, nothing, tuple(range(self.everyone.size)), None)
            elif (x := kept.get(name)) is not None:
                is_moment = stored.shape == tuple(x.shape) and stored.shape
                value = nothing.new_empty(x.held_shape) if is_moment else nothing
                yield self._moment(full, x, value, (places[name], key))
            elif name in unstepped:
                raise CheckpointRejected(
                    f"the optimizer's {key!r} of {name!r}: expected none: this optimizer holds nothing "
                    "of frozen parameters: unfreeze it until the optimizer is made and the state is loaded, "
                    "or load with the optimizer that has saved it"
                )

    def _moment(self, full: str, x: ParameterShard, value: Tensor, order: Order) -> Shard:
        """``value``, which an optimizer keeps for ``x``: cut as that is, or one for all of the parameter."""
        if value.shape == x.held_shape and not x.is_whole:
            return self._of_parameter(full, x, x.flat(value), order, self._stepped_in(x.parameter))
        return Shard.whole(full, value, self._holders(x.parameter), order)

    def _stepped_in(self, parameter: Tensor) -> Home | None:
        """The home whose ranks step parts of ``parameter``; None where all step all of it."""
        return self._step_homes.get(id(parameter))

    @cached_property
    def _step_homes(self) -> dict[int, Home]:
        """By the identity of a parameter; of two, that which an optimizer has made of the one it lives in."""
        lived_in = () if self.steps is None else self.steps.homes
        every = [(p, there) for there in lived_in for p in there.parameters]
        return {id(p): there for p, there in sorted(every, key=lambda x: home(x[0]) is not x[1])}

    def _of_parameter(
        self, name: str, x: ParameterShard, value: Tensor, order: Order, there: Home | None
    ) -> Shard:
        """``value``, which has the shape of ``x``, as that part of a tensor like the parameter."""
        assert there is not None
        have = holders(there, x.parameter, [there.group.rank], self.everyone)
        shape = tuple(x.shape)
        return Shard(name, shape, value.dtype, x.first, x.last, order, None, value, have)

    def _holders(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks of everyone that step some of ``parameter``."""
        if id(parameter) not in self._stepping:
            there = self._stepped_in(parameter)
            self._stepping[id(parameter)] = (
                self._every
                if there is None
                else holders(there, parameter, there.slices_with(parameter), self.everyone)
            )
        return self._stepping[id(parameter)]

    def _options(self) -> Iterator[Shard]:
        for index, group in enumerate(self.optimizer.param_groups if self.optimizer else ()):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield Shard.whole(OPTIMIZER + _option(index, key), value, self._every, None)

    def _put_model(self, values: Mapping[str, Tensor]) -> None:
        """Weights and buffers, in the memory that they have, and what the module loads by itself."""
        away = [there for there in self._homes if not there.resident]
        if away:
            with torch.no_grad():
                for there in self._homes:
                    there.make_room()
                for live in self._model(module_state.buffers(self.module)):
                    live.tensor.copy_(values[live.name.removeprefix(MODEL)])
                for there in away:
                    there.loaded()
        if not away or self._keeps_state:
            whole = away and module_state.loads(self.module)
            with torch.no_grad(), gathered(self.module) if whole else nullcontext():
                self.module.load_state_dict(self._given(values))

    def _given(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """The argument of the module's ``load_state_dict``: its own state dict, for the versions of its
        formats, filled with ``values``. A sharded parameter stays as it is."""
        given = self.module.state_dict(keep_vars=True)
        _, beside = module_state.divided(self.module, self._away)
        for name, x in given.items():
            if name in beside:
                device = x.device if isinstance(x, Tensor) else self._device("cuda")
                given[name] = module_state.from_tensors(name, values, device)
            elif id(x) not in self._away:
                given[name] = values[self._ties.get(name, name)]
        return given

    def _device(self, kind: str) -> torch.device:
        """The model's device of this kind; the CPU where there is none."""
        devices = (p.device for p in self.module.parameters())
        return next((device for device in devices if device.type == kind), torch.device("cpu"))

    def _put_optimizer(self, values: Sequence[Shard], options: Json) -> None:
        """Options come from the saved state too, as in ``Optimizer.load_state_dict``; moments keep the dtype
        they were saved in, where torch would cast them to that of the parameter."""
        assert self.optimizer is not None and self.steps is not None
        numbers = {self._names[id(x.parameter)]: i for i, x in self.steps.held.items()}
        states: dict[int, dict[str, Any]] = {i: {} for i in self.steps.held}
        given: dict[str, Tensor] = {}
        for full, value in options["scalars"].items():
            key, name = moments.split(full)
            if name in numbers:
                states[numbers[name]][key] = value
        for shard in values:
            key, name = moments.split(shard.name.removeprefix(OPTIMIZER))
            if key.startswith(OPTIONS):
                given[f"{key}/{name}"] = shard.tensor
            else:
                x = self.steps.held[numbers[name]]
                value = shard.tensor
                if shard.shape == tuple(x.shape):  # a moment
                    value = x.part_of(value) if shard.is_whole else value.view(x.held_shape)
                states[numbers[name]][key] = value
        self.steps.load(states, list(_saved_groups(self.optimizer, given, options)))
        for number, state in states.items():
            moments.keep_dtypes(self.steps.state_of(self.steps.held[number]), state)

    def _firsts_in(self, source: Source) -> dict[str, str]:
        """What ``source`` calls each tensor of the state dict, which may be tied here, there, or in both."""
        if not isinstance(source.ties, Mapping) or not all(isinstance(x, str) for x in source.ties.values()):
            raise CheckpointRejected(
                f"expected names tied to names, got {repr(source.ties)[:80]}: take another checkpoint"
            )
        ties, there = self.ties(), source.layout(MODEL)
        names: dict[str, list[str]] = {}
        for name in module_state.divided(self.module, self._away)[0]:
            names.setdefault(ties.get(name, name), []).append(name)
        found: dict[str, str] = {}
        for same in names.values():
            known = (*same, *(source.ties[name] for name in same if name in source.ties))
            found |= dict.fromkeys(same, next((name for name in known if name in there), same[0]))
        return found

    def _require_model(self, source: Source, firsts: Mapping[str, str]) -> None:
        found, (own, beside) = dict(source.layout(MODEL)), module_state.divided(self.module, self._away)
        expected = {name: (tuple(shape_of(x)), x.dtype) for name, x in own.items()}
        for value in beside:
            stored = [found.pop(name) for name in module_state.names_of(value, list(found))]
            if not stored:
                expected[value] = ((), torch.uint8)  # of which it is said to be missing
        tensors.require_layout(found, expected, {**dict.fromkeys(beside, ""), **firsts})

    def _require_optimizer(self, options: Json, layout: Layout) -> None:
        """CheckpointRejected unless the optimizer has the saved class, groups, parameter names, kinds of
        options, and moments of these shapes."""
        assert self.optimizer is not None and self.steps is not None
        names = _parameter_names(self.module, self.optimizer)
        if not _is_saved_optimizer(options):
            raise CheckpointRejected(
                "expected class, groups and scalars of an optimizer: take another checkpoint"
            )
        if _classes(self.steps) != options["class"]:
            raise CheckpointRejected(
                f"expected the optimizer of the checkpoint, {options['class'][:80]}, got "
                f"{_classes(self.steps)}: build that one, or load without an optimizer"
            )
        saved = [set(group["parameters"]) for group in options["groups"]]
        now = [{names[p] for p in group["params"]} for group in self.optimizer.param_groups]
        if len(saved) != len(now):
            raise CheckpointRejected(
                f"expected {len(saved)} parameter groups, got {len(now)}: build the saved ones"
            )
        for index, (before, after) in enumerate(zip(saved, now, strict=True)):
            if before != after:
                first = min(before ^ after)
                side = "the checkpoint" if first in before else "this optimizer"
                raise CheckpointRejected(
                    f"parameter group {index}: expected {len(before)} parameters, got {len(after)}: only "
                    f"{side} has {first!r}: build the groups that the checkpoint was made with"
                )
            group = self.optimizer.param_groups[index]
            _require_options(index, group, options["groups"][index]["options"])
        parameters = {name: parameter for parameter, name in names.items()}
        by_group = [local for local in self.steps.locals for _ in local.param_groups]
        moments.require_sound(by_group, now, parameters, layout, options["scalars"])


def merged(options: Sequence[Json]) -> Json:
    """What of the optimizer is no tensor, from what each rank says; None without one.

    Raises:
        CheckpointRejected: it is not what ``TrainingState.options`` says.
    """
    if all(each is None for each in options):
        return None
    if not all(map(_is_saved_optimizer, options)):
        raise CheckpointRejected(
            "expected class, groups and scalars of an optimizer from every rank: take another checkpoint"
        )
    scalars = {name: value for each in options for name, value in each["scalars"].items()}
    return {**options[0], "scalars": {name: scalars[name] for name in sorted(scalars)}}


def _read(source: Source, shard: Shard, firsts: Mapping[str, str]) -> Shard:
    """``shard`` with the values that ``source`` has for it, by the name that it has there."""
    name = shard.name
    if name.startswith(MODEL):
        name = MODEL + firsts[name.removeprefix(MODEL)]
    flat = source.read(name, shard.first, shard.last, shard.box)
    shape = held_shape(shard.shape, shard.first, shard.last, shard.box)
    return shard._replace(dtype=flat.dtype, tensor=flat.view(shape))


def _values(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Those of the model, by name."""
    return {x.name.removeprefix(MODEL): x.tensor for x in shards if x.name.startswith(MODEL)}


def _alone(group: Group) -> Group:
    """This rank, without the others of ``group``."""
    return group if group.size == 1 else alone(group.global_rank, group.timeout_s)


def _optimizer_groups(model: nn.Module, optimizer: Optimizer | JoinedOptimizers) -> list[Json]:
    """The groups with their parameters' names and all options that are no tensors."""
    names = _parameter_names(model, optimizer)
    return [
        {
            "parameters": [names[p] for p in group["params"]],
            "options": {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)},
        }
        for group in optimizer.param_groups
    ]


def _parameter_names(model: nn.Module, optimizer: Optimizer | JoinedOptimizers) -> dict[Tensor, str]:
    """The name of each parameter of the optimizer, in the optimizer's order."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in owned:
        if parameter not in names:
            raise ValueError(
                f"expected an optimizer of this model's parameters, got one of shape {list(parameter.shape)} "
                "that the model does not have: pass the model that the optimizer was made for"
            )
    return {parameter: names[parameter] for parameter in owned}


def _require_state_by_parameter(optimizer: Optimizer) -> None:
    """ValueError if it keeps something that belongs to no parameter, which nothing here would carry."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    other: Any = next((key for key in optimizer.state if id(key) not in known), None)
    if other is None and type(optimizer).state_dict is not Optimizer.state_dict:
        other = next((key for key in optimizer.state_dict() if key not in ("state", "param_groups")), None)
    if other is not None:
        what = f"a tensor of shape {list(other.shape)}" if isinstance(other, Tensor) else repr(other)
        raise ValueError(
            f"{type(optimizer).__name__} keeps state under {what}, which is none of its parameters, and "
            "would be lost: keep it in a parameter's state, or in an object of its own with state_dict() and "
            "load_state_dict(), and save that too"
        )


def _plain(key: str) -> str:
    if "/" in key:
        raise ValueError(f"expected a name of optimizer state without a slash, got {key!r}")
    return key


def _option(index: int, key: str) -> str:
    return f"param_groups.{index}/{key}"


def _require_options(index: int, current: Mapping[str, object], saved: Mapping[str, Json]) -> None:
    """Options that are set now must have been of their kind; those a scheduler adds may be any."""
    for key, value in saved.items():
        if key in current and not _same_kind(current[key], value):
            raise CheckpointRejected(
                f"parameter group {index}: {key}: expected something like {current[key]!r}, got "
                f"{repr(value)[:80]}: not a state of this optimizer"
            )


def _same_kind(current: object, saved: Json) -> bool:
    if isinstance(current, tuple):
        pairs = isinstance(saved, list | tuple) and len(saved) == len(current)
        return pairs and all(map(_same_kind, current, saved))
    if isinstance(current, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(current, int | float | Tensor):
        return isinstance(saved, int | float) and abs(saved) <= MAX_NUMBER
    if current is None:  # a flag or a number that is left to torch
        return saved is None or isinstance(saved, int | float)
    return isinstance(saved, type(current))


def _classes(steps: DividedOptimizer) -> str:
    """The class of each optimizer, in the order of the groups."""
    return ", ".join(type(local).__name__ for local in steps.locals)


def _is_saved_optimizer(rest: Json) -> bool:
    kinds, found = {"class": str, "groups": list, "scalars": dict}, {}
    if isinstance(rest, dict):
        found = {key: type(value) for key, value in rest.items()}
    if not kinds.items() <= found.items() <= (kinds | BESIDE).items():
        return False
    return all(
        isinstance(group, dict)
        and {key: type(value) for key, value in group.items()} == {"parameters": list, "options": dict}
        and all(isinstance(name, str) for name in group["parameters"])
        for group in rest["groups"]
    )


def _saved_groups(
    optimizer: Optimizer | JoinedOptimizers, tensors: Mapping[str, Tensor], rest: Json
) -> Iterator[dict[str, Json]]:
    """The saved groups in the form that ``load_state_dict`` reads, over this optimizer's parameters."""
    first = 0
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, rest["groups"], strict=True)):
        options = {key: _like(group.get(key), value) for key, value in saved["options"].items()}
        prefix = _option(index, "")
        options |= {full.removeprefix(prefix): t for full, t in tensors.items() if full.startswith(prefix)}
        count = len(group["params"])
        yield {**group, **options, "params": list(range(first, first + count))}
        first += count


def _like(current: object, saved: Json) -> Json:
    """JSON knows lists only; a tuple, as ``betas`` is one, becomes a tuple again."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved
