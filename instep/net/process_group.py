"""Process groups: created from a store, used by one thread, dropped without waiting for lost ranks.

Backends pair operations only by their order. A user's collective between two of ours on the same group would
be paired with one of them, and so would those of two wrappers in one backward. So every part of instep that
communicates has its own ``Group``, created directly from the store: torch's registry numbers groups by how
many a process has, which may differ between ranks, and reuses the name and the store keys of a destroyed one.

Operations of a ``Group`` move data between its ranks, and each of them ends or raises. They do no arithmetic,
except ``all_reduce``, the unordered baseline: a sum is received as addends and added locally in a fixed
order. A group of one rank has no process group, and every operation is a copy.

Bytes that a rank sends, W ranks, x of S bytes: broadcast S, all_gather S(W-1), all_to_all S(W-1)/W.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from instep.errors import Desync, PeerLost, counted
from instep.memory import Segment, allocate, tensor_of
from instep.net import device
from instep.net.hang_report import FlightRecorder, Problem, StatusRow, different_calls
from instep.net.lane import Handle, Lane
from instep.net.peers import RECORD_BYTES, Peer, Peers, own_peer
from instep.net.store import StatusStore, backend_timeout, rendezvous

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

MakeGroup = Callable[[str, Sequence[int]], "ProcessGroup"]
EXIT_S = 1.0  # at interpreter exit, for threads to leave gloo
LENGTH_BYTES, SHORT_BYTES = 8, 248  # of the first message of ``all_gather_bytes``: short data fits in it
# Groups that have had pending operations; and dropped groups with theirs, kept until these end, because
# gloo's destructor would wait for them.
_with_pending: weakref.WeakSet[Group] = weakref.WeakSet()
_lost: list[tuple[ProcessGroup, Sequence[device.Waitable]]] = []


def default_store() -> Store:
    """The store of torch's default group."""
    return dist.distributed_c10d._get_default_store()


def from_store(
    store: Store,
    rank: int,
    timeout_s: float,
    like: ProcessGroup | None = None,
    *,
    config: str | None = None,
) -> MakeGroup:
    """A function that creates groups over ``store`` which torch's registry does not know.

    They have the backends of ``config`` (as of ``device.complete``), else those of ``like``, by default
    torch's default group, and one for CPU tensors. Collective over the ranks of the group; each rank creates
    the same number of groups of a name.
    """
    if config is None:
        config = str(dist.get_backend_config(like)) if dist.is_initialized() else "cpu:gloo"
    backends = config

    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        _sweep()

        def construct(own: Store) -> ProcessGroup:
            return device.make_group(own, ranks.index(rank), ranks, backend_timeout(timeout_s), backends)

        return rendezvous(store, name, ranks, rank, timeout_s, construct)

    return make


def registered_groups(
    partitions: dict[str, Iterable[Sequence[int]]], rank: int, timeout_s: float
) -> MakeGroup:
    """A function that creates groups in torch's registry; ``partitions[name]`` are all groups of an axis.

    Collective over the world, because torch's registry also counts groups of other ranks. A group over the
    whole world is torch's default group.
    """

    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        if len(ranks) == dist.get_world_size():
            return dist.distributed_c10d._get_default_group()

        def construct(_: Store) -> ProcessGroup:
            mine = None
            for members in partitions[name]:
                pg = dist.new_group(
                    list(members), timeout=backend_timeout(timeout_s), group_desc=f"instep {name}"
                )
                mine = pg if rank in members else mine
            assert mine is not None
            return mine

        whole = range(dist.get_world_size())
        return rendezvous(default_store(), f"registered/{name}", whole, rank, timeout_s, construct)

    return make


def drop(pg: ProcessGroup, pending: Sequence[device.Waitable] = ()) -> None:
    """Drop a group of ``from_store``; its ``pending`` operations end with an error."""
    if pending:
        device.close_connections(pg)
    _lost.append((pg, pending))
    _sweep()


@atexit.register
def _end_pending_operations() -> None:
    """At interpreter exit no thread may wait inside gloo.

    Python ends a thread that returns from native code then by force, which C++ turns into SIGABRT; and gloo's
    destructors would wait until the backend's deadline.
    """
    for group in list(_with_pending):
        if group._pending:
            group.close()
    until = time.monotonic() + EXIT_S
    while _lost and time.monotonic() < until:
        time.sleep(0.001)
        _sweep()
    device.keep(pg for pg, _ in _lost)


def _sweep() -> None:
    """Forget dropped groups without pending operations."""
    for lost in list(_lost):  # other threads add and remove meanwhile
        if all(work.is_completed() for work in lost[1]):
            with suppress(ValueError):
                _lost.remove(lost)


def destroy(pg: ProcessGroup) -> None:
    """Destroy a group of ``registered_groups``; others end when they are dropped."""
    if dist.is_initialized() and pg in dist.distributed_c10d._world.pg_map and pg != dist.group.WORLD:
        dist.destroy_process_group(pg)


class Group:
    """One process group, for one thread at a time: backends pair operations by their order.

    ``ranks[i]`` is the global rank of group rank i. Errors name an operation by its ``operation``. ``table``
    has the processes of all ranks of the world, in which this ``name`` is unique; without a table the ranks
    of the group exchange their records.
    """

    num_hosts = 1  # more in a ``HostGroup``

    def __init__(
        self,
        pg: ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        table: Sequence[Peer] | None = None,
        name: str = "",
    ) -> None:
        self.pg = pg
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self._lanes: dict[str, Lane] = {}
        self._pending: list[device.Waitable] = []  # pending in another thread, or abandoned
        self._interrupted = ""  # the operation that a signal, for example, interrupted
        self.peers = self._make_peers(rank, table, name)
        self.peers.timeout_s = timeout_s
        self.peers.flight.belongs_here()

    def __repr__(self) -> str:
        return f"<group of {counted(self.size, 'rank')}{self._way}; this is rank {self.rank}>"

    @property
    def _way(self) -> str:
        """The transport, for messages."""
        return f" over {self.backend}" if self.size > 1 else ""

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def all_gather(self, out: Tensor, x: Tensor, operation: str) -> None:
        """``out`` (size * n,) receives the ``x`` (n,) of every rank, in group order."""
        if self.pg is None:
            out.copy_(x)
        else:
            options = self._begin(AllgatherOptions(), operation, x)
            self._finish(self.pg._allgather_base(out, x, options), operation, on_gpu=x.is_cuda)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], operation: str
    ) -> None:
        """Part d of ``x`` (lengths ``in_splits``) goes to rank d; ``out`` holds the parts in sender order."""
        if self.pg is None:
            out.copy_(x)
        else:
            options = self._begin(dist.AllToAllOptions(), operation, x)
            work = self.pg.alltoall_base(out, x, list(out_splits), list(in_splits), options)
            self._finish(work, operation, on_gpu=x.is_cuda)

    def broadcast(self, x: Tensor, operation: str, *, root: int = 0) -> None:
        """``x`` of group rank ``root`` overwrites that of all."""
        if self.pg is not None:
            options = self._begin(dist.BroadcastOptions(), operation, x)
            options.rootRank = root
            options.rootTensor = 0
            self._finish(self.pg.broadcast([x], options), operation, on_gpu=x.is_cuda)

    def all_reduce(self, x: Tensor, operation: str) -> None:
        """``x`` becomes the sum over ranks, in the backend's order."""
        if self.pg is not None:
            options = self._begin(dist.AllreduceOptions(), operation, x)
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
            self._finish(self.pg.allreduce([x], options), operation, on_gpu=x.is_cuda)

    def map_all(self, tensors: Sequence[Tensor], operation: str) -> list[list[Tensor]] | None:
        """Every rank's ``tensors``, flat, by group rank, as memory that this rank reads and writes.

        None, on every rank, unless they share memory and all tensors are from ``allocate``. The tensors stay
        shared until all ranks reach ``barrier``.
        """
        return None

    def barrier(self, operation: str) -> None:
        """Return when all ranks have called it."""
        if self.pg is not None:
            nothing = torch.empty(0, device="cpu")
            options = self._begin(dist.BarrierOptions(), operation, nothing)
            self._finish(self.pg.barrier(options), operation)

    def give_up(self) -> None:
        """From another thread: make the current wait raise, and every later one."""
        self.peers.given_up = True

    def break_off(self, operation: str) -> None:
        """Leave ``operation`` in the middle: its messages must not be paired with those of a later one.

        The other ranks learn of it at once instead of at the deadline.
        """
        if self.pg is not None:
            self._interrupted = operation
            device.close_connections(self.pg)
            self.peers.flight.leave()  # for the ranks whose wait gloo does not end
            self.peers.status_store.report_lost([self.global_rank], dead=False)

    def close(self) -> None:
        """End the group. A pending wait raises within a slice; later operations are those of one rank."""
        self.give_up()
        for lane in self._lanes.values():
            lane.close(wait=False)
        if self.pg is not None:
            drop(self.pg, self._pending)
        self.pg, self._pending = None, []
        self.peers.status_store = StatusStore()  # without the store

    @property
    def backend(self) -> str:
        """ "shm", "nccl" or "gloo"; "gloo" for one rank."""
        if self.pg is None or torch.device("cuda") not in self.pg._device_types:
            return "gloo"
        name: str = self.pg._get_backend(torch.device("cuda")).name()
        return name

    @property
    def prefers_messages(self) -> bool:
        """Whether messages (``run``) are faster than the backend's collectives, for CPU tensors.

        gloo's all-to-all and all-gather use a link in one direction at a time, its messages in both.
        """
        return self.pg is not None

    def run(self, function: Callable[[], object], operation: str) -> None:
        """Call ``function``, which sends and receives over ``pg``, as one operation.

        It runs in a thread, because a wait for a gloo message cannot be sliced: a timeout closes the
        connection.
        """
        self.wait(self.start(function, operation), operation)

    def start(self, function: Callable[[], object], operation: str, line: str = "") -> Handle:
        """Start ``run``. Functions of one ``line`` run one after another; lines are independent."""
        if self._interrupted:
            raise self._interruption(operation)
        if line not in self._lanes:
            self._lanes[line] = Lane(f"instep messages{line}, rank {self.rank}")
        work = Handle(self._lanes[line].submit(operation, function))
        self._add_pending(work)
        return work

    def wait(self, work: Handle, operation: str) -> None:
        """Wait for ``work`` of ``start``."""
        if self._interrupted:
            raise self._interruption(operation)
        self.peers.flight.begin(operation)
        self._finish(work, operation)
        self._remove_pending(work)

    def allocate(self, nbytes: int, align: int, on_device: torch.device) -> Segment:
        """Memory for ``map_all`` where ranks share memory, else this process's own."""
        return allocate(nbytes, align, on_device)

    def all_gather_bytes(
        self, data: bytes, operation: str, *, limit: int = 1 << 24, lengths: Sequence[int] | None = None
    ) -> list[bytes]:
        """Every rank's ``data``, in group order; lengths may differ, up to ``limit`` bytes.

        Without ``lengths`` of all ranks, a first message has the length and the first bytes; short data needs
        no second one.

        Raises:
            ValueError: a rank has more; raised on every rank, before the data is sent.
        """
        heads: list[bytes] = []
        if lengths is None:
            head = len(data).to_bytes(LENGTH_BYTES, "little") + data[:SHORT_BYTES]
            heads = self._all_gather_rows(head, LENGTH_BYTES + SHORT_BYTES, operation)
            lengths = [int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads]
        width = max(lengths)
        if width > limit:
            rank = self.ranks[lengths.index(width)]
            raise ValueError(
                f"{operation}: rank {rank} has {width} bytes, more than the {limit} that a rank may send"
            )
        if not width:
            return [b""] * self.size
        if heads and width <= SHORT_BYTES:
            rows = [head[LENGTH_BYTES:] for head in heads]
        else:
            rows = self._all_gather_rows(data, width, operation)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _all_gather_rows(self, data: bytes, width: int, operation: str) -> list[bytes]:
        """Every rank's ``data``, padded to ``width`` bytes."""
        if self.pg is None:
            return [data.ljust(width)]
        out = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")
        self.all_gather(out, tensor_of(data.ljust(width), torch.uint8), operation)
        return [row.tobytes() for row in out.view(self.size, width).numpy()]

    def out_of_step(self, problem: Problem | None, operation: str) -> Desync:
        """The error for ``problem``, which all ranks have found; the first rank's has the table of all ranks.

        None: their last operations differ. Collective; if that fails too, the error has no table.
        """
        row = replace(self.peers.flight.row(), stack=())
        with suppress(PeerLost, ValueError):
            rows = [StatusRow.from_bytes(data) for data in self.all_gather_bytes(row.to_bytes(), operation)]
            return (problem or different_calls(rows)).as_desync(rows, self.rank)
        return Desync(str(problem or different_calls([row])))

    def _make_peers(self, rank: int, table: Sequence[Peer] | None, name: str) -> Peers:
        me, flight = own_peer(rank), FlightRecorder(rank)
        # Until the table is there, a lost peer can only be found by the deadline.
        self.peers = Peers((me,), me, self.timeout_s, None, flight)
        if self.pg is None:
            return self.peers
        peers = self._find_peers(me, table)
        store = StatusStore(self.pg.get_group_store(), rank)
        return Peers(peers, peers[self.rank], self.timeout_s, store, flight, name)

    def _find_peers(self, me: Peer, table: Sequence[Peer] | None) -> list[Peer]:
        if table is not None:
            return [table[rank] for rank in self.ranks]
        out = torch.empty(self.size * RECORD_BYTES, dtype=torch.uint8, device="cpu")
        self.all_gather(out, tensor_of(me.to_bytes(), torch.uint8), "the exchange of addresses")
        rows = out.view(self.size, RECORD_BYTES).numpy()
        return [Peer.from_bytes(row.tobytes()) for row in rows]

    def _begin(self, options: Any, operation: str, x: Tensor) -> Any:
        """Record the start of an operation that is waited for at once; its ``options``."""
        if self._interrupted:
            raise self._interruption(operation)
        self.peers.flight.begin(operation, (x.dtype, x.shape))
        return options

    def _finish(self, work: Any, operation: str, *, on_gpu: bool = False) -> None:
        try:
            self.peers.wait(work, operation, on_gpu=on_gpu)
        except BaseException as error:
            self.peers.flight.end(failed=True)
            if work not in self._pending:
                self._add_pending(work)
            if not isinstance(error, PeerLost):
                self.break_off(operation)
            raise
        self.peers.flight.end()

    def _add_pending(self, work: device.Waitable) -> None:
        self._pending.append(work)
        _with_pending.add(self)

    def _remove_pending(self, work: device.Waitable) -> None:
        with suppress(ValueError):  # another thread has closed the group
            self._pending.remove(work)

    def _interruption(self, operation: str) -> PeerLost:
        """The error of ``operation`` after an interrupt, whose messages would be paired with it."""
        return PeerLost(
            f"rank {self.global_rank} was interrupted during {self._interrupted} and cannot take part in "
            f"{operation}: create the group anew on every rank",
            operation=operation,
        )


class SharedGroup(Group):
    """A group of one host over the backend "shm": its ranks read and write each other's memory.

    The backend has the table of peers and records operations. Ranks compare their calls in memory, so an
    operation that one of them leaves cannot be paired with a later one.
    """

    backend = "shm"
    prefers_messages = False
    pg: Any

    def map_all(self, tensors: Sequence[Tensor], operation: str) -> list[list[Tensor]] | None:
        if self.pg is None:
            return None
        self.pg.label = operation
        mapped: list[list[Tensor]] | None = self.pg.map_all(tensors)
        return mapped

    def publish(self, write: Callable[[Tensor], object], count: int, operation: str) -> Tensor:
        """Every rank's published bytes, (W, HALF_BYTES) uint8. Collective, one round.

        ``write(x)`` fills this rank's row, ``count`` words of int64 first. Rows are read-only and valid until
        this rank begins the operation after the next one.
        """
        self.pg.label = operation
        rows: Tensor = self.pg.publish(write, count)
        return rows

    def address_of(self, x: Tensor) -> Sequence[int]:
        """Where ``x`` is, in words for ``map_peer`` on other ranks; the first is -1 if they cannot map it."""
        address: Sequence[int] = self.pg.address_of(x)
        return address

    def map_peer(
        self, rank: int, addresses: Sequence[Sequence[int]], dtype: torch.dtype, operation: str
    ) -> list[Tensor]:
        """The memory at ``addresses``, as group rank ``rank`` has sent them, flat."""
        self.pg.label = operation
        mapped: list[Tensor] = self.pg.map_peer(rank, addresses, dtype)
        return mapped

    def barrier(self, operation: str) -> None:
        if self.pg is not None:
            self.pg.label = operation
            self.pg.monitored_barrier()

    def break_off(self, operation: str) -> None:
        pass

    def close(self) -> None:
        if self.pg is not None:
            self.pg.shutdown()
        super().close()

    def allocate(self, nbytes: int, align: int, on_device: torch.device) -> Segment:
        if self.pg is None or on_device.type != "cpu":
            return super().allocate(nbytes, align, on_device)
        memory: Segment = self.pg.allocate(nbytes, align)
        return memory

    def _make_peers(self, rank: int, table: Sequence[Peer] | None, name: str) -> Peers:
        peers: Peers = self.pg.peers
        return peers

    def _begin(self, options: Any, operation: str, x: Tensor) -> Any:
        self.pg.label = operation
        options.asyncOp = False  # in this thread, which has nothing else to do
        return options

    def _finish(self, work: Any, operation: str, *, on_gpu: bool = False) -> None:
        self.peers.wait(work, operation)


def alone(rank: int = 0, timeout_s: float = 300.0) -> Group:
    """A group of one rank, which needs no backend."""
    return Group(None, (rank,), rank, timeout_s)
