"""What a wrapper does when forward and backward run, under either contract.

*Declared*: inside ``micro_batches`` every gradient belongs to the open leaf, and the loop says when a leaf
and the step end. *Undeclared*: a backward whose forward ran with synchronisation on is one step; every rank
contributes one leaf, whatever its ``.grad`` has accumulated, and the step ends with the backward.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from instep.events import BATCH_NORM, Span
from instep.ordered.hook import weakly
from instep.step import guard
from instep.step.buffers import OPERATION, broadcast_buffers
from instep.step.leaves import DeclaredStep
from instep.step.reduction import Plan
from instep.step.watch import Watch


class Mark(NamedTuple):
    """What was true when a forward ran."""

    sync: bool
    leaf: int | None


class Backward:
    """Steers the reducer by what the hooks of the module and its parameters report.

    ``sync`` is the switch behind ``no_sync``; ``contract`` the one of the last step. ``hooks`` are to be
    removed when the wrapper goes. ``changes`` names what a step changes here.
    """

    changes: ClassVar[tuple[str, ...]] = ("sync", "contract", "_exchanged", "_warned")

    def __init__(self, declared: DeclaredStep, *, broadcast: bool) -> None:
        self.module = declared.module
        self.reducer = declared.reducer
        self.declared = declared
        self.roster = declared.roster
        self.sync = True
        self.contract: str | None = None
        self._broadcast = broadcast and self.reducer.group.size > 1
        self._exchanged = False  # all that has come since the last optimizer step
        self._warned = False
        self._marks: list[Mark] = []  # of the outputs that backward has come to
        # Hooks live on the module, which may outlive its wrapper: they must not keep it alive.
        self._watch = Watch(
            self.module,
            mark=weakly(self._forward_ran),
            reached=weakly(self._reached),
            ended=weakly(self._ended),
            abandoned=weakly(self._raised),
            span=weakly(self._span),
        )
        self.reducer.is_nested = self._watch.is_nested
        came = weakly(self._gradient_came)
        self._gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(partial(came, i))
            for i, parameter in enumerate(self.reducer.parameters)
        ]
        self.hooks: list[Any] = [*self._watch.hooks, *declared.keys.hooks, *self._gradient_hooks]

    def synchronise(self) -> None:
        """Exchange what ``.grad`` has accumulated, unless that is done. Collective."""
        if self.declared.leaf is not None:
            raise ValueError("sync_gradients() inside micro_batches(): the loop itself exchanges, at its end")
        if not (self._exchanged and self.reducer.exchanges):
            self._begin()
            self._finish()

    def look_back(self) -> None:
        """If the last backward has raised, do now what the next forward would do about it."""
        self._watch.look_back()

    def _span(self, name: str) -> Span:
        leaf, recorder = self.declared.leaf, self.reducer.recorder
        recorder.ensure_step()
        return recorder.span(name, lane="compute", leaf=-1 if leaf is None else leaf.index)

    def _mark(self) -> Mark:
        leaf = self.declared.leaf
        return Mark(self.sync, None if leaf is None else leaf.index)

    def _forward_ran(self) -> Mark:
        self.roster.check()
        self._go_last()
        return self._mark()

    def _go_last(self) -> None:
        """Users' hooks on gradients run before ours, also those that came later: they may edit ``.grad``."""
        for parameter, handle in zip(self.reducer.parameters, self._gradient_hooks, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def _gradient_came(self, i: int, parameter: Tensor) -> None:
        self._exchanged = False
        self._watch.parameter_reached()
        try:
            while self._marks:
                self._obey(self._marks.pop())
            self.declared.gradient_came()
            hooks = parameter._post_accumulate_grad_hooks
            # A hook that has returned something has left none, and torch is about to say so.
            is_last = bool(hooks) and next(reversed(hooks)) == self._gradient_hooks[i].id
            self.reducer.arrived(i, settles=is_last)
        except BaseException:
            self.reducer.leave()
            raise

    def _reached(self, mark: Mark | None) -> None:
        """Backward has come to an output of the forward that left ``mark``, or (None) of no forward.

        That counts when a gradient comes: ``autograd.grad`` reaches outputs too, and accumulates none.
        """
        self._marks.append(mark or self._mark())

    def _obey(self, mark: Mark) -> None:
        """Begin the exchange if forward wanted one; check that this backward belongs to that forward."""
        now = self._mark()
        if mark.leaf != now.leaf:
            raise ValueError(
                f"backward in {_leaf_name(now.leaf)} went into the forward of {_leaf_name(mark.leaf)}: in a "
                "declared step each micro-batch has a loss of its own, with backward inside the loop"
            )
        if now.leaf is not None:
            return
        if mark.sync != now.sync and not self._warned:
            self._warned = True
            warnings.warn(
                f"no_sync was {_on(not mark.sync)} in forward and {_on(not now.sync)} in backward; forward's "
                f"decides, as in DDP: this backward is {'' if mark.sync else 'not '}synchronised",
                stacklevel=2,
            )
        if mark.sync and self.reducer.plan is None:
            self._begin()

    def _ended(self) -> None:
        self._marks.clear()
        self.reducer.backward_ended()
        if self.declared.leaf is None and self.reducer.plan is not None:
            self._finish()

    def _raised(self) -> None:
        """A backward began and never ended."""
        self._marks.clear()
        self.reducer.backward_ended()
        if self.declared.leaf is None:
            self.reducer.leave()

    def _begin(self) -> None:
        self.contract = "undeclared"
        size = self.reducer.group.size
        self.reducer.begin(Plan(False, size, [[r] for r in range(size)]), lambda: 1)
        self.reducer.open_leaf(self.reducer.group.rank, last=True)

    def _finish(self) -> None:
        try:
            self.reducer.close_leaf()
            self.reducer.finish()
        except BaseException:
            self.reducer.leave()
            raise
        guard.reduced(self.reducer)
        self._exchanged = True
        if self._broadcast and any(True for _ in self.module.buffers()):
            group = self.reducer.group
            with self.reducer.recorder.span(BATCH_NORM, lane="host"):
                self.reducer.lane.submit(OPERATION, lambda: broadcast_buffers(self.module, group)).wait()


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _leaf_name(leaf: int | None) -> str:
    return "no micro-batch" if leaf is None else f"micro-batch {leaf}"
