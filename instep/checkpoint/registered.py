"""Several models, several optimizers and any objects with a ``state_dict`` as one state of training.

    Registered({"generator": DataParallel, "critic": DataParallel, "g": AdamW, "c": Adam, "plan": StepLR})

    shards    "model:generator.net.0.weight", "optimizer:exp_avg/critic.net.0.weight", "object:ema/shadow/w"
    JSON      {"class": "AdamW, Adam", "groups": [those of g, those of c], "scalars": {...},
               "objects": {"plan": {"last_epoch": 7, ...}}, "declared_steps": {"generator": 7, "critic": 7}}

Models and optimizers are sorted by what they are; all else must have ``state_dict`` and ``load_state_dict``.
A model alone keeps its own names, as in a checkpoint of ``instep.save``; of several each name begins with the
one that the model is registered by, as if one module held them all. That module is made for the names alone:
nothing of the user's is changed.

``RegisteredState`` is a ``TrainingState``: what saves, sends, hashes or compares one has all of this with it,
in its shards and its ``options()``, and ``read`` and ``put`` bring all of it back.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint.listed import Listed, modules
from instep.checkpoint.manifest import Json, canonical, require_json
from instep.checkpoint.module_state import divided, to_tensors
from instep.checkpoint.state import TrainingState
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group, alone
from instep.reduce.owners import owner_of
from instep.state.hash import tensor_digest
from instep.state.homes import (
    JoinedOptimizers,
    Wrapped,
    homes,
    not_compiled,
    offered,
    outermost,
    unwrapped,
)
from instep.state.objects import put_together, take_apart, tensors_of
from instep.state.shards import OBJECT, Shard
from instep.state.stored import Source
from instep.step.optimizer_guard import require_every_rank_steps

AFTER_ALL = 1 << 40  # places in the hash: parameters, buffers and moments come before
NO_OPTIMIZER = "none"  # in the place of its class
DIGITS = 16  # hexadecimal, of a digest that need not withstand an adversary


class Registered:
    """``objects`` by name, sorted into ``models``, ``optimizers`` and ``others``, in the order given.

    At construction all is looked at that can be refused: before anything is trained. ``state`` describes them
    as they are now, so it is called again when a wrapper has been given another group.

    Raises:
        ValueError: two names for one object; an object that is none of the three; a parameter in two
            optimizers, or in no model; the state of an object that is neither data nor tensors.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.num_updates: Counter[str] = Counter()  # of each optimizer, since ``count_updates``
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that step nothing of this
        known: dict[int, str] = {}
        for name, x in objects.items():
            _require_name(name)
            if known.setdefault(id(x), name) != name:
                raise ValueError(f"{known[id(x)]!r} and {name!r} are one object: name it once")
            if isinstance(x, Optimizer):
                self.optimizers[name] = x
            elif isinstance(x, nn.Module) or isinstance(offered(x), Wrapped):
                self.models[name] = not_compiled(x)
            else:
                _require_stateful(name, x)
                self.others[name] = x
        self._require_one_owner()
        for name, x in self.others.items():
            take_apart(name, x.state_dict())
        for module in self.modules().values():
            to_tensors(divided(module)[1])

    def count_updates(self) -> None:
        """For a run: from now on ``num_updates`` counts the steps of each optimizer that have begun.

        Raises:
            ValueError: one rank alone steps the weights.
        """
        require_every_rank_steps([p for module in self.modules().values() for p in module.parameters()])
        for name, optimizer in self.optimizers.items():
            hook = optimizer.register_step_pre_hook(partial(_count, weakref.ref(self), name))
            weakref.finalize(self, hook.remove)

    def state(self, group: Group | None = None) -> RegisteredState:
        """All of it as one state, for as long as wrappers, parameters and groups stay the same.

        ``group``: the ranks that train together, by default those that the models are wrapped for.

        Raises:
            ValueError: models are trained by different ranks, or divided among different ones.
        """
        self._require_one_owner()
        self._require_one_group(group)
        return RegisteredState(self, group)

    @property
    def root(self) -> nn.Module:
        """All models as one module, with the names that the state has."""
        modules = list(self.modules().values())
        return modules[0] if len(modules) == 1 else NamedModels(self)

    def cursor(self, default: int) -> int:
        """The position of the first loader; ``default`` if there is none."""
        return next((int(x.position) for x in self.loaders.values()), default)

    @property
    def loaders(self) -> dict[str, Any]:
        """Those of the other objects that deal samples out to declared steps (``DataSource``)."""
        return {name: x for name, x in self.others.items() if hasattr(x, "num_micro_batches")}

    def leave(self) -> None:
        """All give their groups back, without waiting for any rank."""
        for optimizer in self.optimizers.values():
            if (divided := offered(optimizer)) is not None:
                divided.leave()
        for said in self._wrapped():
            said.leave()

    def join(self, mesh: Mesh) -> None:
        """All take part in ``mesh``, after ``leave``. Collective over it."""
        for said in self._wrapped():
            said.join(mesh)
        for optimizer in self.optimizers.values():
            if (divided := offered(optimizer)) is not None:
                divided.join(mesh)

    def fill(self) -> None:
        """Models from the meta device get their first values. Collective over their mesh."""
        for said in self._wrapped():
            said.fill()

    def _wrapped(self) -> list[Wrapped]:
        found = (offered(model) for model in self.models.values())
        return [said for said in found if isinstance(said, Wrapped)]

    def objects_to_json(self) -> Json:
        """What of the other objects is no tensor, by name."""
        return {name: take_apart(name, x.state_dict())[0] for name, x in self.others.items()}

    def object_tensors(self) -> dict[str, Tensor]:
        """The live tensors of the other objects, by the object's name and their path in its state."""
        found: dict[str, Tensor] = {}
        for name, x in self.others.items():
            found |= take_apart(name, x.state_dict())[1]
        return found

    def declared_steps(self) -> dict[str, int]:
        """How many each model has made, where its wrapper counts them."""
        return {name: counter.next_step for name, counter in self.counters().items()}

    def counters(self) -> dict[str, Any]:
        """What counts the declared steps of each model, where something does."""
        found = ((name, offered(model)) for name, model in self.models.items())
        return {name: x.counter for name, x in found if isinstance(x, Wrapped) and x.counter is not None}

    def digest(self) -> str:
        """Of what is neither in a model nor in an optimizer, nor a tensor: whether it is as it was."""
        found = [self.objects_to_json(), self.declared_steps()]
        return hashlib.sha256(canonical(found)).hexdigest()[:DIGITS]

    def require_registered(self, optimizer: Optimizer) -> None:
        """To be asked when ``optimizer`` steps: what it steps is saved, and so must its moments be.

        Raises:
            ValueError: it steps a parameter of a registered model, and is not registered.
        """
        if optimizer in self._strangers or any(optimizer is known for known in self.optimizers.values()):
            return
        names = self._parameter_names()
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        first = next((names[id(p)] for p in stepped if id(p) in names), None)
        if first is not None:
            raise ValueError(
                f"{type(optimizer).__name__} steps {first!r} of a registered model, and is not registered: "
                "what it keeps would be lost with a rank: register it too, by a name of its own"
            )
        self._strangers.add(optimizer)

    def modules(self) -> dict[str, nn.Module]:
        """The models without their wrappers, as they are named."""
        found = {name: offered(model) for name, model in self.models.items()}
        return {
            name: found[name].module if isinstance(found[name], Wrapped) else unwrapped(model)
            for name, model in self.models.items()
        }

    def _parameter_names(self) -> dict[int, str]:
        """As in the state, by the identity of the parameter."""
        names: dict[int, str] = {}
        for name, module in self.modules().items():
            prefix = f"{name}." if len(self.models) > 1 else ""
            for own, p in module.named_parameters():
                names.setdefault(id(p), prefix + own)
        return names

    def _require_one_owner(self) -> None:
        """Each parameter of an optimizer is in a model, and in no other optimizer."""
        names = self._parameter_names()
        owners: dict[int, str] = {}
        for name, optimizer in self.optimizers.items():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if id(p) not in names:
                    raise ValueError(
                        f"the optimizer {name!r} has a parameter of shape {list(p.shape)} that is in none of "
                        f"the registered models ({', '.join(self.models) or 'there are none'}): register its "
                        "model too, or make the optimizer from the parameters of one that is registered"
                    )
                if owners.setdefault(id(p), name) != name:
                    raise ValueError(
                        f"the parameter {names[id(p)]!r} is in two optimizers, {owners[id(p)]!r} and "
                        f"{name!r}: leave it out of one"
                    )

    def require_wrappers(self) -> None:
        """What trains is the wrapper, not its module: the wrapper counts the declared steps.

        Raises:
            ValueError: a module is given, with an optimizer, that a wrapper trains which is not given.
        """
        if not self.optimizers:
            return
        known = {id(p) for said in self._wrapped() for p in said.module.parameters()}
        for name, module in self.modules().items():
            owners = [owner_of(p) for p in module.parameters() if id(p) not in known]
            if any(x is not None and x.reduces for x in owners):
                raise ValueError(
                    f"{name!r} is not the wrapper that trains it, which counts the steps that key random "
                    f"numbers: pass {name}=model, as DataParallel returned it, or the module given to "
                    "fully_shard"
                )

    def _require_one_group(self, group: Group | None) -> None:
        """All ranks train all models, and what is divided is divided among the same ranks."""
        trained = [] if group is None else [("the run", group)]
        divided: list[tuple[str, Group]] = []
        for name, model in self.models.items():
            said, module = offered(model), self.modules()[name]
            lived_in = homes(module.parameters())
            trained += [(repr(name), said.group)] if isinstance(said, Wrapped) else []
            divided += [(repr(name), there.group) for there in lived_in if there.group.size > 1]
        for name, optimizer in self.optimizers.items():
            part = offered(optimizer)
            lived_in = [] if part is None else list(map(outermost, part.homes))
            divided += [(repr(name), there.group) for there in lived_in if there.group.size > 1]
        _require_same_ranks(trained, "is trained by", "wrap all models for the same ranks")
        _require_same_ranks(divided, "is divided among", "shard all over the same ranks")


class NamedModels(nn.Module):
    """Several models, each under its name: for their names alone, it is never called."""

    def __init__(self, registered: Registered) -> None:
        super().__init__()
        self._modules.update(registered.modules())  # so that a name may be that of a method of modules
        found = {name: offered(model) for name, model in registered.models.items()}
        self._wrapped = {name: said for name, said in found.items() if isinstance(said, Wrapped)}

    def __instep_state__(self) -> Wrapped:
        wrapped = list(self._wrapped.values())
        lived_in = (there.everyone for there in homes(self.parameters()))
        group = wrapped[0].group if wrapped else max(lived_in, key=lambda its: its.size, default=alone())

        def settled() -> None:
            for said in wrapped:
                said.settled()

        def leave() -> None:
            for said in wrapped:
                said.leave()

        def join(mesh: Mesh) -> None:
            for said in wrapped:
                said.join(mesh)

        def fill() -> None:
            for said in wrapped:
                said.fill()

        return Wrapped(
            module=self,
            group=group,
            gradients=lambda: [x for said in wrapped for x in said.gradients()],
            scratch=lambda: [x for said in wrapped for x in said.scratch()],
            counter=None,  # each has its own
            leave=leave,
            join=join,
            settled=settled,
            fill=fill,
        )


class StateMark:
    """What a state was at a moment: equal to another of the same tensors, none of them written to since."""

    def __init__(self, known: Any, tensors: Sequence[Tensor]) -> None:
        self._kept = tensors  # so that nothing else comes to lie where they do
        self._known = known, [(x.data_ptr(), x._version) for x in tensors]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateMark) and self._known == other._known

    __hash__ = None  # type: ignore[assignment]


class RegisteredState(TrainingState):
    """The state of all that is ``registered``. ``is_for_use``: models alone, to be read from any state.

    Of objects the tensors come last in the hash; all ranks have them, and the first one writes them. The
    number of declared steps that each model has made is in ``options()``, and ``put`` sets it.

    Raises:
        ValueError: as for ``TrainingState``.
    """

    def __init__(self, registered: Registered, group: Group | None = None) -> None:
        models, optimizers = list(registered.models.values()), list(registered.optimizers.values())
        self._registered, self.is_for_use = registered, False
        self._places = {name: place for place, name in enumerate(registered.others, start=AFTER_ALL)}
        super().__init__(
            models[0] if len(models) == 1 else NamedModels(registered),
            JoinedOptimizers(optimizers) if len(optimizers) > 1 else next(iter(optimizers), None),
            group,
        )
        self._listed = Listed(self.module, list(self._parameters.values()), self._homes, self.steps)

    def hashed(self) -> list[Shard]:
        """As of every state, then the tensors of objects."""
        tensors = self._registered.object_tensors()
        listed = self._listed.get(super().hashed)
        return [*listed, *(self._of_object(name, tensors[name]) for name in self._ordered(tensors))]

    def options(self) -> Json:
        """As of every state, and what of objects is no tensor."""
        found = {
            **(super().options() or {"class": NO_OPTIMIZER, "groups": [], "scalars": {}}),
            "objects": self._registered.objects_to_json(),
            "declared_steps": self._registered.declared_steps(),
        }
        require_json("the state of registered objects", found)
        return found

    def is_all_of(self, options: Json) -> bool:
        """What is read to go on from is all of it: ``read`` refuses what is more than this."""
        said = options if isinstance(options, dict) else {}
        return not self.is_for_use or (said.get("class") == NO_OPTIMIZER and not said.get("objects"))

    def counters(self) -> dict[str, Any]:
        """As of every state."""
        return self._registered.counters()

    def read(self, source: Source, options: Json) -> list[Shard]:
        """As of every state. Of objects nothing but their names is known before: they may have fewer tensors
        now than they are given.
        """
        _require_counts(options)
        bodies = {} if self.is_for_use else self._require_objects(source, options)
        found = super().read(source, options)
        names = [full.removeprefix(OBJECT) for full in source.tensors if bodies and full.startswith(OBJECT)]
        values = {name: source.read_whole(OBJECT + name) for name in names}
        for name, body in bodies.items():
            put_together(name, body, values)  # or it is rejected before anything has changed
        return [*found, *(self._of_object(name, values[name]) for name in self._ordered(values))]

    def put(self, values: Sequence[Shard], options: Json) -> None:
        """As of every state; then each object is given its own, in the order of registration."""
        super().put([x for x in values if not x.name.startswith(OBJECT)], options)
        given = {x.name.removeprefix(OBJECT): x.tensor for x in values if x.name.startswith(OBJECT)}
        live = self._registered.object_tensors()
        for name, x in self._registered.others.items():
            body = options["objects"][name]
            tensors = {
                full: given[full].to(live[full].device if full in live else self._device(kind))
                for full, kind in tensors_of(body)
            }
            try:
                x.load_state_dict(put_together(name, body, tensors))
            except Exception as error:
                error.add_note(f"in load_state_dict() of the registered object {name!r}")
                raise

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
        groups = [group for x in self._registered.optimizers.values() for group in x.param_groups]
        options = [(key, value) for group in groups for key, value in group.items() if key != "params"]
        tensors = [*live, *sliced, *self._registered.object_tensors().values()]
        tensors += [value for _, value in options if isinstance(value, Tensor)]
        plain = repr([option for option in options if not isinstance(option[1], Tensor)])
        updates = sorted(self._registered.num_updates.items())
        beside = [(x.name, tensor_digest(x.tensor)) for x in self.beside()]
        return StateMark((self._registered.digest(), plain, updates, beside), tensors)

    def _of_object(self, name: str, x: Tensor) -> Shard:
        return Shard.whole(OBJECT + name, x, self._every, (self._place(name), name))

    def _place(self, name: str) -> int:
        """That of the object in the hash, of which ``name`` is a tensor."""
        return self._places[name.partition("/")[0]]

    def _ordered(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self._place(name), name))

    def _require_objects(self, source: Source, options: Json) -> dict[str, Json]:
        """The JSON of each object, or CheckpointRejected if this is a state of others."""
        said = options if isinstance(options, dict) else {}
        bodies = said.get("objects", {})
        _require_names(bodies, self._registered.others)
        if self.optimizer is None and said.get("class", NO_OPTIMIZER) != NO_OPTIMIZER:
            raise CheckpointRejected(
                f"the saved state has an optimizer ({str(said['class'])[:80]}), and none is given: pass "
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


def _count(reference: weakref.ref[Registered], name: str, *_: Any) -> None:
    """A step of the optimizer ``name`` begins."""
    registered = reference()
    if registered is not None:
        registered.num_updates[name] += 1


def _require_counts(options: Json) -> None:
    counted = options.get("declared_steps", {}) if isinstance(options, dict) else {}
    sound = isinstance(counted, dict)
    if not sound or not all(type(count) is int and 0 <= count < 2**62 for count in counted.values()):
        raise CheckpointRejected(
            f"expected numbers of declared steps, got {repr(counted)[:80]}: take another checkpoint"
        )


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


def _require_name(name: str) -> None:
    if not name.isidentifier():
        raise ValueError(f"expected a name like one of Python's, got {name!r}: use letters, digits and _")


def _require_stateful(name: str, x: object) -> None:
    missing = [
        f"{method}()"
        for method in ("state_dict", "load_state_dict")
        if not callable(getattr(x, method, None))
    ]
    if missing:
        raise ValueError(
            f"{name!r} is of class {type(x).__qualname__}, which has no {' and no '.join(missing)}: give it "
            "state_dict() and load_state_dict(), or leave it out if it does not change"
        )


def _require_same_ranks(found: Sequence[tuple[str, Group]], verb: str, fix: str) -> None:
    """ValueError unless all groups are of the same ranks."""
    for name, group in found[1:]:
        first, its = found[0]
        if group.ranks != its.ranks:
            raise ValueError(
                f"{first} {verb} ranks {list(its.ranks)}, and {name} {verb} ranks {list(group.ranks)}: {fix}"
            )
