"""The torch.distributed process group "shm", for ranks that share a host.

Operations run one at a time, in the order of their calls: synchronous ones in the caller's thread,
asynchronous ones in the group's thread, while the caller goes on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame

from instep.memory import Segment, as_bytes
from instep.net.hang_report import FlightRecorder
from instep.net.lane import Lane, Work
from instep.net.peers import Peer
from instep.shm import collectives
from instep.shm.call import NOWHERE, Location, describe_call
from instep.shm.collectives import Operation, is_native, reduction_name
from instep.shm.group_segment import FAILED, LEFT, PIPELINE, GroupSegment
from instep.shm.heap import Heap, is_plain
from instep.shm.mailboxes import Mailboxes
from instep.shm.point_to_point import PointToPoint
from instep.shm.rounds import Rounds

NAME = "shm"
NO_TIMEOUT = timedelta(0)  # what torch passes where a caller gave none
# Its stub has overloads that only the C++ methods take.
ProcessGroup: Any = dist.ProcessGroup
Task = tuple[Operation, Callable[[], None]]


class ShmGroup(ProcessGroup):
    """A group of ranks that share one segment; ``table[r]`` is the process of group rank r.

    Beyond torch's methods: ``allocate`` gives memory that the peers map, in which ``allreduce`` copies
    nothing; ``map_all`` maps that of all ranks; ``publish`` shows the bytes of every rank; ``mailboxes`` has
    messages that are read where they lie. ``peers`` is the liveness of the ranks, ``label`` the name of the
    next operation in errors.

    After an error every further operation raises it again: it would be paired with another one. Errors are
    ``PeerLost``, ``Desync``, and ``TypeError`` or ``ValueError`` for arguments, before anything is sent.
    """

    # torch asks these of a backend; ``_get_backend`` says that the group is its own.
    supports_splitting = supports_coalescing = False

    def __init__(
        self,
        shared: GroupSegment,
        table: Sequence[Peer],
        timeout: timedelta,
        flight: FlightRecorder | None = None,
    ) -> None:
        super().__init__(shared.rank, shared.size)
        self.label: str | None = None
        self._rounds = Rounds(shared, table, timeout.total_seconds(), flight)
        self.peers = self._rounds.peers
        self._heap = Heap(self._rounds)
        self._lane = Lane(f"instep shm group, rank {table[shared.rank].rank}")
        self._messages = PointToPoint(self._rounds, self._heap)
        self.mailboxes = Mailboxes(self._rounds, self._heap, PIPELINE)
        self._name = self._description = ""
        self._close = weakref.finalize(self, _close, shared, self._lane, self._messages)

    def getBackendName(self) -> str:  # noqa: N802 - torch's names, here and below
        return NAME

    def getRank(self) -> int:  # noqa: N802
        return self._rounds.rank

    def getSize(self) -> int:  # noqa: N802
        return self._rounds.size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._description = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _get_backend(self, device: torch.device) -> ShmGroup:
        if device.type != "cpu":  # torch expects ``RuntimeError`` where there is no backend
            raise RuntimeError(f"shm: no backend for tensors on {device.type}: use nccl")
        return self

    get_backend = _get_backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of every wait from now on."""
        self.peers.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group; ranks that wait for this one raise ``PeerLost``."""
        self._close()

    def abort(self) -> None:
        """End the operations in flight with ``PeerLost``, and leave."""
        self.peers.given_up = True
        self._rounds.shared.leave(FAILED, "it has aborted the group")
        self._close()

    def allocate(self, nbytes: int, align: int = 64) -> Segment:
        """Memory that the peers map when they need it; not collective. Tensors in it are reduced in place."""
        return self._heap.allocate(nbytes, align)

    def map_all(self, tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """All ranks' ``tensors``, by rank, flat, mapped into this process. Collective.

        None, on every rank, unless all of them lie in memory from ``allocate``. The ranks must agree on who
        reads and writes what.
        """
        found: list[list[list[Tensor]] | None] = []
        op = self._operation("map_all", dtype=tensors[0].dtype)
        self._run_now(op, lambda: found.append(collectives.map_all(op, tensors)))
        return found[0]

    def publish(self, write: Callable[[Tensor], object], count: int) -> Tensor:
        """Every rank's half of the segment, (W, HALF_BYTES), uint8. Collective, one round.

        ``write(x)`` fills that of this rank, beginning with a header of ``count`` int64 words by which the
        caller finds out whether all ranks published the same thing: calls are not compared here, only
        announced to ranks that call something else. Read only, and valid until this rank calls the operation
        after the next one. Not beside operations in the group's thread.
        """
        rounds, label = self._rounds, self.label or "publish"
        rounds.shared.require_usable()
        try:
            rounds.announce(describe_call("publish", torch.int64, count), label)
            write(rounds.mine())
            rounds.synchronize(label)
        except BaseException as error:
            self._fail(error)
            raise
        rounds.flight.end()
        return rounds.shared.halves[rounds.number & 1]

    def address_of(self, x: Tensor) -> Location:
        """Where ``x`` lies, for the others' ``map_peer``; ``NOWHERE`` if not in memory from ``allocate``."""
        return self._heap.address_of(x)

    def map_peer(self, rank: int, places: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """The tensors of group rank ``rank`` at ``places``, each a ``Location``, flat."""
        label = self.label or "map_peer"
        return [self._heap.map_peer(rank, Location(*place), label).view(dtype) for place in places]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come; every operation does, and names all of them."""
        op = self._operation("barrier", timeout=timeout)
        self._run_now(op, op.synchronize)

    def barrier(self, opts: Any = None) -> ShmWork:
        op = self._operation("barrier", timeout=getattr(opts, "timeout", None))
        return self._start([(op, op.synchronize)], [], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        root = self._root(opts)
        task = self._task("broadcast", tensors[0], collectives.broadcast, tensors, opts, root=root)
        return self._start([task], tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._start([self._all_reduce("all_reduce", x, opts) for x in tensors], tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._start([self._all_reduce("reduce", tensors[0], opts, self._root(opts))], tensors, opts)

    def allgather(self, outputs: list[Any], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._start([self._gather("all_gather", outs, x, opts) for outs, x in pairs], outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> ShmWork:
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self.allgather([output], [x], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced = allgather

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        outs = outputs[0] if outputs else []
        return self._start([self._gather("gather", outs, inputs[0], opts, self._root(opts))], outputs, opts)

    def gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self._start([self._gather("gather", output, x, opts, self._root(opts))], [output], opts)

    gather_into_tensor = gather_single

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ShmWork:
        root, xs = self._root(opts), list[Tensor]()
        if root == self.getRank():
            xs = self._checked(inputs[0] if inputs else [], outputs[0], "input")
        run = partial(collectives.scatter, xs=xs)
        return self._start([self._task("scatter", outputs[0], run, outputs, opts, root=root)], outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[Any], opts: Any = None) -> ShmWork:
        tasks, how = [], reduction_name(opts)
        for out, xs in zip(outputs, inputs, strict=True):
            run = partial(collectives.reduce_scatter, xs=self._checked(xs, out, "input"))
            tasks.append(self._task("reduce_scatter", out, run, [out], opts, reduction=how))
        return self._start(tasks, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter([output], [x], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = reduce_scatter

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        size = self.getSize()
        if not len(outputs) == len(inputs) == size:
            raise ValueError(f"expected {size} outputs and inputs, got {len(outputs)} and {len(inputs)}")
        return self._all_to_all(outputs, inputs, opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> ShmWork:
        size = self.getSize()
        splits = split_bytes(output, size, out_splits), split_bytes(x, size, in_splits)
        return self._all_to_all([output], [x], opts, splits)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> ShmWork:
        return ShmWork(self._messages.send(tensors[0], destination, tag), tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ShmWork:
        return ShmWork(self._messages.receive(tensors[0], [source], tag), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ShmWork:
        others = [rank for rank in range(self.getSize()) if rank != self.getRank()]
        return ShmWork(self._messages.receive(tensors[0], others, tag), tensors)

    def _all_reduce(self, name: str, x: Tensor, opts: Any, root: int = -1) -> Task:
        if x.is_sparse:
            dense = x.to_dense()
            op, reduce_dense = self._all_reduce(name, dense, opts, root)

            def reduce_sparse() -> None:
                reduce_dense()
                x.copy_(dense.to_sparse(x.sparse_dim()))

            return op, reduce_sparse
        how, location = reduction_name(opts), NOWHERE
        if root < 0 and is_native(x.dtype, how, self.getSize()):
            location = self._heap.address_of(x)
        fields = {"reduction": how, "root": root, "location": location}
        return self._task(name, x, collectives.all_reduce, [x], opts, **fields)

    def _gather(self, name: str, outs: Any, x: Tensor, opts: Any, root: int = -1) -> Task:
        """Into one tensor or one per rank; with a ``root``, there alone."""
        found = self._checked(outs, x, "output") if root in (-1, self.getRank()) else []
        location = self._heap.address_of(x) if root < 0 else NOWHERE
        run = partial(collectives.all_gather, x=x)
        return self._task(name, x, run, found, opts, root=root, location=location)

    def _all_to_all(
        self, outputs: list[Tensor], xs: list[Tensor], opts: Any, splits: Sequence[list[int]] = ()
    ) -> ShmWork:
        if len(dtypes := {x.dtype for x in (*outputs, *xs)}) > 1:
            raise ValueError(f"expected tensors of one dtype, got {', '.join(map(str, dtypes))}")
        run = partial(collectives.all_to_all, xs=xs, splits=splits)
        return self._start([self._task("all_to_all", xs[0], run, outputs, opts, count=0)], outputs, opts)

    def _checked(self, xs: Any, part: Tensor, kind: str) -> list[Tensor]:
        """``xs`` as a list: W tensors as long as ``part``, or one W times as long."""
        size = self.getSize()
        if isinstance(xs, Tensor):
            require_equal([xs], 1, size * part.numel(), part.dtype, kind)
            return [xs]
        require_equal(xs, size, part.numel(), part.dtype, kind)
        return list(xs)

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank if opts is not None else 0
        if not 0 <= root < self.getSize():
            raise ValueError(f"root: expected a rank of a group of {self.getSize()}, got {root}")
        return root

    def _operation(self, name: str, timeout: timedelta | None = None, **fields: Any) -> Operation:
        seconds = timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else None
        return Operation(self._rounds, self._heap, name, self.label or name, timeout_s=seconds, **fields)

    def _task(
        self,
        name: str,
        x: Tensor,
        run: Callable[[Operation, list[Tensor]], None],
        outputs: Sequence[Tensor],
        opts: Any,
        **fields: Any,
    ) -> Task:
        """An operation on ``x``, and ``run`` on it and the bytes of ``outputs``."""
        for tensor in (x, *outputs):
            if not tensor.is_cpu:
                raise TypeError(f"shm: expected a tensor on the CPU, got one on {tensor.device}: use nccl")
        fields = {"dtype": x.dtype, "count": x.numel(), **fields}
        op = self._operation(name, getattr(opts, "timeout", None), **fields)

        def run_on_bytes() -> None:
            # Tensors made in inference mode can only be written to in it.
            with torch.inference_mode(any(x.is_inference() for x in outputs)), writable(outputs) as found:
                run(op, found)

        return op, run_on_bytes

    def _start(self, tasks: Sequence[Task], outputs: list[Any], opts: Any) -> ShmWork:
        """Run ``tasks`` in this thread, if the caller waits for them, else in the group's."""
        self._rounds.shared.require_own()

        def run() -> None:
            with torch.no_grad():
                for _, task in tasks:
                    self._perform(task)

        label = tasks[0][0].label if tasks else "nothing"
        if getattr(opts, "asyncOp", True):
            return ShmWork(self._lane.submit(label, run), outputs)
        work = ShmWork(self._lane.run(label, run), outputs)
        work.wait()
        return work

    def _run_now(self, op: Operation, function: Callable[[], object]) -> None:
        """In this thread, after the operations before it; it writes to no tensor of a caller."""
        self._rounds.shared.require_own()
        self._lane.run(op.label, partial(self._perform, function)).wait()

    def _perform(self, function: Callable[[], object]) -> None:
        self._rounds.shared.require_usable()
        try:
            function()
        except BaseException as error:
            self._fail(error)
            raise
        self._rounds.flight.end()

    def _fail(self, error: BaseException) -> None:
        self._rounds.shared.fail(error)
        self._rounds.flight.end(failed=True)


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, around which ``torch.compile`` breaks its graph, as around the C++ of other backends.

    As ``torch.compiler.disable``, which would import ``torch._dynamo`` with this module, for seconds.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


_OF_INSTEP = {"allocate", "map_all", "publish", "address_of", "map_peer"}  # which no compiled function calls
for _name, _method in list(vars(ShmGroup).items()):
    if isinstance(_method, FunctionType) and not _name.startswith("_") and _name not in _OF_INSTEP:
        setattr(ShmGroup, _name, _never_compiled(_method))


class ShmWork(dist.Work):
    """The handle of an operation: ``work`` with torch's interface; ``tensors`` are its result.

    ``wait`` raises what the operation raised. ``get_future`` is for callers in C++, such as torch's
    DistributedDataParallel; its value is the list of ``tensors``.
    """

    def __init__(self, work: Work, tensors: list[Any]) -> None:
        super().__init__()
        self._work, self._tensors = work, tensors
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until done; True. After ``timeout`` ``RuntimeError``, as in gloo's work."""
        if not self._work.arrive(timeout.total_seconds() if timeout > NO_TIMEOUT else None):
            raise RuntimeError(f"{self._work.operation} did not end within {timeout.total_seconds():g} s")
        self._work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.done()

    def is_success(self) -> bool:
        return self._work.done() and self._work.error is None

    def exception(self) -> BaseException | None:
        return self._work.error

    def result(self) -> list[Tensor]:
        return self._tensors

    def _source_rank(self) -> int:
        return getattr(self._work, "source", -1)

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that C++ can wait for."""
        if self._future is None:
            started: torch.futures.Future[Any] = torch.futures.Future()
            # An exception that is set from Python is a value to C++; one that a callback raises is an error.
            self._future = started.then(self._value)
            # Callbacks may use the group and wait for it, so they run in no thread that its work needs.
            threading.Thread(
                target=self._set, args=(started,), name="instep shm callbacks", daemon=True
            ).start()
        return self._future

    def _set(self, started: torch.futures.Future[Any]) -> None:
        self._work.arrive()
        started.set_result(None)

    def _value(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._work.error is not None:
            raise self._work.error
        return self._tensors


@contextmanager
def writable(xs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of each of ``xs``, (nbytes,); what the block writes there gets into ``xs``."""
    found = [as_bytes(x) for x in xs]
    yield found
    for x, data in zip(xs, found, strict=True):
        if not is_plain(x):
            x.detach().copy_(data.view(x.dtype).view(x.shape))


def require_equal(xs: Sequence[Tensor], count: int, numel: int, dtype: torch.dtype, kind: str) -> None:
    """Raise ``ValueError`` unless ``xs`` are ``count`` tensors of ``numel`` elements of ``dtype``."""
    found = [(x.numel(), x.dtype) for x in xs]
    if found != [(numel, dtype)] * count:
        odd = "; ".join(f"{n} of {name}" for n, name in dict.fromkeys(found))
        raise ValueError(f"{kind}: expected {count} x {numel} elements of {dtype}, got {len(xs)} x ({odd})")


def split_bytes(x: Tensor, size: int, lengths: Sequence[int]) -> list[int]:
    """Bytes of ``x`` for each of ``size`` ranks: equal parts, or ``lengths`` rows.

    Raises:
        ValueError: ``x`` cannot be divided so.
    """
    rows = x.shape[0] if x.dim() else 1
    if lengths and (len(lengths) != size or sum(lengths) != rows or min(lengths) < 0):
        raise ValueError(f"expected {size} splits that sum to {rows} rows, got {list(lengths)}")
    if not lengths and x.numel() % size:
        raise ValueError(f"expected a number of elements that {size} ranks divide, got {x.numel()}")
    return [x.nbytes * n // max(rows, 1) for n in lengths] or [x.nbytes // size] * size


def _close(shared: GroupSegment, lane: Lane, messages: PointToPoint) -> None:
    if not shared.is_own():
        return  # a forked child; its parent goes on
    messages.flush()
    messages.peers.given_up = True  # nothing in flight may outlast the group
    shared.leave(LEFT, f"rank {messages.ranks[shared.rank]} has closed the group")
    lane.close()
    shared.close()
    messages.close()
