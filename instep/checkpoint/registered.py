"""All that a run trains, by name: models, optimizers, and any object with a ``state_dict``.

    Registered({"generator": DataParallel, "critic": DataParallel, "g": AdamW, "c": Adam, "plan": StepLR})

Models and optimizers are sorted by what they are; all else must have ``state_dict`` and ``load_state_dict``.
A model alone keeps its own names in the state; of several each name begins with the one that the model is
registered by, as if one module held them all. That module is made for the names alone: nothing of the user's
is changed.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint.manifest import Json, canonical
from instep.checkpoint.module_state import divided, to_tensors
from instep.checkpoint.state import TrainingState
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group
from instep.reduce.owners import owner_of
from instep.state.homes import Wrapped, homes, not_compiled, offered, outermost, unwrapped
from instep.state.objects import take_apart
from instep.step.optimizer_guard import require_every_rank_steps

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

    def state(self, group: Group | None = None) -> TrainingState:
        """All of it as one state, for as long as wrappers, parameters and groups stay the same.

        ``group``: the ranks that train together, by default those that the models are wrapped for.

        Raises:
            ValueError: models are trained by different ranks, or divided among different ones.
        """
        self._require_one_owner()
        self._require_one_group(group)
        return TrainingState(self, group)

    @cached_property
    def root(self) -> nn.Module:
        """All models as one module, with the names that the state has; that of several is never called."""
        found = self.modules()
        if len(found) == 1:
            return next(iter(found.values()))
        named = nn.Module()
        named._modules.update(found)  # so that a name may be that of a method of modules
        return named

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
        for said in self.wrapped():
            said.leave()

    def join(self, mesh: Mesh) -> None:
        """All take part in ``mesh``, after ``leave``. Collective over it."""
        for said in self.wrapped():
            said.join(mesh)
        for optimizer in self.optimizers.values():
            if (divided := offered(optimizer)) is not None:
                divided.join(mesh)

    def fill(self) -> None:
        """Models from the meta device get their first values. Collective over their mesh."""
        for said in self.wrapped():
            said.fill()

    def wrapped(self) -> list[Wrapped]:
        """The descriptions of the models that have a wrapper."""
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
        known = {id(p) for said in self.wrapped() for p in said.module.parameters()}
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


def _count(reference: weakref.ref[Registered], name: str, *_: Any) -> None:
    """A step of the optimizer ``name`` begins."""
    registered = reference()
    if registered is not None:
        registered.num_updates[name] += 1


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
