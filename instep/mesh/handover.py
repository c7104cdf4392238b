"""Tensors that a child process makes and this one uses, in memory that is used again.

torch hands a tensor over in a new file in shared memory: each page of it is cleared and mapped twice, and its
descriptor travels through a socket. For a micro-batch of images that takes longer than to read them. Here a
child keeps a few pieces of memory (``MemoryFile``), and writes each micro-batch into one that is free:

    child             | this process
    free? fill it ----+--> a tensor that lies there; its number, shape and dtype have travelled
        ^             |        used, as long as the program likes
        +-------------+--- the last tensor in it is gone: free again

Two counters at the beginning of a piece say whether it is free: the child's of how often it has been filled,
this process's of which filling has been let go. Each is written by one side. Where no piece is free, because
a program keeps many micro-batches, or where memory is short, tensors go torch's way.
"""

from __future__ import annotations

import mmap
import os
import weakref
from itertools import count
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from instep.mesh.memory_file import MemoryFile

HEADER_BYTES = 4096  # before the data, which begins on a page
ALIGN = 64  # bytes, of each tensor
FILLED, LET_GO = 0, 1  # words of the header
ROOM = 1.25  # of a new piece, times what was last asked for
_numbers = count(1)
_incoming: weakref.WeakValueDictionary[int, Incoming] = weakref.WeakValueDictionary()


class _Piece:
    """One piece of memory, as the process sees it that has created or opened ``file``."""

    def __init__(self, file: MemoryFile, fd: int, num_bytes: int) -> None:
        self.file, self.num_bytes = file, num_bytes
        self.memory = mmap.mmap(fd, HEADER_BYTES + num_bytes)
        self.words = memoryview(self.memory).cast("q")
        self.first = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr() + HEADER_BYTES
        self.live: set[int] = set()  # tensors of the last filling that this process has

    @property
    def is_free(self) -> bool:
        return self.words[FILLED] == self.words[LET_GO]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """With a storage of its own, so that what torch does to that does not touch other tensors."""
        found = torch.frombuffer(self.memory, dtype=dtype, count=prod(shape), offset=HEADER_BYTES + offset)
        return found.view(shape)


class Outgoing:
    """In a child: memory for the tensors that it sends through queues of ``torch.multiprocessing``.

    ``begin`` before each message; then ``empty`` gives memory to compute into, or ``moved`` copies.
    ``number`` is that of the ``Incoming`` of the process that receives.
    """

    def __init__(self, number: int, num_pieces: int) -> None:
        self._number, self._num_pieces = number, num_pieces
        self._pieces: list[_Piece] = []
        self._now: _Piece | None = None
        self._used = self._asked = 0  # bytes of this message: in the piece, and of all its tensors
        self._wanted = 0  # bytes of a piece
        ForkingPickler.register(Tensor, self._reduced)  # in this process alone

    def begin(self) -> None:
        """A message begins."""
        if self._asked > self._wanted:
            self._wanted = int(self._asked * ROOM)
        self._used = self._asked = 0
        self._now = self._free_piece() if self._wanted else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A tensor for the open message, not initialised; None where there is no room."""
        num_bytes = prod(shape) * dtype.itemsize
        taken = -(-num_bytes // ALIGN) * ALIGN
        self._asked += taken
        if self._now is None or not num_bytes or self._used + taken > self._now.num_bytes:
            return None
        if self._used == 0:
            self._now.words[FILLED] += 1
        self._used += taken
        return self._now.tensor(self._used - taken, shape, dtype)

    def moved(self, x: Tensor) -> Tensor:
        """``x``, in memory of the open message if it is a plain one that is in no other already."""
        if not _is_plain(x) or x.is_shared() or self._piece_of(x) is not None:
            return x
        room = self.empty(tuple(x.shape), x.dtype)
        return x if room is None else room.copy_(x)

    def _free_piece(self) -> _Piece | None:
        for piece in [piece for piece in self._pieces if piece.is_free]:
            if piece.num_bytes >= self._wanted:
                return piece
            self._pieces.remove(piece)
            piece.file.close()
        if len(self._pieces) == self._num_pieces:
            return None
        try:
            file = MemoryFile.create(HEADER_BYTES + self._wanted)
        except OSError:  # there is no memory: perhaps later
            return None
        self._pieces.append(_Piece(file, file.fd, self._wanted))
        return self._pieces[-1]

    def _piece_of(self, x: Tensor) -> _Piece | None:
        at = x.data_ptr()
        return next((p for p in list(self._pieces) if p.first <= at < p.first + p.num_bytes), None)

    def _reduced(self, x: Tensor) -> Any:
        """For pickle, in the thread of a queue."""
        piece = self._piece_of(x) if _is_plain(x) else None
        if piece is None:
            return reduce_tensor(x)
        at = piece.file.pid, piece.file.fd, piece.file.inode, piece.num_bytes
        return arrived, (self._number, at, x.data_ptr() - piece.first, tuple(x.shape), x.dtype)


def _is_plain(x: Tensor) -> bool:
    """Whether ``x`` is just its bytes, in a row, in the memory of this host."""
    if type(x) is not Tensor or x.layout != torch.strided or not x.is_cpu or x.is_nested or x.is_quantized:
        return False
    return x.is_contiguous() and x.numel() > 0 and not (x.requires_grad or x.is_conj() or x.is_neg())


class Incoming:
    """In the process that receives: the pieces that children have sent tensors in, mapped once."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._pieces: dict[tuple[int, int], _Piece] = {}  # by process and descriptor
        _incoming[self.number] = self

    def piece(self, at: tuple[int, int, int, int]) -> _Piece:
        """The one that a child has created.

        Raises:
            OSError: the child has ended.
        """
        file = MemoryFile(*at[:3])
        piece = self._pieces.get(at[:2])
        if piece is None or piece.file != file:  # the number of one that was too small may be used again
            fd = file.open()
            try:
                piece = self._pieces[at[:2]] = _Piece(file, fd, at[3])
            finally:
                os.close(fd)
        return piece

    def forget(self) -> None:
        """The children have ended; what they have sent stays as long as a tensor lies there."""
        self._pieces.clear()


def arrived(
    number: int, at: tuple[int, int, int, int], offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The tensor that a child has put there; with the last one of a filling, the piece is let go."""
    incoming = _incoming.get(number) or Incoming()  # nothing is kept mapped of one that is gone
    piece = incoming.piece(at)
    num_bytes = prod(shape) * dtype.itemsize
    memory = np.frombuffer(piece.memory, np.uint8, num_bytes, HEADER_BYTES + offset)
    piece.live.add(id(memory))
    gone = weakref.finalize(memory, _let_go, piece, id(memory), piece.words[FILLED], os.getpid())
    gone.atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


def _let_go(piece: _Piece, which: int, filling: int, pid: int) -> None:
    piece.live.discard(which)
    # A child of this process has copies of its tensors, whose end is not theirs.
    if not piece.live and os.getpid() == pid:
        piece.words[LET_GO] = filling
