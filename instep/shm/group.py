"""The process group "shm": what torch.distributed asks for, on ranks that share a host.

Operations run in the order in which they were called, one at a time: those that the caller waits for in the
caller's own thread, those that it does not in the group's, while the caller goes on.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.memory import Segment
from instep.mesh.peers import Peer
from instep.shm import collectives, in_place
from instep.shm.call import NOWHERE, Call, Location
from instep.shm.collectives import Turn
from instep.shm.heap import Heap
from instep.shm.mail import Mail
from instep.shm.room import HERE, LEFT, Room
from instep.shm.rounds import Rounds
from instep.shm.sparse import all_reduce as all_reduce_sparse
from instep.shm.tensors import check, contiguous, dtype_name, on_flat, reduction_of, require_parts, split
from instep.shm.work import ShmWork
from instep.work import Lane

NAME = "shm"
# Its stub has overloads that only the C++ methods take.
ProcessGroup: Any = dist.ProcessGroup


class ShmGroup(ProcessGroup):
    """A group of ranks that are in one ``room``; ``table[r]`` is the process of group rank r.

    Beyond torch's methods: ``allocate`` gives memory that the peers map, in which ``allreduce`` copies nothing;
    ``expose`` shows such memory to the others; ``monitored_barrier``. ``peers`` and ``label`` are for who uses
    the group through instep: the liveness of its ranks, and the name of what comes next in errors.

    After an error every further operation raises it again: what follows would meet something else. Errors are
    ``PeerLost``, ``Desync``, and ``TypeError`` or ``ValueError`` for arguments, before anything is sent.
    """

    def __init__(self, room: Room, table: Sequence[Peer], timeout: timedelta) -> None:
        super().__init__(room.rank, room.size)
        self.label: str | None = None
        self._rounds = Rounds(room, table, timeout.total_seconds(), len(os.sched_getaffinity(0)))
        self.peers = self._rounds.peers
        self._heap = Heap(table, room.rank)
        self._lane = Lane(f"instep shm group, rank {table[room.rank].rank}")
        self._mail = Mail(room, self._rounds.ranks, self.peers)
        self._names = {"name": "", "desc": ""}
        self._close = weakref.finalize(self, _close, room, self._lane, self._mail, self._rounds.ranks)

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

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of every wait from now on."""
        self.peers.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: who waits for this rank is told so."""
        self._close()

    def abort(self) -> None:
        """End what is under way with ``PeerLost``, and leave."""
        self.peers.given_up = True
        self._close()

    def allocate(self, nbytes: int, align: int = 64) -> Segment:
        """Memory that the peers map when they need it; not collective. Tensors in it are reduced in place."""
        return self._heap.allocate(nbytes, align)

    def expose(self, tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """All ranks' ``tensors``, by rank, flat, as this rank reaches them. Collective.

        None, on every rank, unless all of them lie in memory from ``allocate``. Until the next operation of
        the group is over, what is read and written through them is for the ranks to agree on.
        """
        found: list[list[list[Tensor]] | None] = []
        turn = self._turn("expose", tensors[0])
        self._lane.run(turn.label, lambda: found.append(in_place.expose(turn, self._heap, tensors))).wait()
        return found[0]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come; here they all do, and name all of them."""
        turn = self._turn("barrier", timeout=timeout)
        self._lane.run(turn.label, turn.meet).wait()

    def barrier(self, opts: Any = None) -> ShmWork:
        turn = self._turn("barrier", opts=opts)
        return self._do(turn, turn.meet, [], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        root = opts.rootRank if opts is not None else 0
        x = tensors[opts.rootTensor if opts is not None else 0]
        turn = self._turn("broadcast", x, root=root, opts=opts)
        return self._do(turn, on_flat(x, lambda flat: collectives.broadcast(turn, flat, root)), tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._do_each([self._all_reduce(x, opts) for x in tensors], tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        x, root = tensors[0], opts.rootRank if opts is not None else 0
        how = reduction_of(x, opts)
        turn = self._turn("reduce", x, how, root, opts)
        return self._do(
            turn, on_flat(x, lambda flat: collectives.all_reduce(turn, flat, how, root)), tensors, opts
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._do_each([self._all_gather(outs, x, opts) for outs, x in pairs], outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> ShmWork:
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        turns = [
            self._all_gather(split(output, self.getSize()), x, opts)
            for output, x in zip(outputs, inputs, strict=True)
        ]
        return self._do_each(turns, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ShmWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._do_each([self._reduce_scatter(out, xs, opts) for out, xs in pairs], outputs, opts)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:
        turns = [
            self._reduce_scatter(output, split(x, self.getSize()), opts)
            for output, x in zip(outputs, inputs, strict=True)
        ]
        return self._do_each(turns, outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        root = opts.rootRank if opts is not None else 0
        outs = outputs[0] if self.getRank() == root else []
        turn = self._turn("gather", inputs[0], root=root, opts=opts)
        return self._do(turn, lambda: _gather(turn, outs, inputs[0]), outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ShmWork:
        root = opts.rootRank if opts is not None else 0
        xs = [x.contiguous() for x in inputs[0]] if self.getRank() == root else []
        turn = self._turn("scatter", outputs[0], root=root, opts=opts)

        def run(flat: Tensor) -> None:
            collectives.scatter(turn, flat, xs, root)

        return self._do(turn, on_flat(outputs[0], run), outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        turn = self._turn("all_to_all", inputs[0].new_empty(0), opts=opts)
        xs = [x.contiguous() for x in inputs]

        def run() -> None:
            with contiguous(outputs) as outs:
                collectives.all_to_all(turn, outs, xs)

        return self._do(turn, run, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> ShmWork:
        outs = split(output, self.getSize(), out_splits)
        return self.alltoall(outs, split(x, self.getSize(), in_splits), opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> ShmWork:
        return ShmWork(self._mail.send(tensors[0], destination, tag), tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ShmWork:
        request = self._mail.receive(tensors[0], (source,), tag)
        return ShmWork(request.work, tensors, lambda: request.source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ShmWork:
        others = tuple(rank for rank in range(self.getSize()) if rank != self.getRank())
        request = self._mail.receive(tensors[0], others, tag)
        return ShmWork(request.work, tensors, lambda: request.source)

    def _turn(
        self,
        operation: str,
        x: Tensor | None = None,
        reduction: str = "",
        root: int = -1,
        opts: Any = None,
        timeout: timedelta | None = None,
        location: Location = NOWHERE,
    ) -> Turn:
        """An operation on ``x``, of which every rank has as much."""
        dtype, count = "", 0
        if x is not None:
            check(x)
            dtype, count = dtype_name(x), 0 if operation == "expose" else x.numel()
        call = Call(operation, dtype, count, reduction, root)
        timeout = timeout or getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        return Turn(self._rounds, call, self.label or operation, location, seconds)

    def _all_reduce(self, x: Tensor, opts: Any) -> tuple[Turn, Callable[[], None]]:
        if x.is_sparse:
            turn = self._turn("all_reduce_sparse", x, reduction_of(x, opts), opts=opts)
            return turn, lambda: all_reduce_sparse(turn, x)
        how = reduction_of(x, opts)
        turn = self._turn("all_reduce", x, how, opts=opts, location=self._heap.locate(x))

        def run() -> None:
            if turn.location != NOWHERE:
                turn.meet()
                if turn.all_shared():
                    in_place.all_reduce(turn, self._heap, x.dtype, how)
                    return
            on_flat(x, lambda flat: collectives.all_reduce(turn, flat, how))()

        return turn, run

    def _all_gather(self, outs: list[Tensor], x: Tensor, opts: Any) -> tuple[Turn, Callable[[], None]]:
        require_parts(outs, x, self.getSize(), "output")
        turn = self._turn("all_gather", x, opts=opts)
        return turn, lambda: _gather(turn, outs, x)

    def _reduce_scatter(self, out: Tensor, xs: list[Tensor], opts: Any) -> tuple[Turn, Callable[[], None]]:
        require_parts(xs, out, self.getSize(), "input")
        how = reduction_of(out, opts)
        turn = self._turn("reduce_scatter", out, how, opts=opts)
        parts = [x.reshape(-1) for x in xs]
        return turn, on_flat(out, lambda flat: collectives.reduce_scatter(turn, flat, parts, how))

    def _do_each(
        self, turns: Sequence[tuple[Turn, Callable[[], None]]], outputs: list[Any], opts: Any
    ) -> ShmWork:
        def run() -> None:
            for _, function in turns:
                function()

        return self._do(turns[0][0], run, outputs, opts)

    def _do(self, turn: Turn, function: Callable[[], None], outputs: list[Any], opts: Any) -> ShmWork:
        """Here, if the caller waits for it anyway, else in the group's own thread."""

        def run() -> None:
            with torch.no_grad():
                try:
                    function()
                except BaseException as error:
                    self._mail.fail(error)
                    raise

        if getattr(opts, "asyncOp", True):
            return ShmWork(self._lane.submit(turn.label, run), outputs)
        work = ShmWork(self._lane.run(turn.label, run), outputs)
        work.wait()
        return work


def _gather(turn: Turn, outs: Sequence[Tensor], x: Tensor) -> None:
    with contiguous(outs) as flat:
        collectives.all_gather(turn, flat, x.detach().contiguous())


def _close(room: Room, lane: Lane, mail: Mail, ranks: Sequence[int]) -> None:
    mail.peers.given_up = True  # nothing that is under way may outlast the group
    lane.close()
    mail.close()
    if room.state(room.rank) == HERE:
        room.leave(LEFT, f"rank {ranks[room.rank]} has no more use for it")
