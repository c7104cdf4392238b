"""No optimizer step with a gradient that the other ranks have not seen.

Training through ``model.module.encoder(x)``, a ``no_sync`` that no synchronised backward followed, a
``.grad`` that is set by hand: each leaves a local gradient, the step goes through, and the replicas drift
apart without a word. Nothing in ``backward`` could tell. So there is one process-wide table, parameter ->
``Owner``, and one hook before every optimizer step that looks the parameters up: was each gradient exchanged?

The hook does not communicate: it compares what the reducer has noted. But a program may reduce gradients by
itself, or compute the same ones on every rank. So where some have bypassed every exchange, the ranks compare
them, and all raise if they differ. Table and hook are one of the two places of process-wide state; the other
is ``mesh/mesh.py``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.net.process_group import Group

if TYPE_CHECKING:
    from instep.step.reduction import Reduction

UNSYNCHRONISED = (
    "has a gradient that was never exchanged with the other ranks: let the last backward before "
    "optimizer.step() run outside of no_sync() and through the wrapped model, or call model.sync_gradients()"
)
FROZEN = "was frozen when the model was wrapped and has a gradient now: unfreeze before wrapping"
BY_HAND = (
    "has a gradient, but nothing was exchanged since the last optimizer step, and a .grad that is set by "
    "hand is this rank's alone: set the same on all ranks, run backward through the wrapped model, or call "
    "model.sync_gradients() on every rank"
)


class Owner:
    """Which ``reducer`` reduces the gradients of ``parameter``; ``release`` ends that.

    ``position`` is that of the parameter among the reducer's; None if it was frozen when it was wrapped.
    """

    def __init__(
        self,
        parameter: Tensor,
        reducer: Reduction,
        name: str,
        position: int | None,
        release: Callable[[], object],
    ) -> None:
        self.parameter = weakref.ref(parameter, partial(_drop, id(parameter)))
        self.reducer = weakref.ref(reducer)
        self.name = name
        self.position = position
        self.release = release
        self.reductions_used = reducer.num_reductions  # by the last optimizer step
        # A gradient that is the same on all ranks, and its version: any number of steps may use it.
        self.accepted: tuple[weakref.ref[Tensor], int] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the wrapper still reduces."""
        return self.reducer() is not None and bool(getattr(self.release, "alive", True))

    @property
    def reduced(self) -> bool:
        """Whether an exchange has ended since the last optimizer step."""
        reducer = self.reducer()
        return (
            reducer is not None
            and self.position is not None
            and reducer.num_reductions > self.reductions_used
        )

    @reduced.setter
    def reduced(self, now: bool) -> None:
        if (reducer := self.reducer()) is not None:
            self.reductions_used = reducer.num_reductions - now

    def problem(self, reducer: Reduction, gradient: Tensor) -> str | None:
        """Why a step must not use ``gradient``, unless it is the same on all ranks; or None."""
        if reducer.group.size == 1 and not reducer.sharded:
            return None
        if self.position is not None and reducer.local[self.position]:
            return UNSYNCHRONISED
        if self.reduced or self._is_accepted(gradient):
            return None
        if not bool(torch.any(gradient)):
            return None
        return FROZEN if self.position is None else BY_HAND

    def accept(self, gradient: Tensor) -> None:
        self.accepted = weakref.ref(gradient), gradient._version

    def _is_accepted(self, gradient: Tensor) -> bool:
        known = self.accepted
        return known is not None and known[0]() is gradient and known[1] == gradient._version


Owned: TypeAlias = Mapping["Reduction", Sequence[tuple[Tensor, Owner]]]
"""The parameters of an optimizer, by who reduces their gradients, in an order that all ranks have."""
Doubt: TypeAlias = tuple[Owner, Tensor, str]
"""A parameter, its gradient that no exchange has seen, and why no step may use it where ranks differ."""

_owners: dict[int, Owner] = {}  # by the identity of a parameter


def owner_of(tensor: Tensor) -> Owner | None:
    """Who reduces the gradients of ``tensor``."""
    owner = _owners.get(id(tensor))
    return owner if owner is not None and owner.parameter() is tensor else None


def owners_of(parameters: Iterable[Tensor]) -> list[Owner]:
    """The owners of those that have one."""
    return [owner for parameter in parameters if (owner := owner_of(parameter)) is not None]


def watch(reducer: Reduction, frozen: Sequence[tuple[str, Tensor]], release: Callable[[], object]) -> None:
    """From now on ``reducer`` owns its parameters, and ``frozen`` ones by name; ``release`` ends that."""
    for i, (name, parameter) in enumerate(zip(reducer.names, reducer.optimizer_parameters, strict=True)):
        _owners[id(parameter)] = Owner(parameter, reducer, name, i, release)
    for name, parameter in frozen:
        before = owner_of(parameter)
        if before is not None and before.is_alive and before.position is not None:
            continue  # another wrapper reduces it, when it is not frozen
        _owners[id(parameter)] = owner = Owner(parameter, reducer, name, None, release)
        if parameter.grad is not None:  # from before it was frozen: as good as the weights are
            owner.accept(parameter.grad)


def _drop(key: int, reference: weakref.ref[Tensor]) -> None:
    """The parameter is gone, and its identity may be another's by now."""
    if (owner := _owners.get(key)) is not None and owner.parameter is reference:
        del _owners[key]


def forget(parameters: Iterable[Tensor]) -> None:
    """Nobody owns ``parameters`` any more."""
    for parameter in parameters:
        _owners.pop(id(parameter), None)


def require_unowned(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if some wrapper, which is not closed, reduces the gradients of ``parameters``.

    Which wrappers are alive must not depend on when each rank collects garbage.
    """
    if any(owner.is_alive for owner in owners_of(parameters)):
        gc.collect()
    for owner in owners_of(parameters):
        reducer = owner.reducer()
        if reducer is not None and owner.is_alive:
            whose = "is sharded by fully_shard" if reducer.sharded else "belongs to a DataParallel"
            raise ValueError(
                f"parameter {owner.name!r} {whose} already, and both would exchange its gradient: wrap or "
                "shard one module that holds all, once, or close() the other one first"
            )


def require_every_rank_steps(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if a parameter server trains one of ``parameters``: only its first rank steps."""
    reducers = [owner.reducer() for owner in owners_of(parameters) if owner.is_alive]
    if any(reducer is not None and not reducer.all_step for reducer in reducers):
        raise ValueError("a ParameterServer, for comparison, trains these: use instep.DataParallel instead")


def require_between_steps(parameters: Sequence[Tensor], what: str) -> None:
    """Raise ``ValueError`` if ``what`` would change ``parameters`` inside of a loop over micro-batches."""
    for owner in owners_of(parameters):
        reducer = owner.reducer()
        if reducer is not None and reducer.plan is not None and reducer.plan.declared:
            raise ValueError(
                f"{what} inside micro_batches(), which would change parameter {owner.name!r} for some of its "
                "micro-batches: do it before the loop or after it (close() an iterator that was kept)"
            )


def reduced(reducer: Reduction) -> None:
    """``reducer`` has reduced the gradients of all its parameters."""
    reducer.num_reductions += 1


def require_reduced(optimizer: Optimizer) -> None:
    """Raise ``RuntimeError`` if a gradient that ``optimizer`` would use was not exchanged."""
    _require_reduced(_owned(optimizer))


def meeting_of(optimizer: Optimizer, group: Group) -> Reduction | None:
    """What reduces gradients that ``optimizer`` steps with, over all ranks of ``group`` and perhaps more.

    Wherever its ranks have gone instead of making this step, that is where they come next.
    """
    for reducer, members in _owned(optimizer).items():
        is_alive = any(owner.is_alive for _, owner in members)
        if is_alive and reducer.all_step and set(group.ranks) <= set(reducer.group.ranks):
            return reducer
    return None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _owned(optimizer: Optimizer) -> Owned:
    """Twice in every step: without a call per parameter."""
    found: dict[Reduction, list[tuple[Tensor, Owner]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = _owners.get(id(parameter))
            reducer = None if owner is None or owner.parameter() is not parameter else owner.reducer()
            if owner is not None and reducer is not None:
                found.setdefault(reducer, []).append((parameter, owner))
    return found


def _require_reduced(owned: Owned) -> None:
    for reducer in owned:
        if not reducer.all_step and reducer.group.rank:
            raise RuntimeError(
                "optimizer.step() on a worker of a ParameterServer, which has no gradient: call "
                "server.step() on every rank"
            )
        if reducer.plan is not None and reducer.plan.declared:
            raise RuntimeError(
                "optimizer.step() inside micro_batches(): the gradient is there when the loop has ended"
            )
        if reducer.given_up:
            raise RuntimeError(
                "optimizer.step() after a step that was given up, by an exception or by leaving the loop "
                "over micro_batches() before its end: there is no gradient. In zip(), micro_batches() has to "
                "come first"
            )
    for reducer, members in owned.items():
        if doubts := _doubts(reducer, members):
            _require_same(reducer, doubts)


def _doubts(reducer: Reduction, members: Sequence[tuple[Tensor, Owner]]) -> list[Doubt]:
    """Those of the gradients that ``reducer`` may not have reduced."""
    found: list[Doubt] = []
    newest = -1 if any(reducer.local) else reducer.num_reductions
    for parameter, owner in members:
        if owner.reductions_used < newest and owner.position is not None:
            continue
        gradient = parameter.grad
        problem = None if gradient is None else owner.problem(reducer, gradient)
        if problem is not None and gradient is not None:
            found.append((owner, gradient, problem))
    return found


def _require_same(reducer: Reduction, doubts: Sequence[Doubt]) -> None:
    """Raise, on all ranks, unless they have the same gradients, which no exchange has seen. Collective."""
    unlike: int | None = 0
    if reducer.all_step and not reducer.sharded and doubts[0][0].is_alive:
        unlike = reducer.first_unlike([(owner.name, gradient) for owner, gradient, _ in doubts])
    if unlike is not None:
        owner, _, problem = doubts[unlike]
        raise RuntimeError(f"optimizer.step(): parameter {owner.name!r} {problem}")
    for owner, gradient, _ in doubts:
        owner.accept(gradient)
        if owner.position is not None:
            reducer.local[owner.position] = False


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    owned = _owned(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:  # else it may be what exchanges the gradients
        _require_reduced(owned)
    for reducer, members in owned.items():
        if (problem := reducer.refusal(optimizer)) is not None:
            for _, owner in members:
                if owner.position is not None:
                    raise RuntimeError(f"optimizer.step(): parameter {owner.name!r} {problem}")
    for reducer in owned:
        reducer.steps_now(optimizer)
    if closure is None:
        return None
    checked = partial(_checked, optimizer, closure)
    return (args[0], checked), {k: v for k, v in kwargs.items() if k != "closure"}


def _checked(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    """What ``closure`` returns, which may have exchanged the gradients."""
    found = closure()
    require_reduced(optimizer)
    return found


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    owned = _owned(optimizer)
    for reducer, members in owned.items():
        for parameter, owner in members:
            gradient = parameter.grad
            owner.accepted = None if gradient is None else (weakref.ref(gradient), gradient._version)
            owner.reductions_used = reducer.num_reductions
    for reducer in owned:
        reducer.stepped()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
