"""No optimizer step with a gradient that the other ranks have not seen.

A layer that is added or replaced after wrapping, a checkpoint that is loaded with ``assign=True``, a
parameter that is unfrozen, training through ``model.module.encoder(x)``, a ``no_sync`` that was never
followed by a synchronised backward: each leaves a local gradient in ``.grad``, the step goes through, and the
replicas drift apart without a word. Nothing in ``backward`` could tell. So there are two looks:

    backward     ``ParameterRegistry.check``: is every parameter that would be trained one that was wrapped?
    optimizer    one hook before every step looks the parameters up: was each gradient exchanged?

Neither communicates: what the hook needs to know, the reducer has noted. But a program may reduce gradients
by itself, or set them to what it computes on every rank. So where some have come past every exchange, the
ranks compare them, and all raise if they are not alike. The hook is one of the two places of process-wide
state; the other is ``mesh/mesh.py``.

Where gradients are in slices, an optimizer's own step could do nothing with them. There the reducer has
another one to make in its place (``Reduction.update``), which the optimizer is given as its closure.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instep.net.process_group import Group
from instep.reduce.placeholder import by_slices, slices_of
from instep.state.alignment import align

if TYPE_CHECKING:
    from instep.step.reduction import Reduction


class ParameterRegistry:
    """The parameters that a model had when it was wrapped; one that came later has no hook and no bucket.

    At construction they are written down. ``check`` compares, in about half a microsecond per submodule. So
    does ``check_forward``, where ``torch.func.functional_call`` may show others, for the one call.
    ``named_modules`` are those of the model, as of the last ``check``.
    """

    def __init__(self, module: nn.Module, *, but: Iterable[Tensor] = ()) -> None:
        self.module = module
        self._others = set(map(id, but))  # left to others
        named = [(name, p) for name, p in module.named_parameters() if id(p) not in self._others]
        for name, parameter in named:
            if is_lazy(parameter):
                raise ValueError(f"parameter {name!r} has no shape yet: run one forward, then wrap")
        self.trainable = [(name, p) for name, p in named if p.requires_grad]
        self.frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._remember()

    def as_wrapped(self) -> AbstractContextManager[None]:
        """Inside, what required gradients when the model was wrapped does, and no other that was there."""
        return requiring([p for _, p in self.trainable], [p for _, p in self.frozen])

    def check_forward(self) -> None:
        """Raise ``ValueError`` if a parameter that was frozen would be trained; align those that are new."""
        self._check_frozen()
        if not self._is_as_remembered():
            _align_frozen(self._new())

    def _check_frozen(self) -> None:
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when the model was wrapped and is not now; its gradient "
                    "would stay on this rank: unfreeze first, then wrap"
                )

    def check(self) -> None:
        """Raise ``ValueError`` if a parameter that was not there, or was frozen, would be trained now."""
        self._check_frozen()
        if self._is_as_remembered():
            return
        new = self._new()
        for name, parameter in new:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was not there when the model was wrapped; its gradient would stay "
                    "on this rank: add or replace parameters first, then wrap (a state dict loaded with "
                    "assign=True replaces them)"
                )
        _align_frozen(new)
        self.frozen += new
        self._remember()

    def _new(self) -> list[tuple[str, nn.Parameter]]:
        known = {id(p) for _, p in [*self.trainable, *self.frozen]} | self._others
        return [(name, p) for name, p in self.module.named_parameters() if id(p) not in known]

    def _is_as_remembered(self) -> bool:
        now = self._owned()
        return len(now) == len(self._remembered) and all(map(is_, now, self._remembered))

    def _remember(self) -> None:
        self.named_modules = list(self.module.named_modules())
        self._remembered = self._owned()

    def _owned(self) -> list[nn.Parameter | nn.Module | None]:
        """All parameters and modules, in the order of their owners."""
        owned: list[nn.Parameter | nn.Module | None] = []
        for _, module in self.named_modules:
            if parameters := module._parameters:
                owned += parameters.values()
            if modules := module._modules:
                owned += modules.values()
        return owned


@contextmanager
def requiring(trained: Sequence[Tensor], frozen: Sequence[Tensor]) -> Iterator[None]:
    """Inside, ``trained`` require gradients and ``frozen`` do not.

    For ranks that make a wrapper's or an optimizer's memory anew together, one of which may have lost another
    in the middle of a step that freezes some for a while.
    """
    wanted = [(p, True) for p in trained] + [(p, False) for p in frozen]
    before = [(p, p.requires_grad) for p, _ in wanted]
    try:
        for p, on in wanted:
            p.requires_grad_(on)
        yield
    finally:
        for p, on in before:
            p.requires_grad_(on)


def _align_frozen(named: Iterable[tuple[str, Tensor]]) -> None:
    align(p for _, p in named if isinstance(p, nn.Parameter) and not p.requires_grad)


def require_read_only(module: nn.Module) -> None:
    """Raise ``ValueError`` if a module in ``module`` changes its own weights in forward.

    The change would be each rank's own: replicas drift apart, and where weights are gathered it is lost.
    """
    for name, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={m.max_norm}, which rescales rows of its weight in forward, on each "
                "rank those of its own inputs: make it with max_norm=None, and bound the norm of what it "
                "returns, or of the weights with an optimizer's weight_decay"
            )


class GuardedParameter:
    """A parameter of a wrapped model: which wrapper reduces it, and the gradient that the last step left."""

    def __init__(
        self,
        reducer: Reduction,
        name: str,
        position: int | None,
        release: Callable[[], object],
    ) -> None:
        self.reducer = weakref.ref(reducer)
        self.release = release
        self.name = name
        self.position = position  # None: frozen when it was wrapped
        self.reductions_used = reducer.num_reductions  # by the last optimizer step
        self._left: tuple[weakref.ref[Tensor], int] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the wrapper still reduces."""
        return bool(getattr(self.release, "alive", True))

    @property
    def reduced(self) -> bool:
        """Whether an exchange has ended since the last optimizer step."""
        reducer = self.reducer()
        if reducer is None or self.position is None:
            return False
        return reducer.num_reductions > self.reductions_used

    @reduced.setter
    def reduced(self, now: bool) -> None:
        reducer = self.reducer()
        if reducer is not None:
            self.reductions_used = reducer.num_reductions - now

    def problem(self, gradient: Tensor) -> str | None:
        """Why a step must not use ``gradient``, unless it is the same on all ranks; or None."""
        reducer = self.reducer()
        if reducer is None or (reducer.group.size == 1 and not reducer.sharded):
            return None
        if self.position is not None and reducer.local[self.position]:
            return (
                "has a gradient that was never exchanged with the other ranks: let the last backward before "
                "optimizer.step() run outside of no_sync() and through the wrapped model, or call "
                "model.sync_gradients()"
            )
        if self.reduced or self._was_left(gradient):
            return None
        if slices_of(gradient) is None and not bool(torch.any(gradient)):
            return None
        if self.position is None:
            return "was frozen when the model was wrapped and has a gradient now: unfreeze before wrapping"
        return (
            "has a gradient, but nothing was exchanged since the last optimizer step, and a .grad that is "
            "set by hand is this rank's alone: set the same on all ranks, run backward through the wrapped "
            "model, or call model.sync_gradients() on every rank"
        )

    def is_alike(self) -> None:
        """The gradient that ``problem`` has been told of is the same on all ranks."""
        reducer = self.reducer()
        if reducer is not None and self.position is not None:
            reducer.local[self.position] = False

    def used(self, gradient: Tensor | None, num_reductions: int) -> None:
        """An optimizer step has used ``gradient``; the same one again is every rank's, not a new one."""
        self.reductions_used = num_reductions
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def _was_left(self, gradient: Tensor) -> bool:
        return self._left is not None and self._left[0]() is gradient and self._left[1] == gradient._version


class Guarded(NamedTuple):
    """The parameters of an optimizer, and what is known of them.

    ``entries[i]`` is that of parameter i, None where no wrapper watches it. ``reducers`` reduce them, in the
    order of their first parameters, which is the same on all ranks; ``places`` has the numbers of each one's.
    """

    references: list[weakref.ref[Tensor]]
    entries: list[GuardedParameter | None]
    reducers: list[weakref.ref[Reduction]]
    places: list[list[int]]


Doubt: TypeAlias = tuple[GuardedParameter, Tensor, str]
"""A parameter, its gradient that no exchange has seen, and why no step may use it where ranks differ."""

_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Parameter -> Entry
# To look up each parameter in each step takes long; it ends where a wrapper begins or ends to watch some.
_guarded: weakref.WeakKeyDictionary[Optimizer, Guarded] = weakref.WeakKeyDictionary()


def entries_of(parameters: Sequence[Tensor]) -> list[GuardedParameter]:
    """What is known of those that a wrapper watches."""
    return [entry for parameter in parameters if (entry := _entries.get(parameter)) is not None]


def require_unwatched(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if some wrapper, which is not closed, reduces the gradients of ``parameters``.

    Which wrappers are alive must not depend on when each rank collects garbage.
    """
    if any(entry.is_alive for entry in entries_of(parameters)):
        gc.collect()
    for entry in entries_of(parameters):
        other = entry.reducer()
        if other is not None and entry.is_alive:
            whose = "is sharded already" if other.sharded else "belongs to a DataParallel"
            raise ValueError(
                f"parameter {entry.name!r} {whose}: wrap one module, once, with all that it contains, or "
                "close() the other wrapper first"
            )


def require_between_steps(parameters: Sequence[Tensor], what: str) -> None:
    """Raise ``ValueError`` if ``what`` would change ``parameters`` inside of a loop over micro-batches."""
    for entry in entries_of(parameters):
        reducer = entry.reducer()
        if reducer is not None and reducer.plan is not None and reducer.plan.declared:
            raise ValueError(
                f"{what} inside micro_batches(), which would change parameter {entry.name!r} for some of its "
                "micro-batches: do it before the loop or after it (close() an iterator that was kept)"
            )


def forget(parameters: Sequence[Tensor]) -> None:
    """Look at these parameters no longer."""
    _guarded.clear()
    for parameter in parameters:
        _entries.pop(parameter, None)


def watch(
    reducer: Reduction,
    frozen: Sequence[tuple[str, Tensor]],
    release: Callable[[], object],
) -> None:
    """From now on, look at these parameters before every optimizer step; ``release`` ends their reduction."""
    _guarded.clear()
    for i, (name, parameter) in enumerate(zip(reducer.names, reducer.parameters, strict=True)):
        _entries[parameter] = GuardedParameter(reducer, name, i, release)
    for name, parameter in frozen:
        before = _entries.get(parameter)
        if before is not None and before.is_alive and before.position is not None:
            continue  # another wrapper reduces it, when it is not frozen
        _entries[parameter] = entry = GuardedParameter(reducer, name, None, release)
        # Left from before it was frozen: as good as the weights are.
        entry.used(parameter.grad, reducer.num_reductions)


def reduced(reducer: Reduction) -> None:
    """``reducer`` has reduced the gradients of all its parameters."""
    reducer.num_reductions += 1


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _guard(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Guarded:
    """What is known of ``parameters``, which are those of ``optimizer``."""
    known = _guarded.get(optimizer)
    if known is not None and len(known.references) == len(parameters):
        for reference, parameter in zip(known.references, parameters, strict=True):
            if reference() is not parameter:
                break
        else:
            return known
    entries: list[GuardedParameter | None] = [_entries.get(parameter) for parameter in parameters]
    places: dict[weakref.ref[Reduction], list[int]] = {}
    for i, entry in enumerate(entries):
        if entry is not None and entry.reducer() is not None:
            places.setdefault(entry.reducer, []).append(i)
    found = Guarded([weakref.ref(x) for x in parameters], entries, list(places), list(places.values()))
    _guarded[optimizer] = found
    return found


def require_reduced(optimizer: Optimizer) -> None:
    """Raise ``RuntimeError`` if a gradient that ``optimizer`` would use was not exchanged."""
    parameters = _parameters(optimizer)
    _require_reduced(parameters, _guard(optimizer, parameters))


def meeting_of(optimizer: Optimizer, group: Group) -> Reduction | None:
    """What reduces gradients that ``optimizer`` steps with, over all ranks of ``group`` and perhaps more.

    Wherever its ranks have gone instead of making this step, that is where they come next.
    """
    guarded = _guard(optimizer, _parameters(optimizer))
    for reference, places in zip(guarded.reducers, guarded.places, strict=True):
        reducer = reference()
        if reducer is None or not any((x := guarded.entries[i]) is not None and x.is_alive for i in places):
            continue
        if reducer.all_step and set(group.ranks) <= set(reducer.group.ranks):
            return reducer
    return None


def _require_reduced(parameters: Sequence[Tensor], guarded: Guarded) -> None:
    reducers = list(_reducers(guarded))
    for reducer, _ in reducers:
        problem = _no_gradient(reducer)
        if problem is not None:
            raise RuntimeError(f"optimizer.step() {problem}")
    doubts = [(reducer, _doubts(reducer, parameters, guarded.entries, its)) for reducer, its in reducers]
    for reducer, its in doubts:
        if its:
            _require_alike(reducer, its)


def _no_gradient(reducer: Reduction) -> str | None:
    """Why there cannot be a gradient to step with, or None."""
    if reducer.plan is not None and reducer.plan.declared:
        return "inside micro_batches(): the gradient is there when the loop has ended"
    if reducer.given_up:
        return (
            "after a step that was given up, by an exception or by leaving the loop over micro_batches() "
            "before its end: there is no gradient. In zip(), micro_batches() has to come first"
        )
    return None


def _doubts(
    reducer: Reduction,
    parameters: Sequence[Tensor],
    entries: Sequence[GuardedParameter | None],
    places: Sequence[int],
) -> list[Doubt]:
    """Those of the gradients, of parameters ``places``, that ``reducer`` may not have reduced."""
    found: list[Doubt] = []
    newest = -1 if any(reducer.local) else reducer.num_reductions
    for i in places:
        entry = entries[i]
        if entry is None or (entry.reductions_used < newest and entry.position is not None):
            continue
        gradient = parameters[i].grad
        problem = None if gradient is None else entry.problem(gradient)
        if problem is not None and gradient is not None:
            found.append((entry, gradient, problem))
    return found


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    parameters = _parameters(optimizer)
    guarded = _guard(optimizer, parameters)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:  # else it may be what exchanges the gradients
        _require_reduced(parameters, guarded)
    update = None
    for reducer, places in _reducers(guarded):
        trained = next((x for i in places if (x := guarded.entries[i]) and x.position is not None), None)
        problem = None if trained is None else reducer.refusal(optimizer)
        if trained is not None and problem is not None:
            raise RuntimeError(f"optimizer.step(): parameter {trained.name!r} {problem}")
    for reducer, _ in _reducers(guarded):
        reducer.steps_now()
    for reducer, _ in _reducers(guarded):
        update = update or reducer.update(optimizer)
    hidden = any(p.grad is not None and slices_of(p.grad) is not None for p in parameters)
    if update is None and closure is None and not hidden:
        return None
    # Hooks of the user's own come after this one, and may still change gradients: so it is the closure that
    # makes the step, which an optimizer calls before all else.
    instead = partial(_checked, optimizer, closure) if update is None else partial(update, closure)
    return (args[0], instead), {k: v for k, v in kwargs.items() if k != "closure"}


def _checked(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` returns. The optimizer finds the gradients that it may use, and those alone."""
    found = None
    if closure is not None:
        found = closure()
        require_reduced(optimizer)
    for slices, stand_ins in by_slices([p.grad for p in _parameters(optimizer) if p.grad is not None]):
        slices.used(stand_ins)
    return found


def _require_alike(reducer: Reduction, doubts: Sequence[Doubt]) -> None:
    """Raise, on all ranks, unless they have the same gradients, which no exchange has seen. Collective."""
    unlike: int | None = 0
    if reducer.all_step and not reducer.sharded and doubts[0][0].is_alive:
        unlike = reducer.first_unlike([(entry.name, gradient) for entry, gradient, _ in doubts])
    if unlike is not None:
        entry, _, problem = doubts[unlike]
        raise RuntimeError(f"optimizer.step(): parameter {entry.name!r} {problem}")
    for entry, _, _ in doubts:
        entry.is_alike()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = _parameters(optimizer)
    guarded = _guard(optimizer, parameters)
    for reducer, places in _reducers(guarded):
        num_reductions = reducer.num_reductions
        for i in places:
            if (entry := guarded.entries[i]) is not None:
                entry.used(parameters[i].grad, num_reductions)
    for reducer, _ in _reducers(guarded):
        reducer.stepped()


def _reducers(guarded: Guarded) -> Iterator[tuple[Reduction, list[int]]]:
    """Each once, in the order of the parameters, which is the same on all ranks."""
    for reference, places in zip(guarded.reducers, guarded.places, strict=True):
        reducer = reference()
        if reducer is not None:
            yield reducer, places


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
