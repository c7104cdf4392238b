"""The memory in which the ranks of a group meet: one segment, made by its first rank, mapped by all.

    | title | a block per rank                           | a word per pair | two halves per rank     |
            | posted | state | peer | reason | label |  | mail s -> d     | half 0 | half 1 | half 0 |
            | two slots | row                           |

A block is written by its rank alone, and so are its halves. *posted* counts the rounds that the rank has come
to; slot and half number k % 2 belong to round k. Every word that others wait for has a cache line of its own.
Halves are only address space until somebody writes to them.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from instep.mesh.peers import RECORD_BYTES, Peer
from instep.shm import segment
from instep.shm.call import SLOT_BYTES
from instep.shm.segment import Mapping

PAGE = 4096
LINE = 64
WORD = 8
TITLE = b"instep room, version 1 "
TOKEN_BYTES = 16
HALF_BYTES = 2 << 20

HERE, LEFT, FAILED = 0, 1, 2  # a rank's state
_POSTED, _STATE, _FREED, _NUMBER, _PEER = 0, LINE, LINE + WORD, LINE + 2 * WORD, 2 * LINE
_REASON = _PEER + RECORD_BYTES
_REASON_BYTES = 1024
_LABEL, _LABEL_BYTES = 1792, 128
_SLOTS, _SLOT_STRIDE = 2048, 128
_ROW = _SLOTS + 2 * _SLOT_STRIDE
_ROW_BYTES = PAGE - _ROW


class Room:
    """The segment of a group of ``size`` ranks, as its group rank ``rank`` sees it.

    ``error`` is what this rank failed with; after that nothing of the group works any more. A child process
    that inherits the room is not in it: what it does to it has no effect.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.error: Exception | None = None
        self._pid = os.getpid()
        self.words = mapping.words()
        self._bytes = memoryview(mapping.memory)
        nbytes = size * 2 * HALF_BYTES
        self._memory = mapping.tensor(room_bytes(size) - nbytes, nbytes)
        self._halves: dict[torch.dtype, list[list[Tensor]]] = {}

    @staticmethod
    def create(size: int, token: bytes) -> tuple[Room, int]:
        """A new room, as its first rank sees it, and its descriptor; the others read ``token`` back."""
        mapping = segment.create(room_bytes(size))
        room = Room(mapping, 0, size)
        room._write(0, TITLE + token)
        return room, mapping.fd

    @property
    def token(self) -> bytes:
        """What the first rank wrote; empty in memory that is no room."""
        title = bytes(self._bytes[: len(TITLE) + TOKEN_BYTES])
        return title[len(TITLE) :] if title.startswith(TITLE) else b""

    def posted(self, rank: int) -> int:
        """Number of the word that counts the rounds of ``rank``."""
        return (_block(rank) + _POSTED) // WORD

    def state(self, rank: int) -> int:
        """HERE, LEFT or FAILED."""
        return self.words[(_block(rank) + _STATE) // WORD]

    def halves(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Both halves of every rank as flat tensors of ``dtype``."""
        if dtype not in self._halves:
            with torch.inference_mode(False):  # they outlive what they are made in
                halves = self._memory.view(dtype).view(self.size, 2, -1)
                self._halves[dtype] = [[halves[rank, k] for k in (0, 1)] for rank in range(self.size)]
        return self._halves[dtype]

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on; whoever waits for it is told why. The first reason counts."""
        if self.error is None:
            told = f"{error.__class__.__name__}: {error}".split("\n")[0]
            self.error = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {told}")
            self.leave(FAILED, told)

    def require(self) -> None:
        """Raise what this rank failed with before, if it did: nothing would meet its counterpart now."""
        if self.error is not None:
            raise self.error

    def is_own(self) -> bool:
        """Whether this process entered it, and is not a child that inherited it."""
        return os.getpid() == self._pid

    def leave(self, state: int, reason: str) -> None:
        """Tell whoever waits for this rank that it will not come any more, and why. The first time counts."""
        if not self.is_own() or self.state(self.rank) != HERE:
            return
        data = reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES)
        self._write(_block(self.rank) + _REASON, data)
        self.words.post((_block(self.rank) + _STATE) // WORD, state)  # after the reason
        self.words.wake(self.posted(self.rank))
        for other in range(self.size):
            self.words.wake(self.mail(self.rank, other))

    def reason(self, rank: int) -> str:
        """What ``rank`` said when it left."""
        return self._read(_block(rank) + _REASON, _REASON_BYTES).rstrip(b" \0").decode(errors="replace")

    def freed(self, rank: int) -> int:
        """How often ``rank`` has freed memory that others may have mapped."""
        return self.words[(_block(rank) + _FREED) // WORD]

    def count_freed(self) -> None:
        """This rank has freed memory."""
        word = (_block(self.rank) + _FREED) // WORD
        self.words.post(word, self.words[word] + 1)

    def introduce(self, peer: Peer) -> None:
        """Write down who this rank is."""
        self._write(_block(self.rank) + _PEER, peer.to_bytes())

    def peer(self, rank: int) -> Peer:
        """Who ``rank`` said it is."""
        return Peer.from_bytes(self._read(_block(rank) + _PEER, RECORD_BYTES))

    def name(self, label: str, number: int = 0) -> None:
        """Write down what this rank is about to do, its operation number ``number``, for others' errors."""
        self.words[(_block(self.rank) + _NUMBER) // WORD] = number
        self._write(_block(self.rank) + _LABEL, label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES))

    def label(self, rank: int) -> str:
        """What ``rank`` has begun last; empty if nothing."""
        return self._read(_block(rank) + _LABEL, _LABEL_BYTES).rstrip(b" \0").decode(errors="replace")

    def number(self, rank: int) -> int:
        """How many operations ``rank`` has begun."""
        return self.words[(_block(rank) + _NUMBER) // WORD]

    def write_row(self, data: bytes) -> None:
        """Tell where this rank stands, to be written before a round; nothing if it is too long."""
        self._write(_block(self.rank) + _ROW, (data if len(data) <= _ROW_BYTES else b"").ljust(_ROW_BYTES))

    def row(self, rank: int) -> bytes:
        """What ``rank`` has told, to be read after the round."""
        return self._read(_block(rank) + _ROW, _ROW_BYTES).rstrip(b" \0")

    def write_slot(self, round_number: int, data: bytes) -> None:
        """This rank's slot of a round, to be written before the round is posted."""
        self._write(_slot(self.rank, round_number), data)

    def slot(self, rank: int, round_number: int) -> bytes:
        """The slot of ``rank``, to be read after it has posted the round."""
        return self._read(_slot(rank, round_number), SLOT_BYTES)

    def mail(self, source: int, destination: int) -> int:
        """Number of the word in which ``source`` publishes its channel to ``destination``; then its inode."""
        return (PAGE * (1 + self.size) + (source * self.size + destination) * LINE) // WORD

    def _write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = data

    def _read(self, offset: int, length: int) -> bytes:
        return bytes(self._bytes[offset : offset + length])


def room_bytes(size: int) -> int:
    """Length of the segment of a group of ``size`` ranks."""
    words = -(-size * size * LINE // PAGE) * PAGE
    return PAGE * (1 + size) + words + size * 2 * HALF_BYTES


def _block(rank: int) -> int:
    return PAGE * (1 + rank)


def _slot(rank: int, round_number: int) -> int:
    return _block(rank) + _SLOTS + (round_number & 1) * _SLOT_STRIDE
