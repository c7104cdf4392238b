"""Messages that are read where they lie: the sender copies them into memory that the receiver maps.

One copy is made, in the sender's own thread, and nothing waits for room:

    sender     copy into a free *slot*, post its place                 . . . slot 0 is free again
    receiver                           . wait | tensors that are the slot ... | the last of them goes

Each pair of ranks has a box: a row of places of messages, and a word per slot, in which the receiver counts
how often it has been done with it. A slot is memory of the sender's heap, of a power of two of bytes: what
no message has touched takes no memory. There are as many as messages were under way at once, and they stay
for the next ones.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from struct import unpack_from
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.mesh.axes import round_up
from instep.mesh.peers import Peers
from instep.shm import segment
from instep.shm.call import Location
from instep.shm.futex import Words
from instep.shm.group_segment import LINE, PAGE, WORD, GroupSegment
from instep.shm.heap import Heap
from instep.shm.rounds import SPIN_S, Arrival, reaching
from instep.shm.segment import Mapping

MOST_SLOTS = 4096  # messages under way from one rank to another
SMALLEST_SLOT = PAGE
MOST_KEPT = 32  # views of a slot
_WORDS_PER_LINE = LINE // WORD
# Words of a box: how many messages were posted, and how many were taken; a line for the place of each of the
# last ones; a word per slot.
_POSTED, _TAKEN, _PLACES = 0, _WORDS_PER_LINE, 2 * _WORDS_PER_LINE
_DONE = _PLACES + MOST_SLOTS * _WORDS_PER_LINE
BOX_BYTES = round_up((_DONE + MOST_SLOTS) * WORD, PAGE)
_COUNTS = 3  # of a message: tag, number of words, number of tensors


class Letter(NamedTuple):
    """What has come: ``words``, and the bytes of each tensor, in memory of the sender."""

    words: list[int]
    parts: list[Tensor]


class _Slot:
    """Memory of this rank for one message; it is free when the receiver was done with it ``uses`` times."""

    def __init__(self, index: int, memory: Tensor, location: Location) -> None:
        self.index, self.location, self.uses = index, location, 0
        self._memory = memory
        self._numbers = memory.view(torch.int64).numpy()
        self._parts: dict[Any, Tensor] = {}  # by where they begin, and how they look

    def fill(self, head: Sequence[int], tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
        self._numbers[: len(head)] = head
        for x, start in zip(tensors, starts, strict=True):
            if x.numel():
                self._part(start, x).copy_(x.detach())

    def _part(self, start: int, like: Tensor) -> Tensor:
        key = start, like.dtype, like.shape
        if key not in self._parts:
            if len(self._parts) >= MOST_KEPT:
                self._parts.clear()
            flat = self._memory[start : start + like.numel() * like.element_size()]
            self._parts[key] = flat.view(like.dtype).view(like.shape)
        return self._parts[key]


class Mailboxes:
    """What one rank sends to the others of its group, and gets from them; one thread uses it.

    ``word_of(source, destination)`` is the word of the group's segment in which a box is published.
    """

    def __init__(
        self,
        shared: GroupSegment,
        heap: Heap,
        peers: Peers,
        num_cores: int,
        word_of: Callable[[int, int], int],
    ) -> None:
        self._shared, self._heap, self._peers, self._word_of = shared, heap, peers, word_of
        self._spin_s = SPIN_S if shared.size <= num_cores else 0.0
        self._to: dict[int, _Outbox] = {}
        self._from: dict[int, _Inbox] = {}

    def send(self, to: int, tag: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Send ``words`` (int64) and the contents of ``tensors``, of any layout; they may change at once.

        Raises:
            TypeError: a tensor that is not on the CPU.
            ValueError: ``MOST_SLOTS`` messages are under way, or the receiver has kept their tensors.
        """
        self._shared.require_own()
        self._shared.require()
        if (elsewhere := next((x for x in tensors if not x.is_cpu), None)) is not None:
            raise TypeError(f"shm: expected tensors on the CPU, got one on {elsewhere.device}: use nccl")
        if to not in self._to:
            self._to[to] = _Outbox(self._shared, self._heap, self._word_of(self._shared.rank, to))
        self._to[to].send(tag, words, tensors)

    def take(self, source: int, tag: int, label: str) -> Letter:
        """The next message from ``source`` with this ``tag``, once it is there.

        Raises:
            PeerLost: it did not come; ``label`` names what was waited for.
        """
        self._shared.require_own()
        self._shared.require()
        while (letter := self.poll(source, tag, label)) is None:
            words, word, value = self.next_word(source)
            self._wait(words, source, word, value, label)
        return letter

    def poll(self, source: int, tag: int, label: str) -> Letter | None:
        """As ``take``; None if it is not there."""
        words, word, value = self.next_word(source)
        if source not in self._from:
            if words[word] < value:
                return None
            self._from[source] = self._open(source, label)
        box = self._from[source]
        while not box.kept[tag]:
            if box.words[_POSTED] <= box.num_taken:
                return None
            with reaching(self._shared, self._peers, source, label):
                its_tag, letter = box.take(self._heap)
            box.kept[its_tag].append(letter)
        return box.kept[tag].popleft()

    def next_word(self, source: int) -> tuple[Words, int, int]:
        """The word that the next message from ``source`` raises to a value: (words, number, value)."""
        if source not in self._from:
            return self._shared.words, self._word_of(source, self._shared.rank), 1
        box = self._from[source]
        return box.words, _POSTED, box.num_taken + 1

    def flush(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until all that was sent has been taken: what lies in memory of this rank goes with it.

        Raises:
            PeerLost: a rank did not take it.
        """
        for rank, box in self._to.items():
            self._wait(box.words, rank, _TAKEN, box.num_sent, label, timeout_s)

    def _open(self, source: int, label: str) -> _Inbox:
        shared = self._shared
        word = self._word_of(source, shared.rank)
        with reaching(shared, self._peers, source, label):
            pid, inode = self._peers.table[source].pid, shared.words[word + 1]
            return _Inbox(source, segment.attach(pid, shared.words[word] - 1, inode))

    def _wait(
        self, words: Words, rank: int, word: int, value: int, label: str, timeout_s: float | None = None
    ) -> None:
        """Until ``word``, which ``rank`` writes, is at least ``value``."""
        if not words.spin(word, value, self._spin_s):
            arrival = Arrival(self._shared, self._peers, words, {rank: word}, value, label)
            self._peers.wait(arrival, label, missing=arrival.missing, timeout_s=timeout_s)


class _Outbox:
    """A box which this rank makes, publishes in ``word``, and fills."""

    def __init__(self, shared: GroupSegment, heap: Heap, word: int) -> None:
        self._heap = heap
        self._mapping = segment.create(BOX_BYTES)  # others attach by its descriptor, as long as it lives
        self.words = self._mapping.words()
        self.num_sent = self.num_slots = 0
        self._slots: defaultdict[int, deque[_Slot]] = defaultdict(deque)  # by size, the last used at the end
        shared.words.post(
            word + 1, self._mapping.inode
        )  # a descriptor's number may be another file's some day
        shared.words.post(word, self._mapping.fd + 1)

    def send(self, tag: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        lengths = [x.numel() * x.element_size() for x in tensors]
        head = [tag, len(words), len(tensors), *words, *lengths]
        starts, end = _places(len(head), lengths)
        slot = self._free(end)
        slot.fill(head, tensors, starts)
        slot.uses += 1
        place = slot.location._replace(nbytes=end)
        line = _PLACES + self.num_sent % MOST_SLOTS * _WORDS_PER_LINE
        for i, value in enumerate((slot.index, *place)):
            self.words[line + i] = value
        self.num_sent += 1
        self.words.post(_POSTED, self.num_sent)

    def _free(self, nbytes: int) -> _Slot:
        """A slot that the receiver is done with, or a new one."""
        size = max(SMALLEST_SLOT, 1 << (nbytes - 1).bit_length())
        slots = self._slots[size]
        for _ in range(len(slots)):
            slots.rotate(-1)
            if self.words[_DONE + slots[-1].index] == slots[-1].uses:
                return slots[-1]
        if self.num_slots == MOST_SLOTS:
            raise ValueError(
                f"expected at most {MOST_SLOTS} messages from one rank to another whose tensors are in use: "
                "take fewer micro-batches per step, or let go of what was received"
            )
        memory = self._heap.allocate(size, LINE).tensor
        slot = _Slot(self.num_slots, memory, self._heap.address_of(memory))
        slots.append(slot)
        self.num_slots += 1
        return slot


class _Inbox:
    """The box from rank ``source``; ``kept`` are messages that were not asked for yet, by tag."""

    def __init__(self, source: int, mapping: Mapping) -> None:
        self.source, self.words = source, mapping.words()
        self.num_taken = 0
        self.kept: defaultdict[int, deque[Letter]] = defaultdict(deque)
        self._uses: defaultdict[int, int] = defaultdict(int)  # by slot

    def take(self, heap: Heap) -> tuple[int, Letter]:
        """The tag and the contents of the next message, which is there."""
        line = _PLACES + self.num_taken % MOST_SLOTS * _WORDS_PER_LINE
        index, *place = (self.words[line + i] for i in range(5))
        memory = heap.memory(self.source, Location(*place))
        self.num_taken += 1
        self.words.post(_TAKEN, self.num_taken)
        self._uses[index] += 1
        # A tensor that is made of it keeps it: it goes with the last of them.
        done = weakref.finalize(memory, self.words.__setitem__, _DONE + index, self._uses[index])
        done.atexit = False
        tag, num_words, num_parts = unpack_from(f"{_COUNTS}q", memory)
        numbers = unpack_from(f"{num_words + num_parts}q", memory, _COUNTS * WORD)
        words, lengths = list(numbers[:num_words]), numbers[num_words:]
        starts, _ = _places(_COUNTS + len(numbers), lengths)
        with torch.inference_mode(False):  # they outlive what they are made in
            parts = [
                torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=length)
                if length
                else torch.empty(0, dtype=torch.uint8, device="cpu")
                for start, length in zip(starts, lengths, strict=True)
            ]
        return tag, Letter(words, parts)


def _places(num_numbers: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor of a message begins, after so many numbers, and where the message ends."""
    starts, end = [], round_up(num_numbers * WORD, LINE)
    for length in lengths:
        starts.append(end)
        end += round_up(length, LINE)
    return starts, end
