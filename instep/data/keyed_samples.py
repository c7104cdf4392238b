"""The micro-batches that a ``Loader`` is asked for, as they are read: here, or in a worker process.

Whatever draws random numbers while a sample is read is keyed by (seed, epoch, sample) before; tensors go into
memory that is handed over (``launch/handover.py``); an error says which sample it is about, and who read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from instep.data.sample_shards import Shards
from instep.data.shuffled import keyed
from instep.launch.handover import Outgoing
from instep.rng.generators import KeyedGenerator, default_generator, generators_in, global_generators
from instep.rng.keys import derive

SHOWN = 8  # samples that an error names
KNOWN = 64  # beginnings of streams that are remembered


class Place(NamedTuple):
    """A sample as it is read: its number, and the epoch that keys what is drawn for it."""

    epoch: int
    sample: int


class Task(NamedTuple):
    """A micro-batch to be read, of the step that begins at ``position``; none if that is below 0."""

    turn: int  # of the reader: those of an earlier one are not wanted any more
    position: int
    micro_batch: int


class Order(Protocol):
    """Which sample stands at a position of the stream of epochs."""

    def samples_at(self, positions: range) -> list[int]: ...


@dataclass(frozen=True)
class Deal:
    """Which samples of a stream in ``order`` are in which micro-batch."""

    num_samples: int
    batch_size: int
    micro_batch_size: int
    order: Order

    def places(self, position: int, micro_batch: int) -> list[Place]:
        """The samples of a micro-batch of the step that begins at ``position``."""
        first = position + micro_batch * self.micro_batch_size
        stretch = range(first, first + self.micro_batch_size)
        samples = self.order.samples_at(stretch)
        return [Place(at // self.num_samples, sample) for at, sample in zip(stretch, samples, strict=True)]


class KeyedSamples:
    """The micro-batch of a task, of samples of ``dataset``; what it and ``collate`` draw is keyed by them.

    In this process the generators of the program are then as before; in a worker process no other code draws.
    """

    def __init__(
        self,
        dataset: Any,
        deal: Deal,
        seed: int,
        collate: Callable[[list[Any]], Any],
        turn: Any,
        num_pieces: int,  # of memory, that a worker process may have
    ) -> None:
        self.dataset, self.deal, self.seed, self.collate, self.turn = dataset, deal, seed, collate, turn
        self._num_pieces = num_pieces
        self._memory: Outgoing | None = None  # in a worker process
        self._own: list[KeyedGenerator] | None = None
        self._known: dict[tuple[str, int, int], list[int]] = {}
        self._is_plain = is_plain(dataset)

    def __getitems__(self, task: Task) -> list[Any]:
        """``read``, in a list of its own, as a DataLoader has it."""
        return [self.read(task)]

    def read(self, task: Task) -> Any:
        """What is made of the samples of ``task``; None if they are not wanted any more."""
        if task.position < 0 or task.turn != self.turn.value:
            return None
        places = self.deal.places(task.position, task.micro_batch)
        with self._keyed() as generators:
            samples = self._read(task.turn, places, () if self._is_plain else generators)
            if samples is None:
                return None
            self._key(generators, places[0], "collate")
            try:
                return self._collated(samples)
            except Exception as error:
                _name(error, self.dataset, places)
                raise

    def _collated(self, samples: list[Any]) -> Any:
        if get_worker_info() is None:
            return self.collate(samples)
        if self._memory is None:
            self._memory = Outgoing(self._num_pieces)
            default_collate_fn_map[Tensor] = self._stacked  # which torch offers for such
        self._memory.begin()
        return tree_map_only(Tensor, self._memory.moved, self.collate(samples))

    def _stacked(self, batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        """As torch does it, into memory that is used again."""
        first = batch[0]
        alike = all(type(x) is Tensor and x.dtype == first.dtype and not x.requires_grad for x in batch)
        if alike and first.is_cpu and first.layout == torch.strided and not first.is_nested:
            assert self._memory is not None
            out = self._memory.empty((len(batch), *first.shape), first.dtype)
            if out is not None:
                return torch.stack(list(batch), out=out)
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)

    def _read(
        self, turn: int, places: Sequence[Place], generators: Sequence[KeyedGenerator]
    ) -> list[Any] | None:
        """The samples at ``places``; None if they are not wanted any more."""
        at_once = getattr(self.dataset, "__getitems__", None)
        samples, said = [], places
        try:
            if at_once is not None:
                self._key(generators, places[0])
                return list(at_once([place.sample for place in places]))
            for place, keys in zip(places, self._keys(generators, places), strict=True):
                if turn != self.turn.value:
                    return None
                said = [place]
                for generator, key in zip(generators, keys, strict=False):
                    generator.key(key)
                samples.append(self._sample(place, generators))
        except Exception as error:
            _name(error, self.dataset, said)
            raise
        return samples

    def _sample(self, place: Place, generators: Sequence[KeyedGenerator]) -> Any:
        if isinstance(self.dataset, Shards):
            epoch = place.epoch
            return self.dataset.read(epoch, place.sample, lambda i: self._key(generators, Place(epoch, i)))
        return self.dataset[place.sample]

    @contextmanager
    def _keyed(self) -> Iterator[list[KeyedGenerator]]:
        if self._own is None:
            own = *generators_in(self.dataset, "dataset"), *generators_in(self.collate, "collate")
            self._own = [default_generator(), *own]
        if self._is_plain and (self.collate is default_collate or self.collate is torch.stack):
            yield []
            return
        generators = [*self._own, *global_generators()]
        before = None if get_worker_info() is not None else [x.save() for x in generators]
        try:
            yield generators
        finally:
            for generator, state in zip(generators, before or (), strict=False):
                generator.restore(state)

    def _keys(self, generators: Sequence[KeyedGenerator], places: Sequence[Place]) -> list[list[int]]:
        """What to seed each of ``generators`` with at each of ``places``; shards say what they read."""
        if not generators or isinstance(self.dataset, Shards):
            return [[]] * len(places)
        epoch = places[0].epoch
        if epoch != places[-1].epoch:
            return [keys for place in places for keys in self._keys(generators, [place])]
        return keyed(self._bases(generators, epoch, "sample"), [place.sample for place in places])

    def _key(self, generators: Sequence[KeyedGenerator], place: Place, what: str = "sample") -> None:
        if not generators:
            return
        (keys,) = keyed(self._bases(generators, place.epoch, what), [place.sample])
        for generator, key in zip(generators, keys, strict=True):
            generator.key(key)

    def _bases(self, generators: Sequence[KeyedGenerator], epoch: int, what: str) -> Sequence[int]:
        """Where the stream of each begins (splitmix64's), of which a sample takes that of its number."""
        at = what, epoch, len(generators)
        if at not in self._known:
            if len(self._known) > KNOWN:
                self._known.clear()
            self._known[at] = [derive(self.seed, what, epoch, x.name) for x in generators]
        return self._known[at]

    def __getstate__(self) -> Any:
        return {**vars(self), "_own": None, "_known": {}}  # to a worker process, which looks for its own


def is_plain(dataset: Any) -> bool:
    """Whether reading ``dataset`` draws nothing, nor stacking what comes: only torch, numpy or we do it.

    So nothing has to be keyed. The very types, for a subclass may read in a way of its own; a class opts
    in by setting ``draws_nothing``.
    """
    while type(dataset) is Subset and type(dataset.indices) in (list, range):
        dataset = dataset.dataset
    if type(dataset) is TensorDataset:
        return all(type(x) is Tensor for x in dataset.tensors)
    if type(dataset) is np.ndarray:
        return not dataset.dtype.hasobject
    return type(dataset) in (Tensor, range) or "draws_nothing" in vars(type(dataset))


def _name(error: Exception, dataset: Any, places: Sequence[Place]) -> None:
    """Add to an error of ``dataset`` which sample it is about."""
    worker = get_worker_info()
    who = "" if worker is None else f", in worker {worker.id} (pid {os.getpid()})"
    samples = ", ".join(f"{place.sample}{_file_of(dataset, place.sample)}" for place in places[:SHOWN])
    several = "one of samples" if len(places) > 1 else "sample"
    kind = type(dataset).__name__
    error.add_note(f"{several} {samples} of {kind}, epoch {places[0].epoch}{who}")


def _file_of(dataset: Any, sample: int) -> str:
    """The file of ``sample``, where the data set keeps a list of files: " (PATH)"; or its shard."""
    if isinstance(dataset, Shards):
        return f" ({dataset.where(sample)})"
    for listed in getattr(dataset, "__dict__", {}).values():
        if isinstance(listed, list | tuple) and len(listed) > sample:
            first = listed[sample][0] if isinstance(listed[sample], tuple) else listed[sample]
            with suppress(ValueError):  # of a text, which is no path
                if isinstance(first, str | os.PathLike) and os.path.isfile(first):
                    return f" ({os.fspath(first)})"
    return ""
