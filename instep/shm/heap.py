"""Memory of a rank that the other ranks of its group can map: the memory of buckets and messages.

A rank allocates without telling anyone. The others learn where a tensor lies when it takes part in an
operation, and map it then, once. Small allocations share a slab, because every mapping takes a descriptor, of
which a process has few.
"""

from __future__ import annotations

import threading
import weakref
from mmap import mmap
from typing import Any

from torch import Tensor

from instep.memory import Segment
from instep.mesh.axes import round_up
from instep.shm import segment
from instep.shm.call import NOWHERE, Location
from instep.shm.group_segment import FREED, LINE, GroupSegment
from instep.shm.rounds import Rounds
from instep.shm.segment import Mapping, tensor_over

SLAB_BYTES = 64 << 20


def is_plain(x: Tensor) -> bool:
    """Whether the memory of ``x`` is its elements in order."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


class Heap:
    """This rank's shared memory, and its mappings of the peers'."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self._shared = rounds, rounds.shared
        self._lock = threading.Lock()
        # By address, without keeping the memory alive.
        self._mine: dict[int, tuple[weakref.ref[mmap], Location]] = {}
        self._slab: tuple[Mapping, int] | None = None  # and its first free byte
        self._theirs: dict[tuple[int, int], Mapping] = {}  # by rank and descriptor
        self._freed = [0] * rounds.size  # each rank's count when its mappings were checked last

    def allocate(self, nbytes: int, align: int = LINE) -> Segment:
        """``nbytes`` of zeros at a multiple of ``align``; freed with the last tensor in it."""
        with self._lock:
            if 2 * nbytes >= SLAB_BYTES:
                mapping, start = self._create(nbytes), 0
            else:
                if self._slab is None or round_up(self._slab[1], align) + nbytes > SLAB_BYTES:
                    self._slab = self._create(SLAB_BYTES), 0
                mapping, start = self._slab[0], round_up(self._slab[1], align)
                self._slab = mapping, start + max(nbytes, 1)
            return Segment(mapping.tensor(start, nbytes), mapping.fd)

    def address_of(self, x: Tensor) -> Location:
        """Where ``x`` lies, if it is contiguous and in memory of this heap; else ``NOWHERE``."""
        address, nbytes = x.data_ptr(), x.numel() * x.dtype.itemsize
        for base, (_, own) in list(self._mine.items()):
            if base <= address and address + nbytes <= base + own.nbytes and is_plain(x):
                return Location(own.fd, own.inode, address - base, nbytes)
        return NOWHERE

    def map_peer(self, rank: int, location: Location, label: str) -> Tensor:
        """The bytes of group rank ``rank`` at ``location``, mapped into this process.

        Raises:
            PeerLost: the rank is gone in operation ``label``, and its memory with it.
        """
        return tensor_over(self.memory(rank, location, label), 0, location.nbytes)

    def memory(self, rank: int, location: Location, label: str) -> memoryview:
        """As ``map_peer``, as an object that is collected when nothing refers to these bytes any more."""
        mine = list(self._mine.values()) if rank == self._shared.rank else []
        whole = next((memory() for memory, own in mine if own.inode == location.inode), None)
        if whole is None:
            with self._rounds.reaching(rank, label):
                whole = self._attached(rank, location)
        return memoryview(whole)[location.offset : location.offset + location.nbytes]

    def _attached(self, rank: int, location: Location) -> mmap:
        pid, freed = self._rounds.peers.table[rank].pid, self._shared.words[self._shared.word(rank, FREED)]
        if freed != self._freed[rank]:  # unmap what the rank has freed: until then its pages are not
            self._freed[rank] = freed
            for (of, fd), mapping in list(self._theirs.items()):
                if of == rank and segment.inode(pid, fd) != mapping.inode:
                    del self._theirs[of, fd]
        known = self._theirs.get((rank, location.fd))
        if known is None or known.inode != location.inode:
            known = self._theirs[rank, location.fd] = segment.attach(pid, location.fd, location.inode)
        return known.memory

    def _create(self, nbytes: int) -> Mapping:
        nbytes = max(nbytes, 1)
        mapping = segment.create(nbytes)
        place = Location(mapping.fd, mapping.inode, 0, nbytes)
        self._mine[mapping.address] = weakref.ref(mapping.memory), place
        weakref.finalize(mapping.memory, _forget, self._mine, mapping.address, self._shared)
        return mapping


def _forget(entries: dict[int, Any], address: int, shared: GroupSegment) -> None:
    entries.pop(address, None)
    shared.count_freed()
