"""No optimizer step with a gradient that the other ranks have not seen.

Training through ``model.module.encoder(x)``, a ``no_sync`` that no synchronised backward followed, a
``.grad`` that is set by hand: each leaves a local gradient, the step goes through, and the replicas drift
apart without a word. Nothing in ``backward`` could tell. So one hook before every optimizer
step looks the parameters up in the table of owners (``reduce/owners.py``): was each gradient exchanged?

The hook does not communicate: it compares what the reducer has noted. But a program may reduce gradients by
itself, or compute the same ones on every rank. So where some have bypassed every exchange, the ranks compare
them, and all raise if they differ.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.net.process_group import Group
from instep.reduce.owners import Owner, entry, nobody, owner_of, owners

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


Owned: TypeAlias = Mapping["Reduction", Sequence[tuple[Tensor, Owner]]]
"""The parameters of an optimizer, by who reduces their gradients, in an order that all ranks have."""
Doubt: TypeAlias = tuple[Owner, Tensor, str]
"""A parameter, its gradient that no exchange has seen, and why no step may use it where ranks differ."""


def watch(reducer: Reduction, frozen: Sequence[tuple[str, Tensor]], release: Callable[[], object]) -> None:
    """From now on ``reducer`` owns its parameters, and ``frozen`` ones by name; ``release`` ends that."""
    trained = zip(reducer.names, reducer.optimizer_parameters, strict=True)
    named = [*((i, *both) for i, both in enumerate(trained)), *((None, *both) for both in frozen)]
    for position, name, parameter in named:
        owner = entry(parameter)
        if position is None and owner.reduces and owner.position is not None:
            continue  # another wrapper reduces it, when it is not frozen
        owner.reducer, owner.release = weakref.ref(reducer), release
        owner.name, owner.position = name, position
        owner.reductions_used, owner.accepted = reducer.num_reductions, None
        if position is None and parameter.grad is not None:  # from before: as good as the weights are
            _accept(owner, parameter.grad)


def forget(parameters: Iterable[Tensor]) -> None:
    """Nobody reduces the gradients of ``parameters`` any more."""
    for parameter in parameters:
        owner = entry(parameter)
        owner.reducer = owner.peers = nobody


def owners_of(parameters: Iterable[Tensor]) -> list[Owner]:
    """Of those whose gradients are reduced."""
    found = (owner_of(parameter) for parameter in parameters)
    return [owner for owner in found if owner is not None and owner.reducer() is not None]


def require_unowned(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if some wrapper, which is not closed, reduces the gradients of ``parameters``.

    Which wrappers are alive must not depend on when each rank collects garbage.
    """
    if any(owner.reduces for owner in owners_of(parameters)):
        gc.collect()
    for owner in owners_of(parameters):
        reducer = owner.reducer()
        if reducer is not None and owner.reduces:
            whose = "is sharded by fully_shard" if reducer.sharded else "belongs to a DataParallel"
            raise ValueError(
                f"parameter {owner.name!r} {whose} already, and both would exchange its gradient: wrap or "
                "shard one module that holds all, once, or close() the other one first"
            )


def require_every_rank_steps(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if a parameter server trains one of ``parameters``: only its first rank steps."""
    reducers = [owner.reducer() for owner in owners_of(parameters) if owner.reduces]
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


def require_reduced(optimizer: Optimizer) -> None:
    """Raise ``RuntimeError`` if a gradient that ``optimizer`` would use was not exchanged."""
    _require_reduced(_owned(optimizer))


def meeting_of(optimizer: Optimizer, group: Group) -> Reduction | None:
    """What reduces gradients that ``optimizer`` steps with, over all ranks of ``group`` and perhaps more.

    Wherever its ranks have gone instead of making this step, that is where they come next.
    """
    for reducer, members in _owned(optimizer).items():
        if (
            any(owner.reduces for _, owner in members)
            and reducer.all_step
            and set(group.ranks) <= set(reducer.group.ranks)
        ):
            return reducer
    return None


def _owned(optimizer: Optimizer) -> Owned:
    """Twice in every step: without a call per parameter."""
    found: dict[Reduction, list[tuple[Tensor, Owner]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owners.get(id(parameter))
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
        problem = None if gradient is None else _problem(owner, reducer, gradient)
        if problem is not None and gradient is not None:
            found.append((owner, gradient, problem))
    return found


def _problem(owner: Owner, reducer: Reduction, gradient: Tensor) -> str | None:
    """Why a step must not use ``gradient``, unless it is the same on all ranks; or None."""
    if reducer.group.size == 1 and not reducer.sharded:
        return None
    if owner.position is not None and reducer.local[owner.position]:
        return UNSYNCHRONISED
    if owner.position is not None and reducer.num_reductions > owner.reductions_used:
        return None  # exchanged since the last optimizer step
    known = owner.accepted
    is_known = known is not None and known[0]() is gradient and known[1] == gradient._version
    if is_known or not bool(torch.any(gradient)):
        return None
    return FROZEN if owner.position is None else BY_HAND


def _accept(owner: Owner, gradient: Tensor) -> None:
    owner.accepted = weakref.ref(gradient), gradient._version


def _require_same(reducer: Reduction, doubts: Sequence[Doubt]) -> None:
    """Raise, on all ranks, unless they have the same gradients, which no exchange has seen. Collective."""
    unlike: int | None = 0
    if reducer.all_step and not reducer.sharded and doubts[0][0].reduces:
        unlike = reducer.first_unlike([(owner.name, gradient) for owner, gradient, _ in doubts])
    if unlike is not None:
        owner, _, problem = doubts[unlike]
        raise RuntimeError(f"optimizer.step(): parameter {owner.name!r} {problem}")
    for owner, gradient, _ in doubts:
        _accept(owner, gradient)
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

    def checked() -> Any:
        found = closure()
        require_reduced(optimizer)
        return found

    return (args[0], checked), {k: v for k, v in kwargs.items() if k != "closure"}


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
