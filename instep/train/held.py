"""What a rank holds in memory, by what it is for: bytes of storages, whatever number of tensors show them.

A tensor says how many bytes it shows, not how many it keeps: ``.grad`` is a view of its bucket, a tied weight
has two names, a sharded parameter is a piece of one flat buffer with padding. So ranges of addresses are
counted, each once, for the first purpose that has it:

    parameters    of the module, trained or frozen; where they are in slices these, and what is gathered now
    gradients     ``.grad``, and the buckets or slices that it lies in between steps
    optimizer     its state: moments, and one number per parameter for the step
    buffers       of the module
    scratch       partial sums of several micro-batches, what waits to be sent, what an exchange receives

Where the ranks of a host have one copy of the weights, each counts its slice of it: added up over the ranks,
that is what the host has.

Activations come and go. Autograd tells of each tensor that it keeps for backward, if it is asked
(``torch.autograd.graph.saved_tensors_hooks``); asking costs some microseconds per tensor, so one forward
beside the training is asked and no step is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from instep.ordered.buckets import Bucket
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.shard import claims
from instep.shard.flat import Flat
from instep.shard.fully import FullySharded
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.space import Space
from instep.shard.unit import Unit

Model = nn.Module | ParameterServer
Ranges = dict[torch.device, list[tuple[int, int]]]  # first address and the one after the last
Key = tuple[torch.device, int]


@dataclass(frozen=True)
class Held:
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


def held(module: nn.Module, optimizer: Optimizer | None = None, model: Model | None = None) -> Held:
    """What this rank holds to train ``module`` with ``optimizer``, wrapped as ``model``. No communication.

    Gradients outside of buckets count while they are there: before ``zero_grad``.
    """
    homes, scratch = exchanged(model)
    spaces = _spaces(module, optimizer)
    found = count(
        parameters=[*module.parameters(), *(x.tensor for space in spaces for x in space.held)],
        gradients=[*homes, *(p.grad for p in module.parameters() if p.grad is not None)],
        optimizer=moments(optimizer),
        buffers=module.buffers(),
        scratch=scratch,
    )
    return replace(found, parameters=found.parameters - sum(map(_of_others, spaces)))


def count(**tensors: Iterable[Tensor]) -> Held:
    """Bytes by purpose, the names being those of ``Held``; memory of two purposes counts for the first."""
    ranges: Ranges = {}
    found, before = {}, 0
    for purpose in (field.name for field in fields(Held)):
        for x in tensors.pop(purpose, ()):
            _add(ranges, x)
        after = sum(map(_covered, ranges.values()))
        found[purpose], before = after - before, after
    if tensors:
        raise TypeError(f"no purpose of memory is called {', '.join(tensors)}")
    return Held(**found)


def exchanged(model: Model | None) -> tuple[list[Tensor], list[Tensor]]:
    """The memory of reduced gradients that ``model`` keeps, and what it needs beside to reduce them."""
    if isinstance(model, ThreadedReplicas):
        shares = model._shares
        first, *others = [[]] if shares is None else shares.buckets
        return _homes(first), [*_spares(first), *(x for own in others for x in (*_homes(own), *_spares(own)))]
    if isinstance(model, FullySharded):
        slices = model.sharding.reducer
        kept = [x for bucket in slices.buckets for x in bucket.kept]
        staged = [x for own in slices.delivery.staging._mine.values() for x in own]
        received = slices.exchange._scratch.values()
        return [bucket.reduced for bucket in slices.buckets], [*kept, *staged, *received]
    if not isinstance(model, DataParallel | ParameterServer):
        return [], []
    reducer = model._reducer
    return _homes(reducer.buckets), [*_spares(reducer.buckets), *reducer.exchange._scratch.values()]


def moments(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """The tensors that ``optimizer`` keeps on this rank."""
    if optimizer is None:
        return iter(())
    if isinstance(optimizer, ShardedOptimizer):
        return _tensors(optimizer.sharded_state_dict()["pieces"])
    return _tensors(optimizer.state)


class Saved:
    """What autograd keeps for backward of what is computed within ``watch``, but for ``known`` tensors.

    ``nbytes`` is that of now, ``peak`` the most there was: each storage once, from when it is first kept
    until the last part of the graph that needs it is gone. Weights that autocast has converted are among
    it, as they are kept like the rest. What a block under ``checkpoint`` computes again is not.
    """

    def __init__(self, known: Iterable[Tensor] = (), units: Sequence[Unit] = ()) -> None:
        """Weights that ``units`` have gathered are known too, and are not kept: no backward may follow then,
        and they go as they do in training."""
        self.nbytes = self.peak = 0
        self._known, self._units = {_key(x) for x in known}, units
        self._uses: dict[Key, int] = {}
        self._lock = threading.RLock()  # backward of a GPU lets go in a thread of its own

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what the forward in here keeps. Of this thread alone."""
        with saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield

    def _keep(self, x: Tensor) -> _Kept:
        if any(_key(x) == _key(unit.flat) for unit in self._units if unit.gathered_bytes):
            return _Kept(torch.empty(0), self)
        # An operator's own output, kept with its history, would keep the operator that keeps it.
        kept = _Kept(x.detach(), self)
        if not kept.nbytes:  # what is known may be gone before the graph is, and others have its place then
            return kept
        with self._lock:
            uses = self._uses.get(kept.key, 0)
            self._uses[kept.key] = uses + 1
            if not uses:
                self.nbytes += kept.nbytes
                self.peak = max(self.peak, self.nbytes)
        return kept

    def let_go(self, kept: _Kept) -> None:
        if not kept.nbytes:
            return
        with self._lock:
            self._uses[kept.key] -= 1
            if not self._uses[kept.key]:
                del self._uses[kept.key]
                self.nbytes -= kept.nbytes

    def counts(self, key: Key) -> bool:
        return key not in self._known


class _Kept:
    """A tensor in the graph, which lives as long as the graph has it."""

    def __init__(self, tensor: Tensor, saved: Saved) -> None:
        self.tensor, self.saved = tensor, saved
        self.key = _key(tensor)
        self.nbytes = (
            sum(x.untyped_storage().nbytes() for x in _parts(tensor)) if saved.counts(self.key) else 0
        )

    def __del__(self) -> None:
        self.saved.let_go(self)


def activations(module: nn.Module, forward: Callable[[], Tensor], inputs: Iterable[Tensor] = ()) -> int:
    """Bytes that ``forward``, with ``module``, keeps for a backward that does not follow.

    Called beside the training: random generators are as before, no gradient is touched. In backward there is
    never more of it than at the end of forward. Parameters, buffers and ``inputs`` are kept anyway.
    """
    units = [space for space in _spaces(module) if isinstance(space, Unit)]
    saved = Saved([*module.parameters(), *module.buffers(), *inputs], units)
    devices = {x.device for x in module.parameters() if x.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), saved.watch():
        forward()
    return saved.peak


def _spaces(module: nn.Module, optimizer: Optimizer | None = None) -> list[Space]:
    """Where sharded parameters live."""
    found = claims.homes(module.parameters())
    if isinstance(optimizer, ShardedOptimizer):
        found += optimizer.shards.spaces
    return list({id(space): space for space in found}.values())


def _of_others(space: Space) -> int:
    """Bytes of one copy that other ranks count."""
    if not isinstance(space, Flat) or not space.one_copy:
        return 0
    return space.flat.nbytes - space.own_bytes


def _homes(buckets: Iterable[Bucket]) -> list[Tensor]:
    return [bucket.home for bucket in buckets]


def _spares(buckets: Iterable[Bucket]) -> list[Tensor]:
    return [x for bucket in buckets for x in bucket.counter._spares]


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


def _parts(x: Tensor) -> list[Tensor]:
    """``x`` as tensors that have a storage."""
    return [x._indices(), x._values()] if x.is_sparse else [x]


def _key(x: Tensor) -> Key:
    return x.device, _parts(x)[-1].untyped_storage().data_ptr()


def _add(ranges: Ranges, x: Tensor) -> None:
    for part in _parts(x):
        storage = part.untyped_storage()
        if part.device.type != "meta" and storage.nbytes():
            first = storage.data_ptr()
            ranges.setdefault(part.device, []).append((first, first + storage.nbytes()))


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """How many addresses are in at least one of ``ranges``."""
    total = end = 0
    for first, last in sorted(ranges):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total
