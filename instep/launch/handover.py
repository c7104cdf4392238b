"""Tensors that a worker process makes and this one uses, in memory that is reused.

torch hands a tensor over in a new file in shared memory: each page of it is cleared and mapped twice, and its
descriptor travels through a socket. For a micro-batch of images that takes longer than reading them. Here a
worker keeps a few pieces of memory (``MemoryFile``), and writes each micro-batch into a free one:

    worker            | this process
    free? fill it ----+--> a tensor in that memory; piece, offset, shape and dtype have travelled
        ^             |        used, as long as the program likes
        +-------------+--- the last tensor in it is deleted: free again

Two counters at the beginning of a piece say whether it is free: how often the worker has filled it, and which
filling this process has released. Each is written by one side. Where no piece is free, because a program
keeps many micro-batches, or where memory is short, tensors go torch's way.
"""

from __future__ import annotations

import mmap
import os
import weakref
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from instep.launch.memory_file import MemoryFile
from instep.launch.process_state import look

HEADER_BYTES = 4096  # before the data, which begins on a page
ALIGN = 64  # bytes, of each tensor
FILLED, RELEASED = 0, 1  # words of the header
ROOM = 1.25  # size of a new piece, relative to the last message
_opened: dict[MemoryFile, _Piece] = {}  # pieces of workers, mapped once


class _Piece:
    """One piece of memory, in the process that has created or opened ``file``."""

    def __init__(self, file: MemoryFile, fd: int, num_bytes: int) -> None:
        self.file, self.num_bytes = file, num_bytes
        self.memory = mmap.mmap(fd, HEADER_BYTES + num_bytes)
        self.words = memoryview(self.memory).cast("q")
        self.first = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr() + HEADER_BYTES
        self.live: set[int] = set()  # tensors of the last filling that this process has

    @property
    def is_free(self) -> bool:
        return self.words[FILLED] == self.words[RELEASED]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """With a storage of its own, so that torch's operations on that leave other tensors alone."""
        found = torch.frombuffer(self.memory, dtype=dtype, count=prod(shape), offset=HEADER_BYTES + offset)
        return found.view(shape)


class Outgoing:
    """In a worker: memory for the tensors that it sends through queues of ``torch.multiprocessing``.

    ``begin`` before each message; then ``empty`` gives memory to compute into, or ``moved`` copies.
    """

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self._pieces: list[_Piece] = []
        self._current: _Piece | None = None
        self._used = self._wanted = 0  # bytes of this message: in the piece, and of all its tensors
        self._room = 0  # bytes of a piece
        ForkingPickler.register(Tensor, self._reduce)  # in this process alone

    def begin(self) -> None:
        """Start a message."""
        if self._wanted > self._room:
            self._room = int(self._wanted * ROOM)
        self._used = self._wanted = 0
        self._current = self._free_piece() if self._room else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """An uninitialised tensor for this message; None where there is no room."""
        num_bytes = prod(shape) * dtype.itemsize
        taken = -(-num_bytes // ALIGN) * ALIGN
        self._wanted += taken
        if self._current is None or not num_bytes or self._used + taken > self._current.num_bytes:
            return None
        if self._used == 0:
            self._current.words[FILLED] += 1
        self._used += taken
        return self._current.tensor(self._used - taken, shape, dtype)

    def moved(self, x: Tensor) -> Tensor:
        """``x`` in memory of this message if it is a plain tensor that is in no shared memory already."""
        if not _is_plain(x) or x.is_shared() or self._piece_of(x) is not None:
            return x
        room = self.empty(tuple(x.shape), x.dtype)
        return x if room is None else room.copy_(x)

    def _free_piece(self) -> _Piece | None:
        for piece in [piece for piece in self._pieces if piece.is_free]:
            if piece.num_bytes >= self._room:
                return piece
            self._pieces.remove(piece)
            piece.file.close()
        if len(self._pieces) == self._num_pieces:
            return None
        try:
            file = MemoryFile.create(HEADER_BYTES + self._room)
        except OSError:  # no memory now, perhaps later
            return None
        self._pieces.append(_Piece(file, file.fd, self._room))
        return self._pieces[-1]

    def _piece_of(self, x: Tensor) -> _Piece | None:
        at = x.data_ptr()
        return next((p for p in list(self._pieces) if p.first <= at < p.first + p.num_bytes), None)

    def _reduce(self, x: Tensor) -> Any:
        """For pickle, in the thread of a queue."""
        piece = self._piece_of(x) if _is_plain(x) else None
        if piece is None:
            return reduce_tensor(x)
        return arrived, (piece.file, piece.num_bytes, x.data_ptr() - piece.first, tuple(x.shape), x.dtype)


def _is_plain(x: Tensor) -> bool:
    """Whether ``x`` is just its bytes, contiguous, in the memory of this host."""
    if type(x) is not Tensor or x.layout != torch.strided or not x.is_cpu or x.is_nested or x.is_quantized:
        return False
    return x.is_contiguous() and x.numel() > 0 and not (x.requires_grad or x.is_conj() or x.is_neg())


def arrived(
    file: MemoryFile, num_bytes: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """In the receiving process: the tensor that a worker has put there.

    Raises:
        OSError: the worker has ended.
    """
    if (piece := _opened.get(file)) is None:
        for old in [old for old in _opened if (old.pid, old.fd) == (file.pid, file.fd)]:
            del _opened[old]  # it was too small
        fd = file.open()
        try:
            piece = _opened[file] = _Piece(file, fd, num_bytes)
        finally:
            os.close(fd)
    memory = np.frombuffer(piece.memory, np.uint8, prod(shape) * dtype.itemsize, HEADER_BYTES + offset)
    piece.live.add(id(memory))
    deleted = weakref.finalize(memory, _release, piece, id(memory), piece.words[FILLED], os.getpid())
    deleted.atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


def forget_ended() -> None:
    """Drop the pieces of workers that have ended; a piece stays mapped as long as a tensor is in it."""
    for file in [file for file in list(_opened) if look(file.pid) is None]:
        _opened.pop(file, None)


def _release(piece: _Piece, which: int, filling: int, pid: int) -> None:
    piece.live.discard(which)
    # A forked child has copies of these tensors, and their end is not the end of the tensors.
    if not piece.live and os.getpid() == pid:
        piece.words[RELEASED] = filling
