"""The segment of a group: one shared memory, created by its first rank and mapped by all.

    | token    | a block per rank                          | words per pair | two halves per rank     |
    | done     | posted | state, freed, number | reason |  | two boxes      | half 0 | half 1 | half 0 |
    | sleepers | label | two slots                         |

Only its own rank writes a block and its halves. *posted* counts the rounds that the rank has entered; slot
and half k % 2 belong to round k. Each word that other ranks wait for has its own cache line. Halves take no
memory until a rank writes to them.

Ranks wait in the native core, on *done* and *sleepers* (``native/core.c``).
"""

from __future__ import annotations

import os

from torch import Tensor

from instep.errors import PeerLost
from instep.native.library import Core, GroupView, core
from instep.shm import segment
from instep.shm.call import SLOT_BYTES
from instep.shm.segment import Mapping

PAGE, LINE, WORD = 4096, 64, 8
TOKEN_BYTES = 16
HALF_BYTES = 2 << 20

HERE, LEFT, FAILED = 0, 1, 2  # a rank's state
TORCH, PIPELINE = 0, 1  # kinds of messages, each with its own box for each pair of ranks
POSTED, STATE, FREED = 0, LINE, LINE + WORD  # words of a block: first byte
REASON, REASON_BYTES = 2 * LINE, 1024  # in a block, why its rank left
SLOTS = 2048
DONE, SLEEPERS = LINE, 2 * LINE  # beside the token


class GroupSegment:
    """The segment of a group of ``size`` ranks, as its group rank ``rank`` sees it.

    ``posted[r]`` is the index of the word that counts the rounds of rank r. ``halves[k]`` are those of all
    ranks for rounds of parity k, (W, HALF_BYTES). ``error`` is this rank's first failure; every later
    operation raises it. A forked child is no member of the group: its calls have no effect on the segment.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.error: Exception | None = None
        self._pid = os.getpid()
        self.words = mapping.words()
        self._bytes = memoryview(mapping.memory)
        start = segment_bytes(size) - size * 2 * HALF_BYTES
        halves = mapping.tensor(start, size * 2 * HALF_BYTES).view(size, 2, HALF_BYTES)
        self.halves: list[Tensor] = list(halves.unbind(dim=1))
        self.rows = [half.unbind() for half in self.halves]  # by parity and rank
        self.posted = [self.word(r, POSTED) for r in range(size)]
        native = core()
        assert native is not None, "checked by why_not()"
        self.core: Core = native
        base = self.words.address
        done, sleepers = base + DONE, base + SLEEPERS
        self.view = GroupView(size, rank, base + PAGE, PAGE, done, sleepers, base + start, HALF_BYTES)

    @staticmethod
    def create(size: int, token: bytes) -> tuple[GroupSegment, int]:
        """A new segment, as its first rank sees it, and its descriptor; ``token`` identifies it."""
        mapping = segment.create(segment_bytes(size))
        shared = GroupSegment(mapping, 0, size)
        shared._bytes[:TOKEN_BYTES] = token
        return shared, mapping.fd

    @property
    def token(self) -> bytes:
        """The token that the first rank wrote."""
        return bytes(self._bytes[:TOKEN_BYTES])

    def word(self, rank: int, place: int) -> int:
        """The index of a word of the block of ``rank``."""
        return (PAGE * (1 + rank) + place) // WORD

    def box_word(self, kind: int, source: int, destination: int) -> int:
        """The index of the word in which ``source`` publishes a box of messages; then the box's inode."""
        return (PAGE * (1 + self.size) + (source * self.size + destination) * LINE) // WORD + 2 * kind

    def reason(self, rank: int) -> str:
        """Why ``rank`` left."""
        start = PAGE * (1 + rank) + REASON
        return bytes(self._bytes[start : start + REASON_BYTES]).rstrip(b" \0").decode(errors="replace")

    def write_slot(self, number: int, data: bytes) -> None:
        """Write this rank's slot of round ``number``, before it posts the round."""
        start = PAGE * (1 + self.rank) + SLOTS + (number & 1) * SLOT_BYTES
        self._bytes[start : start + len(data)] = data

    def slots(self, number: int) -> list[bytes]:
        """The slots of all ranks, once all have posted round ``number``."""
        starts = (PAGE * (1 + rank) + SLOTS + (number & 1) * SLOT_BYTES for rank in range(self.size))
        return [bytes(self._bytes[start : start + SLOT_BYTES]) for start in starts]

    def state(self, rank: int) -> int:
        """HERE, LEFT or FAILED."""
        return self.words[self.word(rank, STATE)]

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell every rank that waits for it why. The first reason counts."""
        if self.error is None:
            reason = f"{error.__class__.__name__}: {error}".split("\n")[0].rstrip(": ")
            self.error = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {reason}")
            self.leave(FAILED, reason)

    def require_own(self) -> None:
        """Raise ``RuntimeError`` in a forked child: its operation would count as one of the rank's."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked by group rank {self.rank}, process {self._pid}, and is no "
                "member of its groups: call collectives in the rank's own process"
            )

    def require_usable(self) -> None:
        """As ``require_own``; and raise this rank's first failure: peers no longer wait for what follows."""
        self.require_own()
        if self.error is not None:
            raise self.error

    def is_own(self) -> bool:
        """Whether this process is the rank, not a forked child."""
        return os.getpid() == self._pid

    def leave(self, state: int, reason: str) -> None:
        """Tell all ranks that this one will not come any more, and why. The first call counts."""
        if not self.is_own() or self.state(self.rank) != HERE:
            return
        start = PAGE * (1 + self.rank) + REASON
        self._bytes[start : start + REASON_BYTES] = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES)
        self.words.post(self.word(self.rank, STATE), state)  # after the reason
        self.words.wake(self.posted[self.rank])
        self.words.wake(DONE // WORD)
        for other in range(self.size):
            for kind in (TORCH, PIPELINE):
                self.words.wake(self.box_word(kind, self.rank, other))

    def close(self) -> None:
        """Every operation raises from now on, and not the first error, whose traceback holds this object."""
        self.error = PeerLost(f"this rank left the group: {self.reason(self.rank)}")

    def count_freed(self) -> None:
        """Note that this rank has freed memory that others may have mapped."""
        if self.is_own():
            word = self.word(self.rank, FREED)
            self.words.post(word, self.words[word] + 1)


def segment_bytes(size: int) -> int:
    """Length of the segment of a group of ``size`` ranks."""
    words = -(-size * size * LINE // PAGE) * PAGE
    return PAGE * (1 + size) + words + size * 2 * HALF_BYTES
