"""``instep.Loader``: a data set for declared steps, which gives each micro-batch its samples, on any rank.

torch's ``DataLoader`` reads a rank's share of an epoch, so with another number of ranks every micro-batch has
other samples, and after a restart in the middle of an epoch the first ones come again. Here the samples of a
micro-batch follow from its place in the stream alone (``data/order.py``), and a rank asks for those of its
own micro-batches:

    step 7, micro-batch    0   1   2   3   4   5   6   7
    on two ranks           rank 0 ......   rank 1 ......     the same samples in each,
    on three               rank 0 ..   rank 1 ..   rank 2    whichever rank reads

What a data set draws while it reads a sample (a crop, a flip) is keyed by (seed, epoch, sample), so it is the
same too, in whichever worker process. The reading itself, in worker processes and ahead of time, is a
``DataLoader``'s, whose batches are the micro-batches that this rank has in this step and those to come.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from instep.data.length_groups import LengthGroups
from instep.data.order import MASK_64, sample_at
from instep.ordered.alignment import align
from instep.ordered.generators import KeyedGenerator, default_generator, generators_in, global_generators
from instep.ordered.keys import derive

WINDOW = 64  # micro-batches among which samples of similar lengths are looked for
SHOWN = 8  # samples that an error names
LOST = "DataLoader worker", "DataLoader timed out"  # so torch begins to say that a process has died, or hangs
HOW = "iterate over model.micro_batches(loader), and read micro_batch.data in that loop"


class Place(NamedTuple):
    """A sample as it is read: its number, and the epoch that keys what is drawn for it."""

    epoch: int
    sample: int


@dataclass(frozen=True)
class Deal:
    """Which samples of a stream, given by ``sample_at``, are in which micro-batch."""

    num_samples: int
    batch_size: int
    micro_batch_size: int
    sample_at: Callable[[int], int]

    def places(self, position: int, micro_batch: int) -> list[Place]:
        """The samples of a micro-batch of the step that begins at ``position``."""
        first = position + micro_batch * self.micro_batch_size
        return [
            Place(at // self.num_samples, self.sample_at(at))
            for at in range(first, first + self.micro_batch_size)
        ]


class Loader:
    """Reads ``dataset`` for declared steps: ``for micro_batch in model.micro_batches(loader)``.

    Each micro-batch has its samples in ``micro_batch.data``: the same on any number of ranks. Every epoch has
    each sample once, in an order of its own; the stream of epochs has no end, and a step may have samples of
    two of them. ``position`` counts the samples of all steps so far; it is all that has to be kept to go on
    in the middle of an epoch, on any number of ranks (``instep.save(..., data_cursor=loader.position)``).

    Worker processes begin with the first step, and read ahead for the steps to come. ``close`` ends them.

    Args:
        dataset: with ``len()`` and ``dataset[i]``: torch's, Hugging Face's, a list, an array. One that has
            ``__getitems__`` is asked for a micro-batch at once. What it draws from the generators of torch,
            Python, numpy, or from those it keeps, is keyed by (``seed``, epoch, sample), or by the first
            sample of those that it reads at once.
        batch_size: samples in a step, over all ranks; a multiple of ``micro_batch_size``.
        micro_batch_size: samples in a micro-batch. The bits of training depend on both sizes.
        num_workers: processes that read for this rank; 0 reads in this one.
        seed: of the order, and of what the data set draws.
        shuffle: False reads the samples in the order of their numbers.
        lengths: of each sample; those of similar lengths then come into one micro-batch.
        collate_fn: makes a micro-batch of a list of samples; by default torch's ``default_collate``, which
            stacks. What it draws is keyed as a data set's, by the first sample.
        weigh: the ``weight`` of a micro-batch, an int, from its data: ``lambda x: int(x["mask"].sum())``.
        pin_memory: in page-locked memory, from which a GPU copies faster.
        prefetch_factor: micro-batches that each worker process reads ahead.
        timeout_s: how long to wait for a worker process.
        multiprocessing_context: how worker processes begin: "fork" (the default), "forkserver" or "spawn",
            which a data set that uses CUDA needs.

    Raises:
        TypeError: ``dataset`` has no length, or no samples by number.
        ValueError: it is empty, or a size, the seed or the number of lengths does not fit.

    Example:
        >>> model = instep.DataParallel(model)
        >>> samples = torch.utils.data.TensorDataset(x, y)
        >>> loader = instep.Loader(samples, batch_size=32, micro_batch_size=4)
        >>> for step in range(loader.num_steps(epochs=1)):
        ...     for micro_batch in model.micro_batches(loader, step=step):
        ...         inputs, targets = micro_batch.data
        ...         loss_function(model(inputs), targets).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> loader.position, loader.epoch  # 2 steps of 32 samples
        (64, 1)
        >>> loader.load_state_dict(loader.state_dict())
        >>> loader.close()
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        micro_batch_size: int,
        *,
        num_workers: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        weigh: Callable[[Any], int] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        timeout_s: float = 300.0,
        multiprocessing_context: Any = "fork",  # also in a rank that a forkserver has started
    ) -> None:
        self.dataset = dataset
        self.num_samples = _require_samples(dataset)
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.num_micro_batches = _require_multiple(batch_size, micro_batch_size)
        if not 0 <= seed <= MASK_64:
            raise ValueError(f"expected 0 <= seed < 2**64, got {seed}: choose a seed that fits in 64 bits")
        self.seed, self.shuffle = seed, shuffle
        order = _order(self.num_samples, micro_batch_size, seed, shuffle, lengths)
        self.deal = Deal(self.num_samples, batch_size, micro_batch_size, order)
        # That of lengths depends on them, and on the size of what is grouped.
        self.groups = None if lengths is None else _digest(micro_batch_size, lengths)
        self.identity = _digest(self.num_samples, batch_size, micro_batch_size, seed, shuffle, lengths)
        self.weigh = weigh
        self._position = 0
        self._share = _Share(self.deal)
        self._options: dict[str, Any] = {
            "dataset": KeyedSamples(dataset, seed, collate_fn or default_collate),
            "batch_sampler": self._share,
            "num_workers": num_workers,
            "collate_fn": itemgetter(0),  # it is collated already, where what that draws is keyed
            "pin_memory": pin_memory,
            "timeout": timeout_s if num_workers else 0,
            "prefetch_factor": prefetch_factor if num_workers else None,
            "persistent_workers": num_workers > 0,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
            "generator": torch.Generator(),  # from which it takes a number, and not from the user's
        }
        self._loader: DataLoader[Any] | None = None
        self._stream: Iterator[Any] | None = None
        self._next: tuple[int, tuple[int, ...], int] | None = None  # that the stream gives

    @property
    def position(self) -> int:
        """Samples of all steps so far. Set it, alike on all ranks and between two steps, to go on there."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if type(position) is not int or position < 0:
            raise ValueError(f"expected a position of at least 0, a number of samples, got {position!r}")
        self._position = position

    @property
    def epoch(self) -> int:
        """In which the next step begins."""
        return self._position // self.num_samples

    def num_steps(self, epochs: float) -> int:
        """Steps, from the beginning, after which every sample was read at least ``epochs`` times.

        Args:
            epochs: how often, also in parts: 0.5.

        Returns:
            That many, rounded up.
        """
        return -int(-epochs * self.num_samples // self.batch_size)

    def read(self, own: Sequence[int]) -> Iterator[tuple[Any, int]]:
        """Data and weight of each of the micro-batches ``own`` of the next step. For ``micro_batches``.

        Args:
            own: the numbers of this rank's micro-batches.

        Yields:
            (data, weight) of each.

        Raises:
            RuntimeError: a worker process has died, or did not answer in time.
        """
        for k in range(len(own)):
            data = self._take(tuple(own), k)
            last = k + 1 == len(own)
            self._next = self._position + last * self.batch_size, tuple(own), 0 if last else k + 1
            align([x for x in tree_leaves(data) if isinstance(x, Tensor) and x.is_cpu and x.is_leaf])
            yield data, 1 if self.weigh is None else self.weigh(data)

    def advance(self) -> None:
        """The step has been made: go on to the next. For ``micro_batches``."""
        self._position += self.batch_size

    def close(self) -> None:
        """End the worker processes; the next step starts others. Also happens when it is collected."""
        # Else they end with the last traceback that has seen the stream.
        shut_down = getattr(self._stream, "_shutdown_workers", None)
        self._stream = self._loader = self._next = None
        if shut_down is not None:
            shut_down()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and in which stream, as JSON."""
        names = ("position", "num_samples", "seed", "shuffle", "groups")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` says.

        Args:
            state: of ``state_dict``.

        Raises:
            ValueError: it is of another stream.
        """
        for name, mine in self.state_dict().items():
            if name != "position" and state[name] != mine:
                raise ValueError(
                    f"this state is of a Loader with {name} {state[name]!r}, and this one has {mine!r}: "
                    "samples would be read twice or never; use the data set and options of then, or begin "
                    "anew"
                )
        self.position = state["position"]

    def _take(self, own: tuple[int, ...], k: int) -> Any:
        """What was read for micro-batch ``own[k]`` of the next step."""
        try:
            if self._stream is None or self._next != (self._position, own, k):
                self._share.start = self._position, own, k
                if self._loader is None:
                    self._loader = DataLoader(**self._options)
                self._stream = iter(self._loader)
            return next(self._stream)
        except BaseException as error:
            self.close()  # what comes next from it is not known
            if isinstance(error, RuntimeError) and str(error).startswith(LOST):
                raise RuntimeError(self._lost(own[k], error)) from None
            raise

    def _lost(self, micro_batch: int, error: RuntimeError) -> str:
        samples = [place.sample for place in self.deal.places(self._position, micro_batch)]
        shown = ", ".join(map(str, samples[:SHOWN])) + (", ..." if len(samples) > SHOWN else "")
        return (
            "a Loader's worker process died, or did not answer, while the next to come was micro-batch "
            f"{micro_batch}, samples {shown} of {type(self.dataset).__name__}: {str(error).splitlines()[0]}. "
            "If it was killed by SIGKILL or SIGBUS, memory or shared memory (/dev/shm) was short: use fewer "
            "workers, or a smaller prefetch_factor. If it hangs, num_workers=0 shows where; timeout_s is how "
            "long to wait for a micro-batch"
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"an instep.Loader is not iterated over: {HOW}")

    def __getstate__(self) -> Any:
        raise TypeError("an instep.Loader holds processes and cannot be copied or pickled: use state_dict()")


class _Share:
    """The places of the samples of this rank's micro-batches, from ``start`` on, without an end."""

    def __init__(self, deal: Deal) -> None:
        self._deal = deal
        self.start: tuple[int, tuple[int, ...], int] = 0, (), 0

    def __iter__(self) -> Iterator[list[Place]]:
        position, own, k = self.start
        while own:
            for micro_batch in own[k:]:
                yield self._deal.places(position, micro_batch)
            position, k = position + self._deal.batch_size, 0


class KeyedSamples:
    """The micro-batch of the samples of ``dataset`` at places; what it and ``collate`` draw is keyed by them.

    In this process the generators of the program are then as before; in a worker process no other code draws.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self._own: list[KeyedGenerator] | None = None

    def __getitems__(self, places: Sequence[Place]) -> list[Any]:
        """What is made of the samples at ``places``, in a list of its own, as a DataLoader has it."""
        with self._keyed() as generators:
            samples = self._samples(places, generators)
            self._key(generators, places[0], "collate")
            with _named(self.dataset, places):
                return [self.collate(samples)]

    def _samples(self, places: Sequence[Place], generators: Sequence[KeyedGenerator]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is not None:
            self._key(generators, places[0])
            with _named(self.dataset, places):
                return list(at_once([place.sample for place in places]))
        samples = []
        for place in places:
            self._key(generators, place)
            with _named(self.dataset, [place]):
                samples.append(self.dataset[place.sample])
        return samples

    @contextmanager
    def _keyed(self) -> Iterator[list[KeyedGenerator]]:
        if self._own is None:
            own = *generators_in(self.dataset, "dataset"), *generators_in(self.collate, "collate")
            self._own = [default_generator(), *own]
        generators = [*self._own, *global_generators()]
        before = None if get_worker_info() is not None else [x.save() for x in generators]
        try:
            yield generators
        finally:
            for generator, state in zip(generators, before or (), strict=False):
                generator.restore(state)

    def _key(self, generators: Sequence[KeyedGenerator], place: Place, what: str = "sample") -> None:
        for generator in generators:
            generator.key(derive(self.seed, what, place.epoch, place.sample, generator.name))

    def __getstate__(self) -> Any:
        return {**vars(self), "_own": None}  # to a worker process, which looks for its own


@contextmanager
def _named(dataset: Any, places: Sequence[Place]) -> Iterator[None]:
    """Add to an error of ``dataset`` which sample it is about."""
    try:
        yield
    except Exception as error:
        worker = get_worker_info()
        who = "" if worker is None else f", in worker {worker.id} (pid {os.getpid()})"
        samples = ", ".join(f"{place.sample}{_file_of(dataset, place.sample)}" for place in places[:SHOWN])
        several = "one of samples" if len(places) > 1 else "sample"
        error.add_note(f"{several} {samples} of {type(dataset).__name__}, epoch {places[0].epoch}{who}")
        raise


def _file_of(dataset: Any, sample: int) -> str:
    """The file of ``sample``, where the data set keeps a list of files: " (PATH)"."""
    for listed in getattr(dataset, "__dict__", {}).values():
        if isinstance(listed, list | tuple) and len(listed) > sample:
            first = listed[sample][0] if isinstance(listed[sample], tuple) else listed[sample]
            with suppress(ValueError):  # of a text, which is no path
                if isinstance(first, str | os.PathLike) and os.path.isfile(first):
                    return f" ({os.fspath(first)})"
    return ""


def _require_samples(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"expected a data set with samples by number, got {type(dataset).__name__}: what a rank reads of "
            "a stream cannot be said beforehand; read it into a list or a file of rows, or feed "
            "model.micro_batches(G) by micro_batch.index yourself"
        )
    try:
        num_samples = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"{type(dataset).__name__} has no len(): give it __len__, the number of samples"
        ) from error
    if num_samples < 1:
        raise ValueError(f"expected a data set of at least one sample, got an empty {type(dataset).__name__}")
    return num_samples


def _require_multiple(batch_size: int, micro_batch_size: int) -> int:
    if micro_batch_size < 1 or batch_size < 1 or batch_size % micro_batch_size:
        raise ValueError(
            "expected a batch_size that is a multiple of micro_batch_size, both at least 1, got "
            f"{batch_size} and {micro_batch_size}: the micro-batches of a step have equal sizes"
        )
    return batch_size // micro_batch_size


def _order(
    num_samples: int, micro_size: int, seed: int, shuffle: bool, lengths: Sequence[int] | None
) -> Callable[[int], int]:
    """Which sample stands at a position of the stream."""

    def stream(position: int) -> int:
        return sample_at(position, num_samples, seed) if shuffle else position % num_samples

    if lengths is None:
        return stream
    if len(lengths) != num_samples:
        raise ValueError(f"expected the lengths of {num_samples} samples, got {len(lengths)} of them")
    window = WINDOW * micro_size
    return LengthGroups(lengths, stream, micro_size=micro_size, window=window, seed=seed).sample_at


def _digest(*what: Any) -> int:
    lengths = what[-1]
    text = repr((*what[:-1], lengths if lengths is None else list(map(int, lengths))))
    return zlib.crc32(text.encode())
