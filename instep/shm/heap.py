"""Memory of a rank that the others of its group can map: where buckets live.

A message that lies where its receivers can read it needs no copying. A rank allocates alone, whenever it
likes; the others learn where a tensor lies when it takes part in an operation, and map it then, once.
Small requests share a slab, because every mapping costs descriptors, of which a process has few.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

from torch import Tensor

from instep.memory import Segment
from instep.mesh.axes import round_up
from instep.mesh.peers import Peer
from instep.shm import segment
from instep.shm.arguments import is_plain
from instep.shm.call import NOWHERE, Location
from instep.shm.group_segment import GroupSegment
from instep.shm.segment import Mapping

SLAB_BYTES = 64 << 20


@dataclass(frozen=True)
class _Own:
    """A mapping of this rank, without keeping it."""

    memory: weakref.ref[mmap]
    nbytes: int
    fd: int
    inode: int


class Heap:
    """This rank's shared memory, and that of its peers as far as it has seen it."""

    def __init__(self, shared: GroupSegment, table: Sequence[Peer]) -> None:
        self._shared = shared
        self._table = table
        self._rank = shared.rank
        self._lock = threading.Lock()
        self._freed = [0] * shared.size  # as last seen
        self._mine: dict[int, _Own] = {}  # by address
        self._slab: tuple[Mapping, int] | None = None  # and its first free byte
        self._theirs: dict[tuple[int, int], tuple[int, Mapping]] = {}  # by rank and descriptor: inode, memory

    def allocate(self, nbytes: int, align: int = 64) -> Segment:
        """``nbytes`` of zeros at a multiple of ``align``; free again when the last tensor in it is gone."""
        with self._lock:
            if 2 * nbytes >= SLAB_BYTES:
                mapping = self._create(nbytes)
                return Segment(mapping.tensor(0, nbytes), mapping.fd)
            if self._slab is None or round_up(self._slab[1], align) + nbytes > SLAB_BYTES:
                self._slab = self._create(SLAB_BYTES), 0
            mapping, free = self._slab
            start = round_up(free, align)
            self._slab = mapping, start + max(nbytes, 1)
            return Segment(mapping.tensor(start, nbytes), mapping.fd)

    def address_of(self, x: Tensor) -> Location:
        """Where ``x`` lies, if it is contiguous and in memory of this heap; else ``NOWHERE``."""
        address, nbytes = x.data_ptr(), x.numel() * x.dtype.itemsize
        for base, own in list(self._mine.items()):
            if base <= address and address + nbytes <= base + own.nbytes and is_plain(x):
                return Location(own.fd, own.inode, address - base, nbytes)
        return NOWHERE

    def resolve(self, rank: int, location: Location) -> Tensor:
        """The bytes that group rank ``rank`` has at ``location``, mapped here.

        Raises:
            OSError: the memory is gone, or is not what it was.
        """
        if rank == self._rank:
            for own in list(self._mine.values()):
                memory = own.memory()
                if own.inode == location.inode and memory is not None:
                    return Mapping(memory, own.fd, own.inode).tensor(location.offset, location.nbytes)
        return self._mapped(rank, location).tensor(location.offset, location.nbytes)

    def address(self, rank: int, location: Location) -> int:
        """Where ``location`` of group rank ``rank`` is in this process, until the next operation.

        Raises:
            OSError: as ``resolve``.
        """
        if rank == self._rank:
            for base, own in list(self._mine.items()):
                if own.inode == location.inode:
                    return base + location.offset
        return self._mapped(rank, location).address + location.offset

    def memory(self, rank: int, location: Location) -> memoryview:
        """The bytes that another group rank has at ``location``, as an object of their own.

        Raises:
            OSError: as ``resolve``.
        """
        whole = memoryview(self._mapped(rank, location).memory)
        return whole[location.offset : location.offset + location.nbytes]

    def _mapped(self, rank: int, location: Location) -> Mapping:
        if self._shared.freed(rank) != self._freed[rank]:
            self._let_go(rank)
        inode, mapping = self._theirs.get((rank, location.fd), (None, None))
        if mapping is None or inode != location.inode:
            mapping = self._attach(rank, location)
        return mapping

    def _create(self, nbytes: int) -> Mapping:
        mapping = segment.create(max(nbytes, 1))
        address = mapping.address
        self._mine[address] = _Own(weakref.ref(mapping.memory), max(nbytes, 1), mapping.fd, mapping.inode)
        weakref.finalize(mapping.memory, _forget, self._mine, address, self._shared)
        return mapping

    def _attach(self, rank: int, location: Location) -> Mapping:
        mapping = segment.attach(self._table[rank].pid, location.fd, location.inode)
        self._theirs[rank, location.fd] = location.inode, mapping
        return mapping

    def _let_go(self, rank: int) -> None:
        """Unmap what ``rank`` has freed: until then its pages are not."""
        self._freed[rank] = self._shared.freed(rank)
        pid = self._table[rank].pid
        for known, (inode, _) in list(self._theirs.items()):
            if known[0] == rank and segment.inode(pid, known[1]) != inode:
                del self._theirs[known]


def _forget(entries: dict[int, _Own], address: int, shared: GroupSegment) -> None:
    entries.pop(address, None)
    shared.count_freed()
