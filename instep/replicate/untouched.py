"""A trial step that leaves no trace: model, gradients, random numbers and the wrapper's own books.

Values are written back only where bits differ, because a graph that is still to be walked backwards may hold
them, and would take even the same bits for a change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from instep.step import guard
from instep.step.backward import Backward

# What a step changes in the wrapper; the buckets too, as the first exchange may put them into another order.
REDUCER = (
    "steps",
    "exchanges",
    "given_up",
    "observer",
    "local",
    "buckets",
    "place",
    "_order",
    "_next_order",
    "_reordered",
    "_seen",
    "_expected",
    "_unsteady",
    "_warned_unused",
)
BACKWARD = ("sync", "contract", "_exchanged", "_warned")


class Untouched:
    """A context between two steps; on leaving, all is as it was when it was made.

    Gradients that are there stay where they are: they are taken off their parameters, and the buckets, which
    never write over a gradient that somebody holds, move to other memory.
    """

    def __init__(self, backward: Backward, generators: list[torch.Generator]) -> None:
        self.backward = backward
        self.module = backward.module
        self.reducer = backward.reducer
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._modules = [(m, m.training, dict(m._buffers)) for m in self.module.modules()]
        self._values = [(x, x.detach().clone()) for x in self.module.parameters()]
        self._buffers = [(x, x.detach().clone()) for x in self.module.buffers()]
        self._gradients = [(p, p.grad) for p in self.module.parameters()]
        self._reduced = [(entry, entry.reduced) for entry in map(guard._entries.get, self.reducer.parameters)]
        self._fields = [(self.reducer, REDUCER), (self.backward, BACKWARD)]
        self._before = [{name: copy.copy(getattr(x, name)) for name in names} for x, names in self._fields]

    def __enter__(self) -> Untouched:
        self.reducer._warned_unused = True  # the report says it
        self.reducer.observer = None
        return self

    def __exit__(self, *error: Any) -> None:
        self.reducer.lane.drain()  # it may still write to buckets, or tell the others that this rank failed
        self.begin()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        _write_back(self._values)
        for generator, state in self._generators:
            generator.set_state(state)
        for module, training, _ in self._modules:
            module.training = training
        for entry, reduced in self._reduced:
            entry.reduced = reduced
        self.backward._marks.clear()
        self.backward._watch.active = False
        for (x, _), before in zip(self._fields, self._before, strict=True):
            for name, value in before.items():
                setattr(x, name, value)

    def begin(self) -> None:
        """Buffers as they were, no gradients."""
        for module, _, buffers in self._modules:
            module._buffers.clear()  # forward may have put others in their place
            module._buffers.update(buffers)
        _write_back(self._buffers)
        for parameter, _ in self._gradients:
            parameter.grad = None


def _write_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for x, before in pairs:
            if not torch.equal(_bytes(x), _bytes(before)):
                x.copy_(before)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
