"""The micro-batches that a ``Loader`` is asked for, as they are read: here, or in a worker process.

Whatever draws random numbers while a sample is read is keyed by (seed, epoch, sample) before; tensors go into
memory that is handed over (``launch/handover.py``); an error says which sample it is about, and who read it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from instep.data.order import GOLDEN_GAMMA, mix
from instep.data.sample_shards import Shards
from instep.launch.handover import Outgoing
from instep.rng.generators import KeyedGenerator, default_generator, generators_in, global_generators
from instep.rng.keys import derive

SHOWN = 8  # samples that an error names
PLAIN = (str, int, float)
stream_of = lru_cache(maxsize=64)(derive)  # splitmix64's, of which a sample takes the key of its number


class Place(NamedTuple):
    """A sample as it is read: its number, and the epoch that keys what is drawn for it."""

    epoch: int
    sample: int


FIRST_SAMPLE = -1


class Task(NamedTuple):
    """A micro-batch to be read, of the step that begins at ``position``; none if that is below 0.

    ``FIRST_SAMPLE`` is a batch of the first sample alone, or None if that fails.
    """

    turn: int  # of the reader: those of an earlier one are not wanted any more
    position: int
    micro_batch: int


@dataclass(frozen=True)
class Deal:
    """Which samples of a stream are in which micro-batch; ``order.samples_at(positions)`` says its order."""

    num_samples: int
    batch_size: int
    micro_batch_size: int
    order: Any

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
        shared: Any,
        num_pieces: int,  # of memory, that a worker process may have
    ) -> None:
        """``shared`` has the turn of the reader, then for each worker process the sample that it reads, -1
        for none."""
        self.dataset, self.deal, self.seed, self.collate, self.shared = dataset, deal, seed, collate, shared
        self._num_pieces = num_pieces
        self._memory: Outgoing | None = None  # in a worker process
        self._own: list[KeyedGenerator] | None = None
        self._is_plain = is_plain(dataset)
        self.draws = not self._is_plain or (collate is not default_collate and collate is not torch.stack)

    def __getitems__(self, task: Task) -> list[Any]:
        """``read`` in a worker process, in a list of its own, as a DataLoader has it."""
        try:
            found = self.read(task)
        except Exception as error:
            found = Failed(error)
        self._tell(-1)  # not where the process ends in a sample
        return [found]

    def _tell(self, sample: int) -> None:
        """Say which sample this worker process reads, for when it never answers."""
        if (worker := get_worker_info()) is not None:
            self.shared[1 + worker.id] = sample

    def read(self, task: Task) -> Any:
        """What is made of the samples of ``task``; None if they are not wanted any more."""
        if task.position < 0 or task.turn != self.shared[0]:
            return None
        if task.micro_batch != FIRST_SAMPLE:
            return self._read(task, self.deal.places(task.position, task.micro_batch))
        try:
            return self._read(task, self.deal.places(0, 0)[:1])
        except Exception:  # whoever reads that sample for training raises
            return None

    def _read(self, task: Task, places: list[Place]) -> Any:
        said = places
        at_once = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = []
        with self._keyed() as generators:
            own = () if self._is_plain else generators
            try:
                if at_once is not None:
                    self._tell(places[0].sample)
                    self._key(own, *places[0])
                    samples = list(at_once([place.sample for place in places]))
                for place in places if at_once is None else ():
                    if task.turn != self.shared[0]:
                        return None
                    said = [place]
                    samples.append(self._sample(place, own))
                said = places
                self._key(generators, *places[0], "collate")
                return self._collated(samples)
            except Exception as error:
                _name(error, self.dataset, said)
                raise

    def _sample(self, place: Place, generators: Sequence[KeyedGenerator]) -> Any:
        self._tell(place.sample)
        if isinstance(self.dataset, Shards):  # which keys what it reads past, too
            return self.dataset.read(*place, partial(self._key, generators, place.epoch))
        self._key(generators, *place)
        return self.dataset[place.sample]

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

    @contextmanager
    def _keyed(self) -> Iterator[list[KeyedGenerator]]:
        if self._own is None:
            own = *generators_in(self.dataset, "dataset"), *generators_in(self.collate, "collate")
            self._own = [default_generator(), *own]
        if not self.draws:
            yield []
            return
        generators = [*self._own, *global_generators()]
        before = None if get_worker_info() is not None else [x.save() for x in generators]
        try:
            yield generators
        finally:
            for generator, state in zip(generators, before or (), strict=False):
                generator.restore(state)

    def _key(
        self, generators: Sequence[KeyedGenerator], epoch: int, sample: int, what: str = "sample"
    ) -> None:
        for generator in generators:
            begin = stream_of(self.seed, what, epoch, generator.name)
            generator.key(mix(begin + sample * GOLDEN_GAMMA))

    def __getstate__(self) -> Any:
        return {**vars(self), "_own": None}  # to a worker process, which looks for its own


class WorkerTraceback(Exception):
    """The traceback of a worker process, as text."""


class Failed:
    """What a worker process has raised, to be raised where its data is waited for, with its traceback once.

    torch would put the traceback into the message, which is printed several times.
    """

    def __init__(self, error: Exception) -> None:
        self.kind, self.notes = type(error), getattr(error, "__notes__", [])
        args = error.__reduce__()[1]  # with the file of an OSError
        self.args = args if all(isinstance(x, PLAIN) for x in args) else (str(error),)
        if "<locals>" in self.kind.__qualname__ or self.kind is StopIteration:  # the one cannot be pickled
            self.kind, self.args = RuntimeError, (f"{self.kind.__name__}: {error}",)
        self.trace = "".join(traceback.format_exception(error))

    def reraise(self) -> NoReturn:
        """Raise an error of its kind, or ``RuntimeError`` where that takes other arguments."""
        try:
            error = self.kind(*self.args)
        except Exception:
            error = RuntimeError(f"{self.kind.__name__}: {', '.join(map(str, self.args))}")
        for note in self.notes:
            error.add_note(note)
        raise error from WorkerTraceback(f"\n{self.trace}")


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
    error.add_note(f"{several} {samples} of {type(dataset).__name__}, epoch {places[0].epoch}{who}")


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
