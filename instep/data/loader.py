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
``DataLoader``'s, whose batches are the micro-batches that this rank has in this step and those to come. They
are handed to it as tasks of three numbers, and where the samples stand is computed where they are read.

When a loader has to go on elsewhere (a step is made again, on other ranks), workers have tasks that no one
waits for any more. A number that they share with this process says which tasks are still wanted, so they
drop the others, and what that costs is the sample that a worker is in.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.util import Finalize
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.multiprocessing import get_context
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import signal_handling

from instep.data.keyed_samples import FIRST_SAMPLE, SHOWN, Deal, Failed, KeyedSamples, Task
from instep.data.length_groups import LengthGroups
from instep.data.order import MASK_64
from instep.data.sample_shards import ShardOrder, Shards
from instep.data.shuffled import Shuffled
from instep.launch.handover import forget_ended
from instep.launch.rank_exit import Exit, describe_exit
from instep.launch.signals import outlive_stop_signals
from instep.mesh.join import TIMEOUT_S
from instep.mesh.mesh import registered_mesh
from instep.state.alignment import align
from instep.state.sampled_digest import sampled_digest

WINDOW = 64  # micro-batches among which samples of similar lengths are looked for
NUM_HELD = 4  # micro-batches of a worker process that are filled, sent or used at once, besides those ahead
BEFORE_QUEUES = 20  # at exit multiprocessing closes its queues at 10
SOONER = 0.8  # of the mesh's deadline: before the ranks that wait for this one come to theirs
LOOK_S = 2  # seconds between two checks that all worker processes live, while one is waited for
GONE_S = 2.0  # for a process that has given up its memory to end
LATE = "DataLoader timed out"  # how torch's message begins if no worker answers in time
LOST = "DataLoader worker", LATE  # ... if a worker has died, or hangs
PROFILED = "enumerate(DataLoader)#instep.Loader"  # the beginning is what readers of profiles look for


class Loader:
    """Reads ``dataset`` for declared steps: ``for micro_batch in model.micro_batches(loader)``.

    Each micro-batch has its samples in ``micro_batch.data``: the same on any number of ranks. Every epoch has
    each sample once, in an order of its own; the stream of epochs has no end, and a step may have samples of
    two of them. ``position`` counts the samples of all steps so far; it is all that has to be kept to go on
    in the middle of an epoch, on any number of ranks (``instep.save(..., data=loader)``).

    Worker processes begin with the first step, or by ``start``, and read ahead for the steps to come.
    ``close`` ends them.

    Args:
        dataset: with ``len()`` and ``dataset[i]``: torch's, Hugging Face's, a list, an array. One that has
            ``__getitems__`` is asked for a micro-batch at once. What it draws from the generators of torch,
            Python, numpy, or from those it keeps, is keyed by (``seed``, epoch, sample), or by the first
            sample of those that it reads at once. With ``open_shard``, the shards (paths, say). If it has a
            ``name``, an ``instep.Run`` says it; a ``sha256`` of its samples, a text, is part of the contract:
            no run goes on with other samples unnoticed.
        batch_size: samples in a step, over all ranks; a multiple of ``micro_batch_size``.
        micro_batch_size: samples in a micro-batch. The bits of training depend on both sizes.
        num_workers: processes that read for this rank; 0 reads in this one.
        seed: of the order, and of what the data set draws.
        shuffle: False reads the samples in the order of their numbers.
        lengths: of each sample; those of similar lengths then come into one micro-batch.
        open_shard: for samples that are read in sequence: ``open_shard(shard)`` gives those of one of the
            shards, always the same ones in the same order, as an iterable (or rows by number). Shards are
            shuffled and shared out, and what stands in them is read from front to back: have many more of
            them than a step has micro-batches. See ``data/sample_shards.py``.
        sizes: samples in each shard. By default every rank counts them here, which opens each shard and, if
            its samples have no ``len()``, reads it once; ``loader.sizes`` are what to keep for the next time.
        collate_fn: makes a micro-batch of a list of samples; by default torch's ``default_collate``, which
            stacks. What it draws is keyed as a data set's, by the first sample.
        weigh: the ``weight`` of a micro-batch, an int, from its data: ``lambda x: int(x["mask"].sum())``.
        pin_memory: in page-locked memory, from which a GPU copies faster.
        prefetch_factor: micro-batches that each worker process reads ahead. It has memory for four more, and
            uses it again; what a program keeps beyond that comes as torch hands tensors over.
        timeout_s: how long to wait for a worker process; None: a little less than the mesh's deadline, so
            that this rank says which sample is late before others say that this rank is.
        multiprocessing_context: how worker processes begin: "fork" (the default), "forkserver" or "spawn",
            which a data set that uses CUDA needs.

    Raises:
        TypeError: ``dataset`` has no length, or no samples by number.
        ValueError: it is empty, or a size, the seed or the number of lengths does not fit; while reading, a
            shard has not as many samples as its size says.

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
        >>> loader.start()
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
        open_shard: Callable[[Any], Iterable[Any]] | None = None,
        sizes: Sequence[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        weigh: Callable[[Any], int] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        timeout_s: float | None = None,
        multiprocessing_context: Any = "fork",  # also in a rank that a forkserver has started
    ) -> None:
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.num_micro_batches = _require_multiple(batch_size, micro_batch_size)
        if not 0 <= seed <= MASK_64:
            raise ValueError(f"expected 0 <= seed < 2**64, got {seed}: choose a seed that fits in 64 bits")
        self.seed, self.shuffle, self.num_workers = seed, shuffle, num_workers
        if open_shard is not None:
            if not hasattr(dataset, "__getitem__") or isinstance(dataset, str | bytes):
                raise TypeError(f"open_shard: expected a list of shards, got {type(dataset).__name__}")
            dataset = Shards(list(dataset), open_shard, sizes, self.num_micro_batches)
        self.dataset = dataset
        self.num_samples = _num_samples(dataset)
        self.sizes: Sequence[int] | None = dataset.sizes if isinstance(dataset, Shards) else sizes
        order, *grouped = self._order(lengths)
        self.deal = Deal(self.num_samples, batch_size, micro_batch_size, order)
        self.groups = _digest(*grouped) if grouped else None  # that on which their order depends, too
        self.identity = _digest(self.num_samples, batch_size, micro_batch_size, seed, shuffle, *grouped)
        mesh_timeout_s: float = getattr(registered_mesh(), "timeout_s", TIMEOUT_S)
        self.weigh, self.timeout_s = weigh, SOONER * mesh_timeout_s if timeout_s is None else timeout_s
        self._position = 0
        self.digest = 0  # of the first sample, which ranks compare in their first step; 0: none
        self._shared: Any = [0]  # the turn, and the sample that each worker process reads
        if num_workers:
            context = multiprocessing_context
            context = get_context(context) if isinstance(context, str | None) else context
            self._shared = context.RawArray("q", [0, *[-1] * num_workers])
        collate = collate_fn or default_collate
        self._samples = KeyedSamples(
            dataset, self.deal, seed, collate, self._shared, prefetch_factor + NUM_HELD
        )
        num_lane_readers = num_workers if isinstance(dataset, Shards) else 0
        self._share = _Share(self.deal, num_lane_readers, num_first_reads=3 if self._samples.draws else 1)
        self._options = self._data_loader_options(pin_memory, prefetch_factor, multiprocessing_context)
        self._loader: DataLoader[Any] | None = None
        self._end_workers: Callable[[], object] = lambda: None
        self._stream: Iterator[Any] | None = None
        self._next: tuple[int, tuple[int, ...], int] | None = None  # that the stream gives

    def _data_loader_options(self, pin_memory: bool, prefetch_factor: int, context: Any) -> dict[str, Any]:
        options: dict[str, Any] = {
            "dataset": self._samples,
            "batch_sampler": self._share,
            "collate_fn": itemgetter(0),  # it is collated already, where what that draws is keyed
            "pin_memory": pin_memory,
            "generator": torch.Generator(),  # from which it takes a number, and not from the user's
        }
        if self.num_workers:
            options |= {
                "num_workers": self.num_workers,
                "timeout": min(LOOK_S, self.timeout_s),
                "prefetch_factor": prefetch_factor,
                "persistent_workers": True,
                "multiprocessing_context": context,
                "worker_init_fn": _serve,
            }
        return options

    def _order(self, lengths: Sequence[int] | None) -> tuple[Any, ...]:
        """Which sample stands where; and what that depends on, besides the seed and the number of samples."""
        micro_size, seed, num_samples = self.micro_batch_size, self.seed, self.num_samples
        if isinstance(self.dataset, Shards):
            if lengths is not None:
                raise ValueError(
                    "lengths with open_shard: samples of shards stay in their sequence; leave out one"
                )
            sizes, batch_size = self.dataset.sizes, self.batch_size
            shards = ShardOrder(
                sizes, batch_size=batch_size, micro_size=micro_size, seed=seed, shuffle=self.shuffle
            )
            return shards, batch_size, micro_size, sizes
        if self.sizes is not None:
            raise ValueError("sizes are of shards: pass open_shard, which opens one, or leave them out")
        stream = Shuffled(num_samples, seed, self.shuffle)
        if lengths is None:
            return (stream,)
        if len(lengths) != num_samples:
            raise ValueError(f"expected the lengths of {num_samples} samples, got {len(lengths)} of them")
        window = WINDOW * micro_size
        groups = LengthGroups(lengths, stream.samples_at, micro_size=micro_size, window=window, seed=seed)
        return groups, micro_size, list(map(int, lengths))

    @property
    def position(self) -> int:
        """Samples of all steps so far. Set it, alike on all ranks and between two steps, to go on there."""
        return self._position

    @position.setter
    def position(self, position: Any) -> None:
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
        self.digest = 0  # a data set may change with the steps, so only first steps are compared

    def start(self) -> None:
        """Start the worker processes now, and not with the first step.

        For a process that stands by: its first step then does not wait for them.
        """
        if self._stream is None:
            self._share.start = self._shared[0], self._position, (), 0
            self._begin()

    def close(self) -> None:
        """End the worker processes; the next step starts others. Also happens when it is collected."""
        # Else they end with the last traceback that has seen the stream.
        self._stream = self._loader = self._next = None
        self._end_workers()
        forget_ended()
        if isinstance(self.dataset, Shards):
            self.dataset.close()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and in which stream, as JSON."""
        names = ("position", "num_samples", "seed", "shuffle", "groups")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` says, also back, and in the middle of a step, which is then begun anew.

        What worker processes have read ahead is dropped with the next step.

        Args:
            state: of ``state_dict``.

        Raises:
            ValueError: it is of another stream.
        """
        for name, mine in self.state_dict().items():
            if name != "position" and state.get(name) != mine:
                raise ValueError(
                    f"this state is of a Loader with {name} {state.get(name)!r}, and this one has {mine!r}: "
                    "samples would be read twice or never; use the data set and options of then, or begin "
                    "anew"
                )
        self.position = state.get("position")

    def _take(self, own: tuple[int, ...], k: int) -> Any:
        """What was read for micro-batch ``own[k]`` of the next step."""
        try:
            if self._stream is None or self._next != (self._position, own, k):
                self._shared[0] += 1
                self._share.start = self._shared[0], self._position, own, k
                stream = self._begin()
                if self._share.num_first_reads:
                    self._read_digest(stream)
            else:
                stream = self._stream
                for _ in range(0 if k else self._share.num_idle(own)):
                    self._wait_for(stream)
            data = self._wait_for(stream)
            if isinstance(data, Failed):
                data.reraise()
            return data
        except BaseException as error:
            lost = ""
            if is_gone := isinstance(error, OSError) and str(error.filename).startswith(
                "/proc/"
            ):  # its memory
                for worker in getattr(self._stream, "_workers", ()):
                    worker.join(GONE_S if str(worker.pid) in str(error.filename) else 0)
            if is_gone or (isinstance(error, RuntimeError) and str(error).startswith(LOST)):
                lost = self._lost(own[k], str(error))
                self._kill_stuck()
            self.close()  # what comes next from it is not known
            if lost:
                raise RuntimeError(lost) from None
            raise

    def _read_digest(self, stream: Iterator[Any]) -> None:
        """Take the digest of the first sample, if every read of it gives the same."""
        reads = range(self._share.num_first_reads)
        digests = {sampled_digest(self._wait_for(stream)) for _ in reads}
        for _ in range(self._share.num_idle(reads)):
            self._wait_for(stream)
        self.digest = digests.pop() if len(digests) == 1 else 0
        self._share.num_first_reads = 0

    def _kill_stuck(self) -> None:
        """End the worker processes that are in a sample: torch would wait for each of them for seconds."""
        stream: Any = self._stream
        if stream is None:  # they were being started
            return
        for i, worker in enumerate(stream._workers):
            if self._shared[1 + i] >= 0:
                worker.kill()

    def _wait_for(self, stream: Iterator[Any]) -> Any:
        """The next of ``stream``; torch looks for dead workers only when it gives up waiting."""
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                return next(stream)
            except RuntimeError as error:
                if not str(error).startswith(LATE) or time.monotonic() >= until:
                    raise

    def _begin(self) -> Iterator[Any]:
        if "num_workers" not in self._options and not self._options["pin_memory"]:
            # Nothing is left that a DataLoader would do, and it costs time.
            self._stream = map(self._read_here, self._share)
            return self._stream
        if self._loader is None:
            self._loader = DataLoader(**self._options)
        if (before := self._loader._iterator) is not None:  # it waits for the samples that workers are in
            before._timeout = self.timeout_s
        stream: Any = iter(self._loader)
        self._stream = stream
        if before is not None:
            stream._timeout = self._options["timeout"]
        elif getattr(
            stream, "_worker_pids_set", False
        ):  # a worker that dies is noticed here, and not in the middle of a step
            signal_handling._remove_worker_pids(id(stream))
            stream._worker_pids_set = False
        if "num_workers" in self._options:  # also at the exit of a program that does not close this
            self._end_workers = Finalize(self, _end_workers, (self._stream,), exitpriority=BEFORE_QUEUES)
        return stream

    def _read_here(self, task: Task) -> Any:
        with profiler.record_function(PROFILED):
            return self._samples.read(task)

    def _lost(self, micro_batch: int, said: str) -> str:
        """What to say where a worker process has died, or does not answer."""
        samples = [place.sample for place in self.deal.places(self._position, micro_batch)]
        shown = ", ".join(map(str, samples[:SHOWN])) + (", ..." if len(samples) > SHOWN else "")
        told, fix = [], "num_workers=0 shows where; timeout_s is how long to wait for a micro-batch"
        if said.startswith(LATE):
            told.append(f"no answer within {self.timeout_s:g} s")
        else:
            fix = "If memory or shared memory (/dev/shm) was short: fewer workers, a smaller prefetch_factor"
        for i, worker in enumerate(getattr(self._stream, "_workers", ())):
            who, sample = f"worker {i} (pid {worker.pid})", self._shared[1 + i]
            where = "between two samples" if sample < 0 else f"in sample {sample}"
            if worker.exitcode is not None:
                told.append(f"{who} {describe_exit(Exit(i, worker.pid, worker.exitcode), where)}")
            elif said.startswith(LATE) and sample >= 0:
                told.append(f"{who} is still {where}")
        return (
            f"a Loader waited for micro-batch {micro_batch}, samples {shown} of "
            f"{type(self.dataset).__name__}: {'; '.join(told) or said.splitlines()[0]}. {fix}"
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a Loader is not iterated over: for micro_batch in model.micro_batches(loader)")

    def __getstate__(self) -> Any:
        raise TypeError("an instep.Loader holds processes and cannot be copied or pickled: use state_dict()")


def _end_workers(stream: Any) -> None:
    stream._shutdown_workers()
    for worker in stream._workers:
        if worker.is_alive():  # it hangs, and outlives SIGTERM
            worker.kill()
            worker.join()


def _serve(worker: int) -> None:
    """A worker process begins."""
    outlive_stop_signals()


class _Share:
    """The tasks of this rank's micro-batches, from ``start`` on, without an end.

    Worker processes take them by turns. Each of ``num_lane_readers`` is to have the same micro-batches in
    every step, so that it reads on in its shards: tasks of nothing make a step a multiple of their number.
    """

    def __init__(self, deal: Deal, num_lane_readers: int, num_first_reads: int) -> None:
        self._deal, self._num_lane_readers = deal, num_lane_readers
        self.start: tuple[int, int, tuple[int, ...], int] = 0, 0, (), 0
        self.num_first_reads = num_first_reads  # tasks of the first sample, before all others

    def num_idle(self, own: Sequence[int]) -> int:
        """Tasks of nothing in a step with the micro-batches ``own``."""
        return -len(own) % self._num_lane_readers if self._num_lane_readers else 0

    def __iter__(self) -> Iterator[Task]:
        turn, position, own, k = self.start
        if own:
            yield from [Task(turn, 0, FIRST_SAMPLE)] * self.num_first_reads
            yield from [Task(turn, -1, 0)] * self.num_idle(range(self.num_first_reads))
        idle = [Task(turn, -1, 0)] * self.num_idle(own)
        while own:
            yield from (Task(turn, position, micro_batch) for micro_batch in own[k:])
            yield from idle
            position, k = position + self._deal.batch_size, 0


def _num_samples(dataset: Any) -> int:
    by_number = isinstance(dataset, Shards) or hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not by_number:
        raise TypeError(
            f"expected a data set with samples by number, got {type(dataset).__name__}: what a rank reads of "
            "a stream cannot be said beforehand; if it reads files in sequence, pass these and "
            "open_shard=, else read it into a list or a file of rows, or feed model.micro_batches(G) by "
            "micro_batch.index yourself"
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


def _digest(*what: Any) -> int:
    return zlib.crc32(repr(what).encode())
