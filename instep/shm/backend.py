"""The process group "shm": what torch.distributed asks for, on ranks that share a host.

Operations run in the order in which they were called, one at a time: those that the caller waits for in the
caller's own thread, those that it does not in the group's, while the caller goes on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame

from instep.memory import Segment, flat
from instep.mesh.hang_report import FlightRecorder
from instep.mesh.peers import Peer
from instep.shm import collectives
from instep.shm.arguments import (
    check,
    dtype_name,
    on_flat,
    plain,
    require_list,
    require_parts,
    require_splits,
    require_writable,
    split,
    tensors_in,
    writable,
)
from instep.shm.call import NOWHERE, Call, Location
from instep.shm.collectives import Operation, reduction_name
from instep.shm.group_segment import FAILED, LEFT, GroupSegment
from instep.shm.heap import Heap
from instep.shm.mailboxes import Mailboxes
from instep.shm.point_to_point import PointToPoint
from instep.shm.rounds import Rounds
from instep.work import Lane, Work

NAME = "shm"
# Its stub has overloads that only the C++ methods take.
ProcessGroup: Any = dist.ProcessGroup
_AT_ONCE = dist.BarrierOptions()
_AT_ONCE.asyncOp = False
NO_TIMEOUT = timedelta(0)  # what torch passes where a caller gave none


class ShmGroup(ProcessGroup):
    """A group of ranks that share one segment; ``table[r]`` is the process of group rank r.

    Beyond torch's methods: ``allocate`` gives memory that the peers map, in which ``allreduce`` copies
    nothing; ``map_all`` maps that of all ranks; ``monitored_barrier``; ``mailboxes`` has messages
    that are read where they lie. ``peers`` and ``label`` are for who uses the group through instep: the
    liveness of its ranks, and the name of what comes next.

    After an error every further operation raises it again: what follows would meet something else. Errors are
    ``PeerLost``, ``Desync``, and ``TypeError`` or ``ValueError`` for arguments, before anything is sent.
    """

    # What torch asks a backend for; ``_get_backend`` says that it is the group itself.
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
        num_cores = len(os.sched_getaffinity(0))
        self._rounds = Rounds(shared, table, timeout.total_seconds(), num_cores, flight)
        self.peers = self._rounds.peers
        self._heap = Heap(shared, table)
        self._lane = Lane(f"instep shm group, rank {table[shared.rank].rank}")
        self._messages = PointToPoint(shared, self._heap, self._rounds.ranks, self.peers, num_cores)
        self.mailboxes = Mailboxes(shared, self._heap, self.peers, num_cores, shared.box_word)
        self._names = {"name": "", "desc": ""}
        self._close = weakref.finalize(self, _close, shared, self._lane, self._messages, self._rounds.ranks)

    def getBackendName(self) -> str:  # noqa: N802 - torch's names, here and below
        return NAME

    def getRank(self) -> int:  # noqa: N802
        return self._rounds.rank

    def getSize(self) -> int:  # noqa: N802
        return self._rounds.size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["desc"]

    def _get_backend(self, device: torch.device) -> ShmGroup:
        """What serves tensors on ``device``; torch expects ``RuntimeError`` where there is nothing."""
        if device.type != "cpu":
            raise RuntimeError(f"shm: no backend for tensors on {device.type}: use nccl")
        return self

    get_backend = _get_backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False: torch allocates what it sends by itself."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of every wait from now on."""
        self.peers.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: who waits for this rank is told so."""
        self._close()

    def abort(self) -> None:
        """End what is under way with ``PeerLost``, and leave."""
        self.peers.given_up = True
        self._rounds.shared.leave(FAILED, "it has aborted the group")
        self._close()

    def allocate(self, nbytes: int, align: int = 64) -> Segment:
        """Memory that the peers map when they need it; not collective. Tensors in it are reduced in place."""
        return self._heap.allocate(nbytes, align)

    def map_all(self, tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """All ranks' ``tensors``, by rank, flat, as this rank reaches them. Collective.

        None, on every rank, unless all of them lie in memory from ``allocate``. Until the next operation of
        the group is over, what is read and written through them is for the ranks to agree on.
        """
        found: list[list[list[Tensor]] | None] = []
        op = self._operation("map_all", tensors[0])
        self._now(op, lambda: found.append(collectives.map_all(op, self._heap, tensors)))
        return found[0]

    def publish(self, write: Callable[[Tensor], object], count: int) -> Tensor:
        """Every rank's bytes, (W, HALF_BYTES), where it has written them. Collective, one round.

        ``write(x)`` puts this rank's into ``x``, of ``HALF_BYTES``. Of its first words, int64, all ranks have
        the same ``count``; the rest is for them to agree on. Not to be written to, and gone when this rank
        comes to the operation after the next one. Not beside operations that this group's thread executes.
        """
        rounds, shared = self._rounds, self._rounds.shared
        shared.require_own()
        shared.require()
        try:
            shown = rounds.publish(
                write, Call.of("all_gather", "int64", count, "", -1), self.label or "all_gather"
            )
        except BaseException as error:
            self._failed(error)
            raise
        rounds.flight.end()
        return shown

    def address_of(self, x: Tensor) -> Location:
        """Where ``x`` lies, for the others' ``map_peer``; ``NOWHERE`` if not in memory from ``allocate``."""
        return self._heap.address_of(x)

    def map_peer(self, rank: int, places: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """What group rank ``rank`` has at ``places``, each a ``Location``, flat, as this rank reaches it."""
        found = [Location(*place) for place in places]
        return collectives.map_peer(self._rounds, self._heap, rank, found, dtype, self.label or "map_all")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come; here they all do, and name all of them."""
        op = self._operation("barrier", timeout=timeout)
        self._now(op, op.meet)

    def barrier(self, opts: Any = None) -> ShmWork:
        op = self._operation("barrier", opts=opts)
        return self._do(op, op.meet, [], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        root, x = self._root(opts), tensors[opts.rootTensor if opts is not None else 0]
        op = self._operation("broadcast", x, root=root, opts=opts)
        return self._do(op, on_flat(x, lambda row: collectives.broadcast(op, row, root)), tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._do_each([self._all_reduce(x, opts) for x in tensors], tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        x, root = tensors[0], self._root(opts)
        how = _reduction_of(x, opts)
        op = self._operation("reduce", x, how, root, opts)
        run = on_flat(x, lambda row: collectives.all_reduce(op, row, how, root))
        return self._do(op, run, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        ops = []
        for outs, x in zip(outputs, inputs, strict=True):
            require_parts(outs, x, self.getSize(), "output")
            op = self._operation("all_gather", x, opts=opts)
            ops.append((op, partial(_gather, op, outs, x)))
        return self._do_each(ops, outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> ShmWork:
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        ops = []
        for output, x in zip(outputs, inputs, strict=True):
            self._require_whole(output, x, "output")
            op = self._operation("all_gather", x, opts=opts)
            ops.append((op, partial(_gather_single, op, output, x)))
        return self._do_each(ops, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ShmWork:
        ops = []
        for out, xs in zip(outputs, inputs, strict=True):
            require_parts(xs, out, self.getSize(), "input")
            ops.append(self._reduce_scatter(out, [flat(plain(x)) for x in xs], opts))
        return self._do_each(ops, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        ops = []
        for output, x in zip(outputs, inputs, strict=True):
            self._require_whole(x, output, "input")
            ops.append(self._reduce_scatter(output, split(plain(x), self.getSize()), opts))
        return self._do_each(ops, outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        root, outs = self._root(opts), []
        if self.getRank() == root:
            outs = outputs[0] if outputs else []
            require_parts(outs, inputs[0], self.getSize(), "output")
        op = self._operation("gather", inputs[0], root=root, opts=opts)
        return self._do(op, lambda: _gather(op, outs, inputs[0]), outputs, opts)

    def gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        outs = []
        if self.getRank() == self._root(opts):
            self._require_whole(output, x, "output")
            outs = split(output, self.getSize())
        return self.gather([outs], [x], opts)

    gather_into_tensor = gather_single

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ShmWork:
        root, xs = self._root(opts), []
        if self.getRank() == root:
            xs = inputs[0] if inputs else []
            require_parts(xs, outputs[0], self.getSize(), "input")
            xs = [plain(x) for x in xs]
        op = self._operation("scatter", outputs[0], root=root, opts=opts)
        run = on_flat(outputs[0], lambda row: collectives.scatter(op, row, xs, root))
        return self._do(op, run, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        require_list(inputs, self.getSize(), "input")
        require_list(outputs, self.getSize(), "output")
        op = self._operation("all_to_all", _same_dtype(outputs[0], inputs[0]), opts=opts)

        def run() -> None:
            with writable(outputs) as outs:
                collectives.all_to_all(op, outs, [plain(x) for x in inputs])

        return self._do(op, run, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> ShmWork:
        size = self.getSize()
        require_splits(output, size, out_splits)
        require_splits(x, size, in_splits)
        op = self._operation("all_to_all", _same_dtype(output, x), opts=opts)

        def run() -> None:
            with writable([output]) as (whole,):
                collectives.all_to_all(op, split(whole, size, out_splits), split(plain(x), size, in_splits))

        return self._do(op, run, [output], opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> ShmWork:
        return ShmWork(self._messages.send(tensors[0], destination, tag), tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ShmWork:
        receive = self._messages.receive(tensors[0], (source,), tag)
        return ShmWork(receive, tensors, lambda: receive.source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ShmWork:
        others = tuple(rank for rank in range(self.getSize()) if rank != self.getRank())
        receive = self._messages.receive(tensors[0], others, tag)
        return ShmWork(receive, tensors, lambda: receive.source)

    def _operation(
        self,
        name: str,
        x: Tensor | None = None,
        reduction: str = "",
        root: int = -1,
        opts: Any = None,
        timeout: timedelta | None = None,
        location: Location = NOWHERE,
    ) -> Operation:
        """An operation on ``x``, of which every rank has as much."""
        dtype, count = "", 0
        if x is not None:
            check(x)
            dtype, count = dtype_name(x), 0 if name == "map_all" else x.numel()
        call = Call.of(name, dtype, count, reduction, root)
        timeout = timeout or getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        return Operation(self._rounds, call, self.label or name, location, seconds)

    def _all_reduce(self, x: Tensor, opts: Any) -> tuple[Operation, Callable[[], None]]:
        how = _reduction_of(x, opts)
        if x.is_sparse:
            op = self._operation("all_reduce_sparse", x, how, opts=opts)
            return op, lambda: collectives.all_reduce_sparse(op, x)
        op = self._operation("all_reduce", x, how, opts=opts, location=self._heap.address_of(x))

        def run() -> None:
            if op.location != NOWHERE:
                op.meet()
                if op.all_shared():
                    collectives.all_reduce_in_place(op, self._heap, x.dtype, how)
                    return
            on_flat(x, lambda row: collectives.all_reduce(op, row, how))()

        return op, run

    def _reduce_scatter(
        self, out: Tensor, xs: list[Tensor], opts: Any
    ) -> tuple[Operation, Callable[[], None]]:
        how = _reduction_of(out, opts)
        op = self._operation("reduce_scatter", out, how, opts=opts)
        return op, on_flat(out, lambda row: collectives.reduce_scatter(op, row, xs, how))

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank if opts is not None else 0
        if not 0 <= root < self.getSize():
            raise ValueError(f"root: expected a rank of a group of {self.getSize()}, got {root}")
        return root

    def _require_whole(self, whole: Tensor, part: Tensor, kind: str) -> None:
        """Raise ``ValueError`` unless ``whole`` is as long as the ``part`` of every rank together."""
        if whole.numel() != part.numel() * self.getSize() or whole.dtype != part.dtype:
            raise ValueError(
                f"{kind}: expected {self.getSize()} x {part.numel()} elements of {part.dtype}, "
                f"got {whole.numel()} of {whole.dtype}"
            )

    def _do_each(
        self, ops: Sequence[tuple[Operation, Callable[[], None]]], outputs: list[Any], opts: Any
    ) -> ShmWork:
        def run() -> None:
            for _, function in ops:
                function()

        if len(ops) == 1:
            return self._do(*ops[0], outputs, opts)
        return self._do(ops[0][0] if ops else self._operation("barrier"), run, outputs, opts)

    def _do(self, op: Operation, function: Callable[[], None], outputs: list[Any], opts: Any) -> ShmWork:
        """Here, if the caller waits for it anyway, else in the group's own thread."""
        self._rounds.shared.require_own()
        inference = False
        for x in tensors_in(outputs):
            require_writable(x)
            inference = inference or x.is_inference()

        def run() -> None:
            # Tensors that were made in inference mode can only be written to in it.
            with torch.inference_mode() if inference else torch.no_grad():
                self._perform(function)

        if getattr(opts, "asyncOp", True):
            return ShmWork(self._lane.submit(op.label, run), outputs)
        work = ShmWork(self._lane.run(op.label, run), outputs)
        work.wait()
        return work

    def _now(self, op: Operation, function: Callable[[], None]) -> None:
        """In this thread, in its turn; it writes to no tensor of a caller."""
        self._rounds.shared.require_own()
        self._lane.run(op.label, lambda: self._perform(function)).wait()

    def _perform(self, function: Callable[[], None]) -> None:
        self._rounds.shared.require()
        try:
            function()
        except BaseException as error:
            self._failed(error)
            raise
        self._rounds.flight.end()

    def _failed(self, error: BaseException) -> None:
        self._rounds.shared.fail(error)
        self._rounds.flight.end(failed=True)


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, around which ``torch.compile`` breaks its graph, as around the C++ of other backends.

    As by ``torch.compiler.disable``, which would import ``torch._dynamo`` with this module, for seconds.
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
    """What an operation returns: ``work`` of a lane, in the form of torch's, whose result are ``tensors``.

    ``wait`` raises what the operation raised. ``get_future`` is for those who wait from C++, as torch's
    DistributedDataParallel does; its value is the list of ``tensors``.
    """

    def __init__(self, work: Work, tensors: list[Any], source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._source = source
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until done; True. A ``timeout`` that passes is a ``RuntimeError``, as in gloo's work."""
        limited = timeout > NO_TIMEOUT
        if not self._work.arrive(timeout.total_seconds() if limited else None):
            raise RuntimeError(f"{self._work.operation} did not end within {timeout.total_seconds():g} s")
        self._work.wait()
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._work.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.done() and self._work.error is None

    def exception(self) -> BaseException | None:
        """What it raised so far."""
        return self._work.error

    def result(self) -> list[Tensor]:
        """The tensors that it writes to."""
        return self._tensors

    def _source_rank(self) -> int:
        """Of a receive: the group rank that sent."""
        return self._source() if self._source else -1

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that C++ can wait for."""
        if self._future is None:
            began: torch.futures.Future[Any] = torch.futures.Future()
            # An exception that is set from Python is a value to C++; one that a callback raises is an error.
            self._future = began.then(self._value)
            # Callbacks may use the group and wait for it, so they run in no thread that its work needs.
            threading.Thread(
                target=self._set, args=(began,), name="instep shm callbacks", daemon=True
            ).start()
        return self._future

    def _set(self, began: torch.futures.Future[Any]) -> None:
        self._work.arrive()
        began.set_result(None)

    def _value(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._work.error is not None:
            raise self._work.error
        return self._tensors


def _reduction_of(x: Tensor, opts: Any) -> str:
    """The name of the reduction in ``opts``, by default a sum."""
    return reduction_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM, x.dtype)


def _same_dtype(output: Tensor, x: Tensor) -> Tensor:
    """No elements of the dtype of both."""
    if output.dtype != x.dtype:
        raise ValueError(f"expected an output of {x.dtype} as the input, got {output.dtype}")
    return x.detach().new_empty(0)


def _gather(op: Operation, outs: Sequence[Tensor], x: Tensor) -> None:
    with writable(outs) as plain_outs:
        collectives.all_gather(op, plain_outs, plain(x))


def _gather_single(op: Operation, out: Tensor, x: Tensor) -> None:
    with writable([out]) as (whole,):
        collectives.all_gather(op, split(whole, op.rounds.size), plain(x))


def _close(shared: GroupSegment, lane: Lane, messages: PointToPoint, ranks: Sequence[int]) -> None:
    if not shared.is_own():
        return  # a child process; its parent goes on
    messages.flush()
    messages.peers.given_up = True  # nothing that is under way may outlast the group
    shared.leave(LEFT, f"rank {ranks[shared.rank]} has no more use for it")
    lane.close()
    messages.close()
    shared.close()
