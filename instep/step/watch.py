"""When does a backward that involves this module begin and end, and under which flag did its forward run?

A parameter's hook knows neither: it may fire inside a nested backward (reentrant checkpointing), and what
it queues for "the end" then comes at the end of the nested one. The gradient of the module's *output*
belongs to the outermost backward, and comes first. So a forward hook on the module leaves a hook on every
output, with whatever was true at that moment (the mark); the first one to fire queues the end. Where
forward was bypassed, the first parameter hook does. An output that is a leaf of the graph gets no hook: a
parameter that forward returns, or an input, outlives the forward, and would collect one each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instep.events import Span
from instep.ordered.hook import Hook

NO_TASK = -1


class Watch:
    """Calls ``reached(mark)`` for every output that backward reaches, then ``ended()`` once.

    ``mark()`` is asked in forward; ``reached(None)`` means that a parameter was reached without any output.
    ``abandoned()`` is called at the next forward, or by ``look_back``, if a backward began but never ended,
    that is, raised.
    ``span("forward")`` and ``span("backward")`` are asked for what times them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mark: Callable[[], Any],
        reached: Callable[[Any], None],
        ended: Callable[[], None],
        abandoned: Callable[[], None],
        span: Callable[[str], Span | None],
    ) -> None:
        self.active = False
        self._task = NO_TASK  # the outermost
        self._mark, self._reached, self._ended, self._abandoned = mark, reached, ended, abandoned
        self._span, self._open = span, dict[str, Span]()
        self.hooks = [
            module.register_forward_pre_hook(Hook(self._before)),
            module.register_forward_hook(Hook(self._after)),
        ]

    def parameter_reached(self) -> None:
        """A parameter's gradient has come; was it announced by an output?"""
        if not self.active:
            self._begin()
            self._reached(None)

    def look_back(self) -> None:
        """If a backward began and never ended, say so now; not from within one."""
        if self.active and torch._C._current_graph_task_id() == NO_TASK:
            self.active = False
            self._abandoned()

    def is_nested(self) -> bool:
        """Whether a backward inside this one runs now, as of a reentrant checkpoint."""
        return self.active and torch._C._current_graph_task_id() != self._task

    def _before(self, module: nn.Module, args: Any) -> None:
        self.look_back()
        self._drop("forward")  # of one that raised
        if torch.is_grad_enabled() and not self.active:  # not what a backward computes again
            self._start("forward")

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stop("forward")
        if not torch.is_grad_enabled():
            return
        mark = self._mark()

        def output_reached(gradient: Tensor) -> None:
            if not self.active:
                self._begin()
            self._reached(mark)

        for tensor in _tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(output_reached)

    def _begin(self) -> None:
        self.active = True
        self._task = torch._C._current_graph_task_id()
        self._start("backward")
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.active = False
        self._stop("backward")
        self._ended()

    def _start(self, name: str) -> None:
        self._drop(name)
        if (span := self._span(name)) is not None:
            self._open[name] = span.begin()

    def _drop(self, name: str) -> None:
        if (left := self._open.pop(name, None)) is not None:
            left.cancel()

    def _stop(self, name: str) -> None:
        if (span := self._open.pop(name, None)) is not None:
            span.end()


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses, and among the attributes of other objects."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            attributes = getattr(leaf, "__dict__", {}).values()
            yield from (value for value in attributes if isinstance(value, Tensor))
