"""Messages that are read where they lie: the sender copies them into memory that the receiver maps.

A message is copied once, in the sender's own thread, which never waits for the receiver:

    sender     copy into a free *slot*, post its place                 . . . slot 0 is free again
    receiver                           . wait | tensors that are the slot ... | the last tensor is freed

Each pair of ranks has a box: a ring of the places of messages, and for each slot a word in which the receiver
counts how often it has finished with the slot. A slot is memory of the sender's heap, a power of two of
bytes, of which untouched pages take no memory. Slots are reused; there are as many as messages were in flight
at once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from struct import unpack_from
from typing import NamedTuple

import torch
from torch import Tensor

from instep.mesh.axes import round_up
from instep.shm import segment
from instep.shm.call import Location
from instep.shm.group_segment import LINE, PAGE, WORD
from instep.shm.heap import Heap
from instep.shm.rounds import Arrival, Rounds
from instep.shm.segment import Mapping, Words, tensor_over

MOST_SLOTS = 4096  # messages in flight from one rank to another
SMALLEST_SLOT = PAGE
_LINE_WORDS = LINE // WORD
# Words of a box: how many messages were posted and how many received; a line for the place of each of the
# last ones; a word per slot.
_POSTED, _TAKEN, _PLACES = 0, _LINE_WORDS, 2 * _LINE_WORDS
_DONE = _PLACES + MOST_SLOTS * _LINE_WORDS
BOX_BYTES = round_up((_DONE + MOST_SLOTS) * WORD, PAGE)
_COUNTS = 3  # of a message: tag, number of words, number of tensors


class Letter(NamedTuple):
    """A received message: ``words``, and the bytes of each tensor, in memory of the sender."""

    words: list[int]
    parts: list[Tensor]


class _Slot:
    """Memory for one message; free when the receiver has finished with it ``uses`` times."""

    def __init__(self, index: int, memory: Tensor, location: Location) -> None:
        self.index, self.memory, self.location, self.uses = index, memory, location, 0


class Mailboxes:
    """Messages of one ``kind`` between one rank and the others of its group; for one thread at a time."""

    def __init__(self, rounds: Rounds, heap: Heap, kind: int) -> None:
        self._rounds, self._shared, self._heap, self._kind = rounds, rounds.shared, heap, kind
        self._to: dict[int, _Outbox] = {}
        self._from: dict[int, _Inbox] = {}

    def send(self, to: int, tag: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Send ``words`` (int64) and the contents of ``tensors``, of any layout; they may change at once.

        Raises:
            TypeError: a tensor is not on the CPU.
            ValueError: ``MOST_SLOTS`` messages are in flight, or the receiver has kept their tensors.
        """
        self._shared.require_usable()
        if (elsewhere := next((x for x in tensors if not x.is_cpu), None)) is not None:
            raise TypeError(f"shm: expected a tensor on the CPU, got one on {elsewhere.device}: use nccl")
        if to not in self._to:
            box = self._to[to] = _Outbox(self._heap)
            word = self._shared.box_word(self._kind, self._shared.rank, to)
            self._shared.words[word + 1] = box.mapping.inode  # a descriptor's number may be reused
            self._shared.words.post(word, box.mapping.fd + 1)
        self._to[to].send(tag, words, tensors)

    def take(self, source: int, tag: int, label: str) -> Letter:
        """The next message from ``source`` with this ``tag``, once it is there.

        Raises:
            PeerLost: it did not come; ``label`` names the operation.
        """
        self._shared.require_usable()
        while (letter := self.poll(source, tag, label)) is None:
            self._wait(source, self.next_word(source), label)
        return letter

    def poll(self, source: int, tag: int, label: str) -> Letter | None:
        """As ``take``; None if it is not there."""
        words, word, target = self.next_word(source)
        if source not in self._from:
            if words[word] < target:
                return None
            with self._rounds.reaching(source, label):
                pid, fd, inode = self._rounds.peers.table[source].pid, words[word] - 1, words[word + 1]
                self._from[source] = _Inbox(source, segment.attach(pid, fd, inode))
        box = self._from[source]
        while not box.kept[tag]:
            if box.words[_POSTED] <= box.num_taken:
                return None
            its_tag, letter = box.take(self._heap, label)
            box.kept[its_tag].append(letter)
        return box.kept[tag].popleft()

    def next_word(self, source: int) -> tuple[Words, int, int]:
        """The word that the next message from ``source`` raises: words, index and value."""
        if source not in self._from:
            return self._shared.words, self._shared.box_word(self._kind, source, self._shared.rank), 1
        box = self._from[source]
        return box.words, _POSTED, box.num_taken + 1

    def flush(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until all messages have been received: the memory they lie in ends with this rank.

        Raises:
            PeerLost: a rank did not receive them.
        """
        for rank, box in self._to.items():
            self._wait(rank, (box.words, _TAKEN, box.num_sent), label, timeout_s)

    def _wait(
        self, rank: int, awaited: tuple[Words, int, int], label: str, timeout_s: float | None = None
    ) -> None:
        """Until a word that ``rank`` writes is at its target."""
        words, word, target = awaited
        if not words.spin(word, target, self._rounds.spin_s):
            Arrival(self._shared, self._rounds.peers, {rank: awaited}, label).wait_by_deadline(timeout_s)


class _Outbox:
    """The messages of this rank to another one."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.mapping = segment.create(BOX_BYTES)  # kept: the receiver attaches by its descriptor
        self.words = self.mapping.words()
        self.num_sent = self.num_slots = 0
        self._slots: defaultdict[int, deque[_Slot]] = defaultdict(deque)  # by size; the last used at the end

    def send(self, tag: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        lengths = [x.nbytes for x in tensors]
        head = [tag, len(words), len(tensors), *words, *lengths]
        starts, end = _places(len(head), lengths)
        slot = self._free(end)
        slot.memory.view(torch.int64).numpy()[: len(head)] = head
        for x, start in zip(tensors, starts, strict=True):
            if x.numel():
                slot.memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x.detach())
        slot.uses += 1
        place = slot.location._replace(nbytes=end)
        line = _PLACES + self.num_sent % MOST_SLOTS * _LINE_WORDS
        for i, value in enumerate((slot.index, *place)):
            self.words[line + i] = value
        self.num_sent += 1
        self.words.post(_POSTED, self.num_sent)

    def _free(self, nbytes: int) -> _Slot:
        """A slot that the receiver has finished with, or a new one."""
        size = max(SMALLEST_SLOT, 1 << (nbytes - 1).bit_length())
        slots = self._slots[size]
        for _ in range(len(slots)):
            slots.rotate(-1)
            if self.words[_DONE + slots[-1].index] == slots[-1].uses:
                return slots[-1]
        if self.num_slots == MOST_SLOTS:
            raise ValueError(
                f"expected at most {MOST_SLOTS} messages from one rank to another whose tensors are in use: "
                "take fewer micro-batches per step, or release what was received"
            )
        memory = self._heap.allocate(size).tensor
        slot = _Slot(self.num_slots, memory, self._heap.address_of(memory))
        slots.append(slot)
        self.num_slots += 1
        return slot


class _Inbox:
    """The messages from rank ``source``; ``kept`` are those that nobody has asked for yet, by tag."""

    def __init__(self, source: int, mapping: Mapping) -> None:
        self.source, self.words = source, mapping.words()
        self.num_taken = 0
        self.kept: defaultdict[int, deque[Letter]] = defaultdict(deque)
        self._uses: defaultdict[int, int] = defaultdict(int)  # by slot

    def take(self, heap: Heap, label: str) -> tuple[int, Letter]:
        """The tag and the contents of the next message, which is there."""
        line = _PLACES + self.num_taken % MOST_SLOTS * _LINE_WORDS
        index, *place = (self.words[line + i] for i in range(5))
        memory = heap.memory(self.source, Location(*place), label)
        self.num_taken += 1
        self.words.post(_TAKEN, self.num_taken)
        self._uses[index] += 1
        # Its tensors keep ``memory`` alive: the slot is free when the last of them is gone.
        done = weakref.finalize(memory, self.words.__setitem__, _DONE + index, self._uses[index])
        done.atexit = False
        tag, num_words, num_parts = unpack_from(f"{_COUNTS}q", memory)
        numbers = unpack_from(f"{num_words + num_parts}q", memory, _COUNTS * WORD)
        words, lengths = list(numbers[:num_words]), numbers[num_words:]
        starts, _ = _places(_COUNTS + len(numbers), lengths)
        parts = [tensor_over(memory, start, length) for start, length in zip(starts, lengths, strict=True)]
        return tag, Letter(words, parts)


def _places(num_numbers: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor of a message starts, after so many numbers, and where the message ends."""
    starts, end = [], round_up(num_numbers * WORD, LINE)
    for length in lengths:
        starts.append(end)
        end += round_up(length, LINE)
    return starts, end
