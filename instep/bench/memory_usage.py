"""A rank's memory by purpose: bytes of storages, each counted once for any number of tensors.

A tensor says how many bytes it shows, not how many it keeps: ``.grad`` is a view of its bucket, a tied weight
has two names, a sharded parameter is a piece of one flat buffer with padding. So ranges of addresses are
counted, each once, for the first purpose that has it:

    parameters    of the module, trained or frozen; where they are in slices these, and what is gathered now
    gradients     ``.grad``, and the buckets or slices that it lies in between steps
    optimizer     its state: moments, and one number per parameter for the step
    buffers       of the module
    scratch       partial sums of several micro-batches, what waits to be sent, what an exchange receives

Activations come and go, and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.state.homes import homes, offered
from instep.timeline.intervals import total_ns, union

Ranges = dict[torch.device, list[tuple[int, int]]]  # first address and the one after the last


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that one rank holds from step to step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    scratch: int = 0

    @property
    def state(self) -> int:
        """What the formulas speak of: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


def memory_usage(module: nn.Module, optimizer: Optimizer | None = None, model: Any = None) -> MemoryUsage:
    """What this rank holds to train ``module`` with ``optimizer``, wrapped as ``model``. No communication.

    Gradients outside of buckets count while they are there: before ``zero_grad``.
    """
    wrapped, divided = offered(model), offered(optimizer)
    there = homes(module.parameters()) + ([] if divided is None else list(divided.homes))
    there = list({id(x): x for x in there}.values())
    alone = (optimizer,) if isinstance(optimizer, Optimizer) else ()
    steppers = alone if divided is None else divided.locals
    return count(
        parameters=[
            *module.parameters(),
            *(x for home in there for x in (*(held.tensor for held in home.held), *home.gathered)),
        ],
        gradients=[
            *(() if wrapped is None else wrapped.gradients()),
            *(p.grad for p in module.parameters() if p.grad is not None),
        ],
        optimizer=[x for local in steppers for x in _tensors(dict(local.state))],
        buffers=module.buffers(),
        scratch=() if wrapped is None else wrapped.scratch(),
    )


def count(**tensors: Iterable[Tensor]) -> MemoryUsage:
    """Bytes by purpose, named as in ``MemoryUsage``; memory of two purposes counts for the first."""
    ranges: Ranges = {}
    found, before = {}, 0
    for purpose in (field.name for field in fields(MemoryUsage)):
        for x in tensors.pop(purpose, ()):
            _add(ranges, x)
        after = sum(total_ns(union(its)) for its in ranges.values())
        found[purpose], before = after - before, after
    if tensors:
        raise TypeError(f"no purpose of memory is called {', '.join(tensors)}")
    return MemoryUsage(**found)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _add(ranges: Ranges, x: Tensor) -> None:
    storage = x.untyped_storage()
    if x.device.type != "meta" and storage.nbytes():
        first = storage.data_ptr()
        ranges.setdefault(x.device, []).append((first, first + storage.nbytes()))
