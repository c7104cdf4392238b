"""One copy of memory for all ranks of a host, where what a rank writes is its own until the next step.

A program that trains with DDP may write to the weights on every rank: ``p.mul_(0.9)``, ``p.data.clamp_()``,
an average of the weights put in for a while. Were the weights one memory, W ranks would multiply W times. So
every rank maps the memory twice:

    shared     optimizers step this: what one writes all read
    private    parameters lie here: a page that is written to becomes this rank's own (MAP_PRIVATE)

    private, rank 0    | page 0 | page 1'| page 2'|     rank 0 has written to pages 1 and 2,
    shared             | page 0 | page 1 | page 2 |     of which others still read the old ones
    private, rank 1    | page 0 | page 1'| page 2'|     rank 1 has written the same

In the step, when all have come, each rank copies its slice of what it has written to ``shared``; when all
have stepped, each gives its own pages back. A page that was not written to is read from ``shared``, on Linux
as it is there at that moment. Only pages that were written to take memory twice, up to the step.

Which pages those are the kernel tells, however they were written to: 8 bytes to be read per page.

In stage 3 (``unit``) every rank steps its slice of ``shared`` likewise, and what a module shows is
``private``: nothing is gathered. What is written to ``private`` never counts there (``MappedWeights``).
"""

from __future__ import annotations

import mmap
import os
import zlib
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.launch.memory_file import MemoryFile
from instep.mesh.axes import round_up
from instep.net.process_group import Group
from instep.state.replicas import gather

PAGE = mmap.PAGESIZE
ENTRY_BYTES = 8
# Of an entry of /proc/self/pagemap: there is a page, in memory or swapped out; and it is one of a file.
PRESENT, OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
MAPPING = "the mapping of the one copy"
MAX_WHOLE = 4096  # pages that are read wholly by ``digest``; of more it reads ``SAMPLE_BYTES`` each
SAMPLE_BYTES = 64


class OneCopy:
    """``nbytes`` of zeros, and the rest of a page, which the ranks of ``group``, all of one host, have once.

    At construction, collective: the first rank makes the memory, all map it. In a step: ``digest`` is for the
    others to compare; when all have come, ``publish``; when all have stepped, ``drop``.
    """

    def __init__(self, nbytes: int, group: Group) -> None:
        length = round_up(max(nbytes, 1), PAGE)
        mine = MemoryFile.create(length) if group.rank == 0 else None
        try:
            told = None if mine is None else asdict(mine)
            of_first = gather(group, told, MAPPING)[group.ranks[0]]
            assert of_first is not None
            fd = MemoryFile(**of_first).open()
            try:
                shared = mmap.mmap(fd, length)
                self._pages = mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE)
            finally:
                os.close(fd)
            group.barrier(MAPPING)
        finally:
            if mine is not None:
                mine.close()
        self._shared = shared
        self.shared, self.private = _tensor(shared), _tensor(self._pages)
        self._own = np.arange(0)  # pages that ``digest`` has found
        self._num_digests = 0

    def digest(self) -> int:
        """What this rank has written since ``drop``, as a number: which pages, and what is on them; or 0.

        Where a program writes to many pages it does so in every step: another part of each is read each time.
        """
        self._own = self._written()
        length = PAGE if len(self._own) <= MAX_WHOLE else SAMPLE_BYTES
        begin = self._num_digests * length % PAGE
        self._num_digests += 1  # on all ranks alike, whether or not they have written
        if not len(self._own):
            return 0
        read = self.private.numpy().reshape(-1, PAGE)[self._own, begin : begin + length]
        return 1 << 32 | zlib.crc32(read.tobytes(), zlib.crc32(self._own.tobytes()))

    def publish(self, first: int, last: int) -> None:
        """Bytes ``first`` to ``last`` (exclusive) all ranks have as this one, where ``digest`` found any."""
        if len(self._own):
            self.shared[first:last].copy_(self.private[first:last])

    def drop(self) -> None:
        """What ``digest`` has found is forgotten: this rank reads what all have."""
        if len(self._own):
            self.forget()

    def part(self, first: int, last: int) -> Tensor:
        """Bytes ``first`` to ``last`` (exclusive) of ``shared``, with a storage of their own."""
        return _tensor(self._shared, first, last - first)

    def keep_values(self) -> None:
        """``private`` has its values of now, whatever is written to ``shared``, until ``forget``."""
        pages = self.private.numpy()[::PAGE]
        np.bitwise_or(pages, 0, out=pages)  # a page is this rank's own once it is written to

    def forget(self) -> None:
        """This rank has written nothing, and reads what all have."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def has_written(self) -> bool:
        """Whether this rank has pages of its own."""
        return bool(len(self._written()))

    def _written(self) -> Any:
        """The numbers of the pages that are this rank's own; all, where the kernel does not tell."""
        num_pages = len(self._pages) // PAGE
        with suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(self.private.data_ptr() // PAGE * ENTRY_BYTES)
            data = pagemap.read(num_pages * ENTRY_BYTES)
            if len(data) == num_pages * ENTRY_BYTES:
                entries = np.frombuffer(data, dtype=np.uint64)
                return np.flatnonzero((entries & PRESENT != 0) & (entries & OF_FILE == 0))
        return np.arange(num_pages)


class MappedWeights:
    """Weights of a unit of stage 3, ``nbytes`` in all, of which every rank of ``group`` steps its slice.

    What the unit shows is ``memory``, where it would else gather into a buffer (``buffer_pool``): ``take`` it
    to compute, then ``give_back``, or ``hand_over`` if other tensors are views of it, which keep the values
    of now; ``rest`` when no unit computes. No rank may write to its slice while another one computes.
    """

    def __init__(self, nbytes: int, group: Group) -> None:
        self._copy, self._group = OneCopy(nbytes, group), group
        self._nbytes = nbytes
        self.memory = self._copy.private[
            :nbytes
        ]  # all weights, as bytes; what this rank writes does not count
        self._was_shown = False  # and a program may have written to it
        self._is_handed_over = False

    @property
    def slices(self) -> list[Tensor]:
        """Of all ranks, as bytes, to be read."""
        return list(self._copy.shared[: self._nbytes].split(self._nbytes // self._group.size))

    def own_slice(self) -> Tensor:
        """This rank's, as bytes, for an optimizer to step."""
        length = self._nbytes // self._group.size
        return self._copy.part(self._group.rank * length, (self._group.rank + 1) * length)

    def take(self, *, used: bool) -> bool:
        """Whether ``memory`` is free to be shown; ``used``, by tensors that have outlived their unit, not."""
        if self._is_handed_over and not used:
            self._copy.forget()
            self._is_handed_over = False
        return not self._is_handed_over

    def give_back(self) -> None:
        """It is not shown any more."""
        self._was_shown = True

    def hand_over(self) -> None:
        """It is not shown any more, but other tensors are views of it, and keep the values of now."""
        self._copy.keep_values()
        self._is_handed_over = True

    def rest(self, *, written: bool = False) -> None:
        """What this rank has written to it is forgotten; it has ``written``, or the kernel is asked."""
        if self._is_handed_over or not (written or self._was_shown):
            return
        if written or self._copy.has_written():
            self._copy.forget()
        self._was_shown = False


def _tensor(memory: mmap.mmap, offset: int = 0, count: int = -1) -> Tensor:
    with torch.inference_mode(False):  # it outlives what it is made in
        return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=count)
