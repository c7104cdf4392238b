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
from instep.verify.subject import Subject


class Untouched:
    """A context between two steps; on leaving, all is as it was when it was made.

    Gradients that are there stay where they are: they are taken off their parameters, and the buckets, which
    never write over a gradient that somebody holds, move to other memory. Of those that lie in slices, whose
    memory is the wrapper's own (``Subject.memory``), there is a copy meanwhile, as of all weights.
    """

    def __init__(self, subject: Subject, generators: list[torch.Generator]) -> None:
        self.backward = subject.backward
        self.module = self.backward.module
        self.reducer = self.backward.reducer
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._modules = [(m, m.training, dict(m._buffers)) for m in self.module.modules()]
        self._values = _with_copies([*(value.tensor for value in subject.values), *subject.memory])
        self._buffers = _with_copies(self.module.buffers())
        self._gradients = [(p, p.grad) for p in self.module.parameters()]
        self._reduced = [(entry, entry.reduced) for entry in guard.entries_of(self.reducer.parameters)]
        self._books = [
            (x, {name: copy.copy(getattr(x, name)) for name in x.changes})
            for x in (self.reducer, self.backward)
        ]

    def __enter__(self) -> Untouched:
        self.reducer.hush()  # the report says it
        return self

    def __exit__(self, *error: Any) -> None:
        self.reducer.lane.drain()  # it may still write to buckets, or tell the others that this rank failed
        self.backward.look_back()
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
        for x, before in self._books:
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


def _with_copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.detach().clone()) for x in tensors]


def _write_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for x, before in pairs:
            if not torch.equal(_bytes(x), _bytes(before)):
                x.copy_(before)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
