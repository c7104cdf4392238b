"""The state of training as this rank holds it: all registered objects as shards and JSON, and back.

torch numbers an optimizer's parameters in the order of its groups, so a state saved by index goes to the
wrong parameters, without an error, after layers changed places. Here everything goes by the parameter's name:

    shards    "model:block.0.weight", "optimizer:exp_avg/block.0.weight", "object:ema/shadow/w", and, where a
              hyper-parameter is a tensor, "optimizer:param_groups.0/lr"
    JSON      {"class": "AdamW", "groups": [{"parameters": [...], "options": {"lr": 0.001, ...}}],
               "scalars": {"key/block.0.weight": ...}, "objects": {"plan": {"last_epoch": 7, ...}},
               "declared_steps": {"model": 7}}

It is the same object whether the state is divided or not: where every rank has all of it, the shards are
whole tensors that all ranks hold, and the group that has to come together for it is this rank alone.

One idea in one file, though long: what is read here has to be what was written here, field by field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.checkpoint import module_state, saved_optimizers, tensors
from instep.checkpoint.listed import Listed, modules
from instep.checkpoint.manifest import Json, require_json
from instep.errors import CheckpointRejected
from instep.net.process_group import Group, alone
from instep.shard.fully import gathered
from instep.state.hash import tensor_digest
from instep.state.homes import (
    DividedOptimizer,
    Home,
    ParameterShard,
    holders,
    home,
    homes,
    joined,
    outermost,
    shape_of,
)
from instep.state.objects import put_together, tensors_of
from instep.state.shards import MODEL, OBJECT, OPTIMIZER, Order, Shard, held_shape, owned
from instep.state.stored import Source

if TYPE_CHECKING:
    from instep.checkpoint.registered import Registered

AFTER_ALL = 1 << 40  # places in the hash: parameters, buffers and moments come before tensors of objects


class TrainingState:
    """What all that is ``registered`` carries from step to step.

    ``everyone`` are the ranks that train together, by default those that the models are wrapped for;
    ``group`` those that have to come together for all of the state: everyone where it is divided
    (``is_divided``), else this rank alone. ``is_for_use``: models alone, to be read from any state.

    It may be kept while the parameters, the optimizers' groups and the wrappers stay the same; values and
    moments are looked at anew in each call.
    """

    def __init__(self, registered: Registered, group: Group | None = None) -> None:
        self.module, self.is_for_use = registered.root, False
        self.optimizers = list(registered.optimizers.values())
        self._registered = registered
        self._parameters = dict(self.module.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._homes: list[Home] = homes(self._parameters.values())
        self._places = {name: place for place, name in enumerate(registered.others, start=AFTER_ALL)}
        self._stepping: dict[int, tuple[int, ...]] = {}  # which ranks, by the identity of a parameter
        self.steps: DividedOptimizer = joined(self.optimizers)
        divided = [its for its in (self.steps.group, *(x.group for x in self._homes)) if its.size > 1]
        shard_group = max(divided, key=lambda found: found.size, default=None)
        self.everyone = self._find_everyone(group, shard_group)
        self.is_divided = shard_group is not None
        self.group = self.everyone if self.is_divided else _alone(self.everyone)
        self._every = tuple(range(self.everyone.size))
        self._listed = Listed(self.module, list(self._parameters.values()), self._homes, self.steps)

    def _find_everyone(self, group: Group | None, shard_group: Group | None) -> Group:
        group = group or next((wrapped.group for wrapped in self._registered.wrapped()), None)
        if group is None:
            group = max((x.everyone for x in self._homes), key=lambda x: x.size, default=None)
        if shard_group is not None and (group is None or group.size <= shard_group.size):
            return shard_group
        return group or alone()

    def require_all_replicas(self) -> None:
        """Raise ``ValueError`` where this rank knows of one shard group of several, which all would write."""
        if self.steps.num_replicas > 1 and self.is_divided and self.everyone.size == self.steps.group.size:
            raise ValueError(
                f"{self.steps.num_replicas} shard groups of {self.steps.group.size} ranks have the "
                "optimizer's state, and the module does not know that the others exist: pass the "
                "DataParallel that wraps it"
            )

    def shards(self) -> list[Shard]:
        """What this rank holds: live memory, without communication.

        Parameters, persistent buffers, moments and tensors of objects in the order of the hash, then what
        else a state dict has, and options of optimizers that are tensors. What is one number for a parameter
        (a count of steps) is with every shard of it.

        Raises:
            ValueError: the module keeps something that is neither data nor a tensor, or changes a shard.
        """
        return [*self.hashed(), *self.beside(), *self._options()]

    def hashed(self) -> list[Shard]:
        """Of what this rank holds, what the state's hash is over, in its order."""
        found = self._registered.object_tensors()
        return [*self._listed.get(self._list), *(self._of_object(x, found[x]) for x in self._ordered(found))]

    def _list(self) -> list[Shard]:
        buffers = module_state.buffers(self.module)
        return [*self._model(buffers), *self._moments(len(self._parameters) + len(buffers))]

    def has_values(self, shard: Shard) -> bool:
        """Whether ``shard`` has any: what belongs to a parameter that is still to be filled has none."""
        p = self._parameters.get(self._parameter_of(shard) or "")
        return p is None or (there := home(p)) is None or there.has_values

    @property
    def goes_with_its_group(self) -> bool:
        """Whether some of it is gone, on a rank alone too, when wrappers and optimizers leave their group."""
        return any(not there.resident for there in self._homes) or bool(self.steps.homes)

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
            return (
                None if shard.order is None else saved_optimizers.split(shard.name.removeprefix(OPTIMIZER))[1]
            )
        name = shard.name.removeprefix(MODEL)
        return name if name in self._parameters else None

    def frozen(self) -> list[str]:
        """The parameters that were never trained, whose values the script builds.

        Frozen ones, but those that an optimizer has stepped, or that were trainable when they were wrapped.
        """
        trained = {id(x.parameter) for x in self.steps.held.values() if self.steps.state_of(x)}
        for reduction in (r for said in self._registered.wrapped() for r in said.reductions.values()):
            trained |= {*map(id, reduction.parameters), *map(id, reduction.optimizer_parameters)}
        return [name for name, p in self._parameters.items() if not p.requires_grad and id(p) not in trained]

    def options(self) -> Json:
        """What of it is no tensor, as this rank knows it (see ``merged``).

        Raises:
            ValueError: JSON cannot carry it.
        """
        for local in self.steps.locals:
            saved_optimizers.require_by_parameter(local)
        found = {
            "class": saved_optimizers.classes(self.steps),
            "groups": [saved_optimizers.group_to_json(group, self._names) for group in self._groups],
            "scalars": {
                f"{saved_optimizers.plain(key)}/{self._names[id(x.parameter)]}": value
                for x in self.steps.held.values()
                for key, value in self.steps.state_of(x).items()
                if not isinstance(value, Tensor)
            },
            "objects": self._registered.objects_to_json(),
            "declared_steps": self._registered.declared_steps(),
        }
        require_json("state", found)
        return found

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, as they are now."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

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
            CheckpointRejected: it is of other models, optimizers or objects, or cannot be read.
        """
        saved_optimizers.require_form(options)
        bodies = {} if self.is_for_use else self._require_objects(source, options)
        firsts = self._firsts_in(source)
        self._require_model(source, firsts)
        if self.optimizers:
            saved_optimizers.require_saved(
                self.steps, self._groups, self._parameters, self._names, options, source.layout(OPTIMIZER)
            )
        buffers = module_state.buffers(self.module)
        wanted = list(self._model(buffers))
        if self.optimizers:
            wanted += self._moments_in(source, len(self._parameters) + len(buffers))
        found = [
            *(x if self._is_left_out(source, x) else _read(source, x, firsts) for x in wanted),
            *self._beside_in(source),
        ]
        names = [full.removeprefix(OBJECT) for full in source.tensors if bodies and full.startswith(OBJECT)]
        values = {name: source.read_whole(OBJECT + name) for name in names}
        # Or it is rejected before any change.
        self._given(_values(found))
        for name, body in bodies.items():
            put_together(name, body, values)
        return [*found, *(self._of_object(name, values[name]) for name in self._ordered(values))]

    def _is_left_out(self, source: Source, shard: Shard) -> bool:
        """Whether ``source`` was saved without ``shard``, a frozen weight: the model keeps its own."""
        if not shard.name.startswith(MODEL) or shard.name.removeprefix(MODEL) not in source.frozen:
            return False
        if not self.has_values(shard):
            raise CheckpointRejected(
                "it was saved without frozen weights, and those of the model went with the group of a lost "
                "rank: start the run again, with --resume"
            )
        return True

    def is_all_of(self, options: Json) -> bool:
        """Whether a state that was saved with ``options`` is no more than this one: its hash is over this.

        What is read to go on from is all of it: ``read`` refuses what is more than this.
        """
        saved_optimizers.require_form(options)
        return not (self.is_for_use and (options["groups"] or options["objects"]))

    def put(self, values: Sequence[Shard], options: Json) -> None:
        """Take over what ``read`` has given, in place: models, optimizers, then each object, in the order of
        registration. Collective over ``group``."""
        self._put_model(_values(values))
        if self.optimizers:
            self._put_optimizers([x for x in values if x.name.startswith(OPTIMIZER)], options)
        self.group.barrier("the loading of a state")
        given = {x.name.removeprefix(OBJECT): x.tensor for x in values if x.name.startswith(OBJECT)}
        live = self._registered.object_tensors()
        for name, x in self._registered.others.items():
            body = options["objects"][name]
            found = {
                full: given[full].to(live[full].device if full in live else self._device(kind))
                for full, kind in tensors_of(body)
            }
            try:
                x.load_state_dict(put_together(name, body, found))
            except Exception as error:
                error.add_note(f"in load_state_dict() of the registered object {name!r}")
                raise

    def resume_at(self, step: int, options: Json) -> None:
        """Random numbers are keyed by the number of a declared step: count on from where a state with
        ``options`` was saved, or from ``step`` where nothing counted."""
        counters, counted = self._registered.counters(), options["declared_steps"]
        if len(counters) == len(counted) == 1:
            counted = dict.fromkeys(counters, *counted.values())
        for name, counter in counters.items():
            counter.next_step = counted.get(name, step)

    def settled(self) -> None:
        """All ranks have compared the hash of this state. Of a divided one that is each shard once, and not
        what several shard groups hold alike."""
        for wrapped in self._registered.wrapped():
            if not self.is_divided:
                wrapped.settled()

    def _model(self, buffers: Mapping[str, Tensor]) -> Iterator[Shard]:
        held = {id(x.parameter): x for there in self._homes for x in there.held}
        for place, (name, p) in enumerate(self._parameters.items()):
            there = home(p) if self._homes else None
            if there is None or there.resident:
                yield Shard.whole(MODEL + name, p, self._every, (place, ""))
            elif (x := held.get(id(p))) is not None:
                yield self._of_parameter(MODEL + name, x, x.in_state(x.tensor.detach()), (place, ""), there)
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
        return holders(there, parameter, self.everyone, same=False)

    def _moments(self, first: int) -> Iterator[Shard]:
        kept = {self._names[id(x.parameter)]: x for x in self.steps.held.values()}
        for place, name in enumerate(self._parameters, start=first):
            if (x := kept.get(name)) is None:
                continue
            state = self.steps.state_of(x)
            for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                full = f"{OPTIMIZER}{saved_optimizers.plain(key)}/{name}"
                yield self._moment(full, x, state[key], (place, key))

    def _moments_in(self, source: Source, first: int) -> Iterator[Shard]:
        """What is to be here of the moments and tensor options in ``source``; without values."""
        kept = {self._names[id(x.parameter)]: x for x in self.steps.held.values()}
        places = {name: place for place, name in enumerate(self._parameters, start=first)}
        unstepped = {n for n, p in self._parameters.items() if not (p.requires_grad or self._stepped_in(p))}
        for full, stored in source.tensors.items():
            if not full.startswith(OPTIMIZER):
                continue
            key, name = saved_optimizers.split(full.removeprefix(OPTIMIZER))
            nothing = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            if key.startswith(saved_optimizers.OPTIONS):
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
            return self._of_parameter(full, x, x.in_state(value), order, self._stepped_in(x.parameter))
        return Shard.whole(full, value, self._holders(x.parameter), order)

    def _stepped_in(self, parameter: Tensor) -> Home | None:
        """The home whose ranks step parts of ``parameter``; None where all step all of it."""
        return self._step_homes.get(id(parameter))

    @cached_property
    def _step_homes(self) -> dict[int, Home]:
        """By the identity of a parameter; of two, that which an optimizer has made of the one it lives in."""
        every = [(p, there) for there in self.steps.homes for p in there.parameters]
        return {id(p): there for p, there in sorted(every, key=lambda x: home(x[0]) is not x[1])}

    def _of_parameter(
        self, name: str, x: ParameterShard, value: Tensor, order: Order, there: Home | None
    ) -> Shard:
        """``value``, which has the shape of ``x``, as that part of a tensor like the parameter."""
        assert there is not None
        have = holders(there, x.parameter, self.everyone, same=True)
        shape = tuple(x.shape)
        return Shard(name, shape, value.dtype, x.first, x.last, order, x.box, value, have)

    def _holders(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks of everyone that step some of ``parameter``."""
        if id(parameter) not in self._stepping:
            there = self._stepped_in(parameter)
            self._stepping[id(parameter)] = (
                self._every if there is None else holders(there, parameter, self.everyone, same=False)
            )
        return self._stepping[id(parameter)]

    def _options(self) -> Iterator[Shard]:
        for index, group in enumerate(self._groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield Shard.whole(
                        OPTIMIZER + saved_optimizers.option(index, key), value, self._every, None
                    )

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

    def _put_optimizers(self, values: Sequence[Shard], options: Json) -> None:
        """Options come from the saved state too, as in ``Optimizer.load_state_dict``; moments keep the dtype
        they were saved in, where torch would cast them to that of the parameter."""
        numbers = {self._names[id(x.parameter)]: i for i, x in self.steps.held.items()}
        states: dict[int, dict[str, Any]] = {i: {} for i in self.steps.held}
        given: dict[str, Tensor] = {}
        for full, value in options["scalars"].items():
            key, name = saved_optimizers.split(full)
            if name in numbers:
                states[numbers[name]][key] = value
        for shard in values:
            key, name = saved_optimizers.split(shard.name.removeprefix(OPTIMIZER))
            if key.startswith(saved_optimizers.OPTIONS):
                given[f"{key}/{name}"] = shard.tensor
            else:
                x = self.steps.held[numbers[name]]
                value = shard.tensor
                if shard.shape == tuple(x.shape):  # a moment
                    value = x.part_of(value) if shard.is_whole else value.view(x.held_shape)
                states[numbers[name]][key] = value
        self.steps.load(states, list(saved_optimizers.saved_groups(self._groups, given, options)))
        for number, state in states.items():
            saved_optimizers.keep_dtypes(self.steps.state_of(self.steps.held[number]), state)

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
        if unknown := sorted(source.frozen.keys() - self._parameters.keys()):
            raise CheckpointRejected(
                f"it was saved without {len(source.frozen)} frozen weights, and this model has no "
                f"{unknown[0][:80]!r}: build the model that the checkpoint was made with"
            )
        for name in [name for name in expected if self.ties().get(name, name) in source.frozen]:
            del expected[name]
        for value in beside:
            stored = [found.pop(name) for name in module_state.names_of(value, list(found))]
            if not stored:
                expected[value] = ((), torch.uint8)  # of which it is said to be missing
        tensors.require_layout(found, expected, {**dict.fromkeys(beside, ""), **firsts})

    def _require_objects(self, source: Source, options: Json) -> dict[str, Json]:
        """The JSON of each object, or CheckpointRejected if this is a state of others."""
        bodies = options["objects"]
        _require_names(bodies, self._registered.others)
        if options["groups"] and not self.optimizers:
            raise CheckpointRejected(
                f"the saved state has an optimizer ({options['class'][:80]}), and none is given: pass "
                "optimizer=..., or only the models, to use them"
            )
        try:
            require_json("the state of registered objects", bodies)  # which bounds its depth
        except ValueError as error:
            raise CheckpointRejected(f"{error}: take another checkpoint") from error
        needed = {full for body in bodies.values() for full, _ in tensors_of(body)}
        there = {full.removeprefix(OBJECT) for full in source.tensors if full.startswith(OBJECT)}
        if needed != there:
            raise CheckpointRejected(
                f"tensors of registered objects: expected those that their state names, got other ones: "
                f"{min(needed ^ there)[:80]!r} is in one of the two: take another checkpoint"
            )
        return dict(bodies)

    def _of_object(self, name: str, x: Tensor) -> Shard:
        return Shard.whole(OBJECT + name, x, self._every, (self._place(name), name))

    def _place(self, name: str) -> int:
        """That of the object in the hash, of which ``name`` is a tensor."""
        return self._places[name.partition("/")[0]]

    def _ordered(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self._place(name), name))

    def mark(self) -> StateMark:
        """Another one after this state has been written to on this rank. No communication.

        For whether a step that was broken off has left all as it was: that a survivor has made one of two
        updates shows here. Optimizers are seen by their steps, as fused ones write past torch's count of
        writes; options by their values; all other tensors by that count, and by where they lie, so what an
        object makes anew whenever it is asked has always changed; what modules keep beside, by its values.
        Writes to ``.data`` stay unseen.
        """
        buffers = {
            id(x): x for owner in modules(self.module) for x in owner._buffers.values() if x is not None
        }
        live = [x for x in (*self._parameters.values(), *buffers.values()) if id(x) not in self._away]
        sliced = (x.tensor for there in self._homes for x in there.held)
        options = [(key, value) for group in self._groups for key, value in group.items() if key != "params"]
        found = [*live, *sliced, *self._registered.object_tensors().values()]
        found += [value for _, value in options if isinstance(value, Tensor)]
        plain = repr([option for option in options if not isinstance(option[1], Tensor)])
        updates = sorted(self._registered.num_updates.items())
        beside = [(x.name, tensor_digest(x.tensor)) for x in self.beside()]
        return StateMark((self._registered.digest(), plain, updates, beside), found)


class StateMark:
    """What a state was at a moment: equal to another of the same tensors, none of them written to since."""

    def __init__(self, known: Any, tensors: Sequence[Tensor]) -> None:
        self._kept = tensors  # so that nothing else comes to lie where they do
        self._known = known, [(x.data_ptr(), x._version) for x in tensors]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateMark) and self._known == other._known

    __hash__ = None  # type: ignore[assignment]


def merged(options: Sequence[Json]) -> Json:
    """What of the state is no tensor, from what each rank says.

    Raises:
        CheckpointRejected: it is not what ``TrainingState.options`` says.
    """
    for each in options:
        saved_optimizers.require_form(each)
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


def _require_names(saved: Json, now: Mapping[str, object]) -> None:
    if isinstance(saved, dict) and set(saved) == set(now):
        return
    names = sorted(saved) if isinstance(saved, dict) else []
    missing = ", ".join(repr(name[:80]) for name in names if name not in now)
    more = ", ".join(repr(name) for name in now if name not in names)
    said = [f"it has {missing}, which is not given"] * bool(missing)
    said += [f"{more} is given, which it does not have"] * bool(more)
    raise CheckpointRejected(
        f"the saved state has different objects: {'; '.join(said)}: pass the same objects under the same "
        "names, or only the models, to use them"
    )
