"""The segment of a group: the shared memory in which its ranks meet, made by its first rank, mapped by all.

    | title    | a block per rank                           | words per pair  | two halves per rank     |
    | done     | posted | state | peer | reason | label |  | channel, box    | half 0 | half 1 | half 0 |
    | sleepers | two slots | row                           |

A block is written by its rank alone, and so are its halves. *posted* counts the rounds that the rank has come
to; slot and half number k % 2 belong to round k. Every word that others wait for has a cache line of its own.
Halves are only address space until a rank writes to them.

Ranks wait in the native core, on *done* and *sleepers* (``native/core.c``).
"""

from __future__ import annotations

import os
from ctypes import pointer
from functools import lru_cache

import torch
from torch import Tensor

from instep.errors import PeerLost
from instep.mesh.peers import RECORD_BYTES, Peer
from instep.native.library import Core, GroupView, ReductionView, core
from instep.shm import segment
from instep.shm.call import CALL_BYTES, LOCATION_BYTES, SLOT_BYTES
from instep.shm.segment import Mapping

PAGE = 4096
LINE = 64
WORD = 8
TITLE = b"instep group segment, version 4 "
TOKEN_BYTES = 16
HALF_BYTES = 2 << 20

HERE, LEFT, FAILED = 0, 1, 2  # a rank's state
_POSTED, _STATE, _FREED, _NUMBER, _PEER = 0, LINE, LINE + WORD, LINE + 2 * WORD, 2 * LINE
_DONE, _SLEEPERS = LINE, 2 * LINE  # beside the title
_REASON = _PEER + RECORD_BYTES
_REASON_BYTES = 1024
_LABEL, _LABEL_BYTES = 1792, 128
_SLOTS, _SLOT_STRIDE = 2048, 128
_ROW = _SLOTS + 2 * _SLOT_STRIDE
_ROW_BYTES = PAGE - _ROW


class GroupSegment:
    """The segment of a group of ``size`` ranks, as its group rank ``rank`` sees it.

    ``posted[r]`` is the number of the word that counts the rounds of rank r. ``error`` is what this rank
    failed with; after that nothing of the group works any more. A child process that inherits the segment is
    no member: what it does to it has no effect. ``core`` waits in its rounds.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.error: Exception | None = None
        self._pid = os.getpid()
        self.words = mapping.words()
        self._bytes = memoryview(mapping.memory)
        nbytes = size * 2 * HALF_BYTES
        self._memory = mapping.tensor(segment_bytes(size) - nbytes, nbytes)
        self._blocks = [PAGE * (1 + r) for r in range(size)]  # the first bytes
        self.posted = [(block + _POSTED) // WORD for block in self._blocks]
        self._slots = [(block + _SLOTS, block + _SLOTS + _SLOT_STRIDE) for block in self._blocks]
        self._halves: dict[torch.dtype, list[list[Tensor]]] = {}
        self._by_round = self._memory.view(size, 2, HALF_BYTES).unbind(dim=1)
        native = core()
        assert native is not None, "made where shared memory is available"
        self.core: Core = native
        base = self.words.address
        self.view = GroupView(
            size=size,
            rank=rank,
            blocks=base + PAGE,
            block_bytes=PAGE,
            done=base + _DONE,
            sleepers=base + _SLEEPERS,
            halves=base + segment_bytes(size) - nbytes,
            half_bytes=HALF_BYTES,
        )

    @staticmethod
    def create(size: int, token: bytes) -> tuple[GroupSegment, int]:
        """A new segment, as its first rank sees it, and its descriptor; the others read ``token`` back."""
        mapping = segment.create(segment_bytes(size))
        shared = GroupSegment(mapping, 0, size)
        shared._write(0, TITLE + token)
        return shared, mapping.fd

    @property
    def token(self) -> bytes:
        """What the first rank wrote; empty in memory that is no such segment."""
        title = bytes(self._bytes[: len(TITLE) + TOKEN_BYTES])
        return title[len(TITLE) :] if title.startswith(TITLE) else b""

    def state(self, rank: int) -> int:
        """HERE, LEFT or FAILED."""
        return self.words[(self._blocks[rank] + _STATE) // WORD]

    def halves(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Both halves of every rank as flat tensors of ``dtype``."""
        if dtype not in self._halves:
            with torch.inference_mode(False):  # they outlive what they are made in
                halves = self._memory.view(dtype).view(self.size, 2, -1)
                self._halves[dtype] = [[halves[rank, k] for k in (0, 1)] for rank in range(self.size)]
        return self._halves[dtype]

    def all_halves(self, number: int) -> Tensor:
        """Those of all ranks in round ``number``, (W, HALF_BYTES) of bytes."""
        return self._by_round[number & 1]

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on; every rank that waits for it is told why. The first reason counts."""
        if self.error is None:
            told = f"{error.__class__.__name__}: {error}".split("\n")[0].rstrip(": ")
            self.error = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {told}")
            self.leave(FAILED, told)

    def require(self) -> None:
        """Raise what this rank failed with before, if it did: nothing would meet its counterpart now."""
        if self.error is not None:
            raise self.error

    def is_own(self) -> bool:
        """Whether this process entered it, and is not a child that inherited it."""
        return os.getpid() == self._pid

    def require_own(self) -> None:
        """Raise in a child that inherited it, where an operation would count as one of the rank."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked by group rank {self.rank}, process {self._pid}, and is no "
                "member of its groups: call collectives in the rank's own process"
            )

    def leave(self, state: int, reason: str) -> None:
        """Tell all who wait for this rank that it will not come any more, and why. The first time counts."""
        if not self.is_own() or self.state(self.rank) != HERE:
            return
        data = reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES)
        self._write(self._blocks[self.rank] + _REASON, data)
        self.words.post((self._blocks[self.rank] + _STATE) // WORD, state)  # after the reason
        self.words.wake(self.posted[self.rank])
        self.words.wake(_DONE // WORD)
        for other in range(self.size):
            self.words.wake(self.channel_word(self.rank, other))
            self.words.wake(self.box_word(self.rank, other))

    def close(self) -> None:
        """It has left, and nothing of it goes on: what it failed with holds it by its traceback."""
        if self.error is not None:
            self.error = PeerLost(f"this rank has left the group, which failed: {self.reason(self.rank)}")

    def reason(self, rank: int) -> str:
        """What ``rank`` said when it left."""
        return self._read(self._blocks[rank] + _REASON, _REASON_BYTES).rstrip(b" \0").decode(errors="replace")

    def freed(self, rank: int) -> int:
        """How often ``rank`` has freed memory that others may have mapped."""
        return self.words[(self._blocks[rank] + _FREED) // WORD]

    def count_freed(self) -> None:
        """This rank has freed memory."""
        if not self.is_own():
            return
        word = (self._blocks[self.rank] + _FREED) // WORD
        self.words.post(word, self.words[word] + 1)

    def introduce(self, peer: Peer) -> None:
        """Write down who this rank is."""
        self._write(self._blocks[self.rank] + _PEER, peer.to_bytes())

    def peer(self, rank: int) -> Peer:
        """Who ``rank`` said it is."""
        return Peer.from_bytes(self._read(self._blocks[rank] + _PEER, RECORD_BYTES))

    def name(self, label: str, number: int = 0) -> None:
        """Write down what this rank is about to do, its operation number ``number``, for others' errors."""
        start = self._blocks[self.rank] + _LABEL
        self.words[(self._blocks[self.rank] + _NUMBER) // WORD] = number
        self._bytes[start : start + _LABEL_BYTES] = _padded(label)

    def label(self, rank: int) -> str:
        """What ``rank`` has begun last; empty if nothing."""
        return self._read(self._blocks[rank] + _LABEL, _LABEL_BYTES).rstrip(b" \0").decode(errors="replace")

    def number(self, rank: int) -> int:
        """How many operations ``rank`` has begun."""
        return self.words[(self._blocks[rank] + _NUMBER) // WORD]

    def write_row(self, data: bytes) -> None:
        """Tell where this rank stands, to be written before a round; nothing if it is too long."""
        self._write(
            self._blocks[self.rank] + _ROW, (data if len(data) <= _ROW_BYTES else b"").ljust(_ROW_BYTES)
        )

    def row(self, rank: int) -> bytes:
        """What ``rank`` has told, to be read after the round."""
        return self._read(self._blocks[rank] + _ROW, _ROW_BYTES).rstrip(b" \0")

    def write_slot(self, round_number: int, data: bytes) -> None:
        """This rank's slot of a round, to be written before the round is posted."""
        start = self._slots[self.rank][round_number & 1]
        self._bytes[start : start + len(data)] = data

    def slot(self, rank: int, round_number: int) -> bytes:
        """The slot of ``rank``, to be read after it has posted the round."""
        start = self._slots[rank][round_number & 1]
        return bytes(self._bytes[start : start + SLOT_BYTES])

    def reduction(self) -> ReductionView:
        """An all-reduce by the core, whose first round compares what is in the slots; to be filled in."""
        return ReductionView(
            group=pointer(self.view),
            calls=_SLOTS,
            call_stride=_SLOT_STRIDE,
            call_bytes=CALL_BYTES,
            location_bytes=LOCATION_BYTES,
        )

    def channel_word(self, source: int, destination: int) -> int:
        """Number of the word in which ``source`` publishes its channel to ``destination``; then its inode."""
        return (PAGE * (1 + self.size) + (source * self.size + destination) * LINE) // WORD

    def box_word(self, source: int, destination: int) -> int:
        """As ``channel_word``, of a box for messages that are read where they lie."""
        return self.channel_word(source, destination) + 2

    def _write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = data

    def _read(self, offset: int, length: int) -> bytes:
        return bytes(self._bytes[offset : offset + length])


@lru_cache(maxsize=1024)
def _padded(label: str) -> bytes:
    return label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)


def segment_bytes(size: int) -> int:
    """Length of the segment of a group of ``size`` ranks."""
    words = -(-size * size * LINE // PAGE) * PAGE
    return PAGE * (1 + size) + words + size * 2 * HALF_BYTES
