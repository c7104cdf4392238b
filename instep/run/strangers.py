"""What a script has beside what it has registered: an optimizer, a schedule, a loader, a model.

Each would begin anew where a rank takes another's place, and where the run goes on. So each step looks
whether one of them has moved: what steps, schedules or feeds a registered model is an error. A model that
changes by itself (an average of the weights, say) may be meant so: it is a warning.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from instep.checkpoint.registered import Registered


class Strangers:
    """What this process has when the steps begin, that is neither ``registered`` nor held by what is.

    A step: ``begin``, then ``end``; ``require_known`` before an optimizer steps. Held weakly: what a script
    makes for a moment is its own affair.

    Raises:
        ValueError: at once, if an optimizer has parameters of a registered model; later, by what has moved.
    """

    def __init__(self, registered: Registered) -> None:
        self.registered = registered
        self._names = {id(x): name for name, x in registered.optimizers.items()}
        found = _weakly(_others(registered))
        if (num := sum(map(len, found))) and gc.collect() and sum(map(len, found)) < num:
            found = _weakly(_others(registered))  # what the dead held was not the outermost
        self.optimizers, self.loaders, self.schedules, self.models = found
        self._positions = weakref.WeakKeyDictionary[Any, int]()
        self._epochs = weakref.WeakKeyDictionary[Any, int]((x, x.last_epoch) for x in self.schedules)
        self._versions = weakref.WeakKeyDictionary[nn.Module, int]((x, _version(x)) for x in self.models)
        for optimizer in list(self.optimizers):
            registered.require_registered(optimizer)

    def begin(self) -> None:
        """A step begins."""
        self._require_schedules()
        self._positions.update((loader, loader.position) for loader in self.loaders)

    def end(self, steps_done: int) -> None:
        """It ends, with ``steps_done`` steps made before it."""
        self._require_loaders(steps_done)
        self._require_schedules()
        self._warn_of_models(steps_done)

    def require_known(self, optimizer: Optimizer, steppers: Iterable[Optimizer]) -> None:
        """ValueError for one that was there before the steps, and whose moments would be lost with a rank.

        ``steppers``: those of which registered optimizers are made.
        """
        self.registered.require_registered(optimizer)
        if optimizer in self.optimizers and not any(optimizer is local for local in steppers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            raise ValueError(
                f"{type(optimizer).__name__} steps {len(parameters)} parameters, the first of shape "
                f"{list(parameters[0].shape)}, and neither it nor their model is registered: they would be "
                "lost with a rank: register both"
            )

    def _require_loaders(self, steps_done: int) -> None:
        """ValueError for a loader that has given samples, and would give them again after a rank is lost."""
        moved = [(x.position, begun) for x, begun in self._positions.items() if x.position != begun]
        if moved:
            position, begun = moved[0]
            raise ValueError(
                f"step {steps_done} has read samples {begun} to {position - 1} of an instep.Loader that is "
                "not registered: a rank that takes another's place would read from the beginning, and so "
                "would a run that goes on: run.register(data=loader), by a name of its own"
            )

    def _require_schedules(self) -> None:
        """ValueError for a schedule of a registered optimizer that has moved, and is not registered."""
        for schedule, epoch in self._epochs.items():
            if schedule.last_epoch != epoch:
                kind = type(schedule).__name__
                raise ValueError(
                    f"{kind} moves the options of {self._names[id(schedule.optimizer)]!r}, and is not "
                    "registered: it would begin anew when a rank is replaced and when the run goes on: "
                    "run.register(schedule=schedule), by a name of its own"
                )

    def _warn_of_models(self, steps_done: int) -> None:
        """Once for each model whose weights or buffers have changed since the steps began."""
        for model, version in list(self._versions.items()):
            if _version(model) != version:
                del self._versions[model]
                warnings.warn(
                    f"step {steps_done} has changed {type(model).__name__}, a model that is not registered: "
                    "a rank that takes another's place has it as the script builds it, and so has a run that "
                    "goes on: run.register(model=model), by a name of its own, if that is to be kept",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _version(model: nn.Module) -> int:
    """Another one when a tensor of ``model`` was written to."""
    return sum(x._version for x in _tensors(model) if not x.is_inference())


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _others(
    registered: Registered,
) -> tuple[list[Optimizer], list[Any], list[LRScheduler], list[nn.Module]]:
    """Optimizers, loaders, schedules and models of this process that nothing registered has."""
    carried = list(registered.others.values())
    held = [x for each in carried for x in getattr(each, "__dict__", {}).values()]
    held += [x for each in held if isinstance(each, list) for x in each]
    known = set(map(id, [*registered.optimizers.values(), *carried, *held]))
    # By the type alone: there are things that answer isinstance with code of their own. Once each: there are
    # some hundred thousand of them.
    everything = gc.get_objects()
    optimizers, loaders, schedules, models = set[type](), set[type](), set[type](), set[type]()
    for kind in set(map(type, everything)):
        if issubclass(kind, Optimizer):
            optimizers.add(kind)
        elif issubclass(kind, LRScheduler):
            schedules.add(kind)
        elif issubclass(kind, nn.Module):
            models.add(kind)
        elif all(any(name in vars(base) for base in kind.__mro__) for name in ("advance", "position")):
            loaders.add(kind)  # a `DataSource` of ``micro_batches`` that counts its samples
    kinds = optimizers | loaders | schedules
    wanted = kinds | models
    found = [x for x in everything if type(x) in wanted and id(x) not in known]
    others = [x for x in found if type(x) in kinds and vars(x)]  # a wrapper's own optimizer is half made
    own = set(map(id, registered.optimizers.values()))
    return (
        [x for x in others if "param_groups" in vars(x)],
        [x for x in others if type(x) in loaders],
        [x for x in others if type(x) in schedules and id(vars(x).get("optimizer")) in own],
        _outermost([x for x in found if type(x) in models and "_buffers" in vars(x)], registered),
    )


def _weakly(found: Iterable[list[Any]]) -> list[weakref.WeakSet[Any]]:
    return [weakref.WeakSet(each) for each in found]


def _outermost(modules: list[nn.Module], registered: Registered) -> list[nn.Module]:
    """Those of ``modules`` that no other one holds, and that have no tensor of a registered model."""
    inner = {id(child) for module in modules for child in vars(module)["_modules"].values()}
    own = {id(x) for x in _tensors(registered.root)}
    outer = [(x, {id(tensor) for tensor in _tensors(x)}) for x in modules if id(x) not in inner]
    return [x for x, tensors in outer if tensors and not own & tensors]
