"""A pool of buffers for gathered weights, which units take, give back, and take again.

Gathered weights live for a unit's computation. The allocator of the process would put them on its heap, which
keeps what lies between two things that live longer, and cannot use it for what is larger (measured, 99 M
parameters in stage 3 on two ranks: 207 MB that nothing used, and a peak higher by 310 MB). So they have
buffers of their own, mapped one by one, that the units of a module share:

    take         a buffer that is free and as large, else a new one
    give_back    it is free; its pages stay, and the next unit that takes it writes to no fresh memory
    hand_over    it belongs to the tensors that are views of it
    rest         free buffers stay, and the system may take their pages if it is short of memory
    clear        free buffers go back to the system

Buffers are never more bytes than were taken at once: before another one is mapped, free ones go. Fresh memory
costs a page fault for every 4 KiB that is first written to, several times as long as the copy that fills
it (measured: 64 MB in 66 ms, 16 ms with pages of 2 MiB, 8 ms where nothing is fresh). Most Linux systems give
large pages to programs that ask.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

LARGE_BYTES = 2 << 20
MAPPED_BYTES = 1 << 20  # what is smaller comes from the allocator
LAZILY_FREED = getattr(mmap, "MADV_FREE", mmap.MADV_DONTNEED)


class BufferPool:
    """Buffers in the memory of the host; on a GPU its allocator does as much, and is asked each time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # the longest free first
        self._pages: dict[int, mmap.mmap] = {}  # of taken and free buffers, by address
        self._taken = self._most = 0  # bytes

    @property
    def free_bytes(self) -> int:
        """Of buffers that are kept and not in use."""
        return sum(buffer.nbytes for buffer in self._free)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """(nbytes,) uint8 on ``device``, not initialised.

        Raises:
            RuntimeError: there is no memory for it.
        """
        if not _maps(nbytes, device):
            with torch.inference_mode(False):
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        taken, most = self._taken + nbytes, max(self._most, self._taken + nbytes)
        same = next((i for i, buffer in enumerate(self._free) if buffer.nbytes == nbytes), None)
        if same is None:
            while self._free and taken + self.free_bytes > most:
                del self._pages[self._free.pop(0).data_ptr()]
        buffer = self._mapped(nbytes) if same is None else self._free.pop(same)
        self._taken, self._most = taken, most
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """``buffer`` is free: its unit needs it no longer, and no other tensor is a view of it."""
        if _maps(buffer.nbytes, buffer.device):
            self._taken -= buffer.nbytes
            self._free.append(buffer)

    def hand_over(self, buffer: Tensor) -> None:
        """``buffer`` belongs to the tensors that are views of it, and is gone with the last of them."""
        if _maps(buffer.nbytes, buffer.device):
            self._taken -= buffer.nbytes
            del self._pages[buffer.data_ptr()]

    def rest(self) -> None:
        """The step is over: what is free stays for the next one, unless the system needs it before.

        To give it back costs as much as to gather what it is for: fresh pages have to be found and zeroed.
        """
        for buffer in self._free:
            with suppress(OSError):  # a hint
                self._pages[buffer.data_ptr()].madvise(LAZILY_FREED)

    def clear(self) -> None:
        """Give free buffers back to the system."""
        for buffer in self._free:
            del self._pages[buffer.data_ptr()]
        self._free.clear()

    def _mapped(self, nbytes: int) -> Tensor:
        """A new buffer; where there is no memory for it, not before all free ones are gone."""
        try:
            pages, buffer = _mapped(nbytes)
        except OSError:
            self.clear()
            try:
                pages, buffer = _mapped(nbytes)
            except OSError as error:
                what = f"not enough memory: {nbytes:,} bytes for gathered weights: {error}"
                raise RuntimeError(what) from None
        self._pages[buffer.data_ptr()] = pages
        return buffer


def _maps(nbytes: int, device: torch.device) -> bool:
    return device.type == "cpu" and nbytes >= MAPPED_BYTES


def _mapped(nbytes: int) -> tuple[mmap.mmap, Tensor]:
    """Memory that goes back to the system with its last view, and with what it is asked for by."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 * LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a hint, which the system may refuse
            pages.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        return pages, torch.frombuffer(pages, dtype=torch.uint8)
