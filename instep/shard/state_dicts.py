"""``state_dict`` of a module whose weights are in slices: the values, fetched by the rank that asks.

    if rank == 0:
        torch.save(model.state_dict(), "weights.pt")        the other ranks need not do anything

What ``state_dict`` finds are views of gathered weights, so hooks put the masters in their place, in new
memory. That needs no other rank, as gathers are one-sided, and no rank's masters change meanwhile: an
optimizer comes to a barrier before it writes. With ``keep_vars=True`` the entries stay the parameters.

The way back is none: ``load_state_dict`` copies into parameters, which have no memory here, and raises. A
copy of a submodule, or a pickle, is one with values, and in no way sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from instep.hook import Hook
from instep.shard.unit import Unit

LOAD = (
    "load_state_dict() into a module whose weights are in slices: parameter {name!r} has no memory of its "
    "own to copy into. Load before fully_shard(), or, from a checkpoint of instep, with instep.load()"
)


class StateDicts:
    """Hooks on ``module`` and all in it, as long as they are not removed.

    Args:
        masters: fetches all values of a unit, in the order of its parameters, into new memory.
        release: what was gathered to be read is not needed any more.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        masters: Callable[[Unit], list[Tensor]],
        release: Callable[[], object],
    ) -> None:
        self._masters, self._release = masters, release
        self._place = {id(p): (unit, i) for unit in units for i, p in enumerate(unit.parameters)}
        self._asked: Callable[[], Any] = lambda: None  # the dictionary that is being filled, if it lives
        # For it: unit, generation of its masters -> values that it does not have yet.
        self._fetched: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.hooks: list[Any] = []
        me = weakref.ref(self)
        for m in module.modules():
            own = {key: p for key, p in m._parameters.items() if p is not None and id(p) in self._place}
            if own:
                hook = m.register_state_dict_post_hook(Hook(partial(_give, me)))
                m._state_dict_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
                self.hooks.append(hook)  # before the user's, who find values
            self.hooks.append(m.register_load_state_dict_pre_hook(Hook(partial(_refuse, me))))

    def give(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put the values of what is in slices of ``module``'s own parameters into ``state``."""
        if self._asked() is not state:
            self._asked, self._fetched = _weak(state, self._forget), {}
        for key, p in module._parameters.items():
            if p is None or id(p) not in self._place or state.get(prefix + key, p) is p:
                continue
            unit, i = self._place[id(p)]
            if unit.materialised:
                state[prefix + key] = self._value(unit, i)
        self._release()

    def sharded(self, module: nn.Module, prefix: str, state: Mapping[str, Any]) -> str | None:
        """The name in ``state`` of a parameter in ``module`` that is in slices."""
        names = (f"{prefix}{name}" for name, p in module.named_parameters() if id(p) in self._place)
        return next((name for name in names if name in state), None)

    def _value(self, unit: Unit, i: int) -> Tensor:
        key = (unit.number, unit.generation)
        rest = self._fetched.get(key, {})
        if i not in rest:
            rest = self._fetched[key] = dict(enumerate(self._masters(unit)))
        value = rest.pop(i).clone()
        if not rest:
            del self._fetched[key]
        return value

    def _forget(self, _: object = None) -> None:
        self._fetched = {}


def _give(
    me: weakref.ref[StateDicts], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    alive = me()
    if alive is not None:
        alive.give(module, state, prefix)


def _refuse(
    me: weakref.ref[StateDicts],
    module: nn.Module,
    state: Mapping[str, Any],
    prefix: str,
    *others: Any,
) -> None:
    alive = me()
    name = None if alive is None else alive.sharded(module, prefix, state)
    if name is not None:
        raise RuntimeError(LOAD.format(name=name))


def _weak(state: dict[str, Any], gone: Callable[[object], None]) -> Callable[[], Any]:
    """``state`` while it lives; nothing where that cannot be known."""
    try:
        return weakref.ref(state, gone)
    except TypeError:
        return lambda: None
