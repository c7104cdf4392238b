"""Where ranks meet by messages, one from each to each, whose memory is offered before they are sent.

gloo sends nothing before the receiver has told that it has room, in a message of its own, which costs as much
as a short one with words in it. So while ranks wait in one meeting, where they have nothing else to do, they
begin to receive what is sent in the next one, into other memory:

    send 1 | offer room for 2 | wait for 1 |  ...  | send 2 | offer room for 3 | wait for 2 |

A message ends with the number of its meeting, and has come when that is in the memory that it comes to
(``comm.messages.comes_soon``). As long as waits are short a rank looks there, which takes time from what
computes beside; else a thread waits:

    | number of words | what is sent | number of the meeting |

All that meet over a group do so in one place (``MeetingPlace.of``): room that has been offered is taken by
the next message, whoever sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from instep.comm.messages import Messages, comes_soon, is_there
from instep.errors import Desync
from instep.memory import allocate
from instep.mesh.axes import round_up
from instep.mesh.process_group import Group

MEETING = 3  # a tag, which no other messages over a group have
WORD_BYTES, LINE_BYTES = 8, 64
# What is sent is in the socket's buffers, on either side, when a message from there has come: whether or not
# that rank runs, this one does not wait for it.
BUFFERED_BYTES = 128 << 10
SHORT_NS = 4_000_000  # a wait, after which the next one may be as short: twice what all looks take in vain

Wait: TypeAlias = Callable[[], None]
Parts: TypeAlias = Sequence[tuple[Tensor, int]]


class MeetingPlace:
    """Memory for what the ranks of ``group`` send when they meet: in this meeting, and in the next one.

    A meeting is ``enter``, then ``exchange``; one that was entered only has not been. Its memory may be
    written to again from the ``exchange`` of the next one on. The room for a message is the same on all
    ranks, which ask for the same. A group keeps its place, which must not keep it, and so is handed it.
    """

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._number = 0  # of the last meeting
        self._room = 0  # that has been asked for
        self._by_turns = [torch.empty((group.size, 0), dtype=torch.uint8, device="cpu")] * 2
        self._used_bytes = [0, 0]  # of each row, at most; the kernel gives memory to no more
        self._offered: Wait | None = None  # room for the next meeting; waits for what comes
        self._is_closed = False
        self._waits_are_short = True

    @staticmethod
    def of(group: Group) -> MeetingPlace:
        """The one of ``group``, which keeps it as long as it has connections."""
        if not isinstance(group.offered, MeetingPlace):
            group.offered = MeetingPlace(group)
        return group.offered

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that is used, in storages that end where it does."""
        both = zip(self._by_turns, self._used_bytes, strict=True)
        return [torch.from_numpy(row) for rows, used in both if used for row in rows.numpy()[:, :used]]

    def enter(self, nbytes: int) -> Tensor:
        """Memory for what the ranks send in the next meeting: (W, room) bytes.

        A rank writes into its row, behind the first word. There is room for ``nbytes``, unless less was asked
        for in earlier meetings: that has been offered to the others. Then there is from the next meeting on.
        """
        self._room = max(self._room, round_up(nbytes, LINE_BYTES))
        if self._offered is None:
            self._make_room(self._number + 1)
        return self._by_turns[(self._number + 1) % 2]

    def exchange(self, group: Group, num_words: int, name: str) -> list[int]:
        """Send so many words of this rank's row to all, and wait for theirs; how many each has sent, by rank.

        The first word is one of them.

        Raises:
            Desync: what has come is of another meeting.
            PeerLost: a rank did not come.
            ValueError: there is no room for so many words and the number.
        """
        number = self._number + 1
        rows = self._by_turns[number % 2]
        own, seen = rows[self._rank, : (num_words + 1) * WORD_BYTES], _words(rows)
        if len(own) < (num_words + 1) * WORD_BYTES:
            raise ValueError(f"{name}: expected at most {len(own)} bytes to meet with, got {num_words} words")
        seen[self._rank, 0], seen[self._rank, num_words] = num_words + 1, number

        def begin() -> Wait:
            came = self._offered or self._offer(group, number)
            sent = _begun(group, [(own, to) for to in self._others], [])
            self._number = number
            self._offered = self._offer(group, number + 1)
            if self._is_closed:  # meanwhile, by another thread
                self._offered = None

            def wait() -> None:
                came()
                sent()

            return wait

        def have_come() -> bool:
            return all(is_there(seen[other], seen[other, 0], number) for other in self._others)

        def is_over() -> bool:
            return own.nbytes <= BUFFERED_BYTES and self._waits_are_short and comes_soon(have_come)

        begun_ns = time.monotonic_ns()
        group.run_soon(begin, is_over, name)
        self._waits_are_short = time.monotonic_ns() - begun_ns < SHORT_NS
        if not have_come():
            raise Desync(f"{name}: what has come is not of meeting {number} of this rank with the others")
        found: list[int] = seen[:, 0].tolist()
        self._used_bytes[number % 2] = max(self._used_bytes[number % 2], max(found) * WORD_BYTES)
        return [count - 1 for count in found]

    def close(self) -> None:
        """No other meeting follows: what has been offered is taken back, which ends with the connections."""
        self._is_closed = True
        self._offered = None

    def _offer(self, group: Group, number: int) -> Wait:
        """Begin to receive what the others send in meeting ``number``."""
        self._make_room(number)
        rows = self._by_turns[number % 2]
        _words(rows)[self._others, 0] = 0  # of what came before
        return _begun(group, [], [(rows[source], source) for source in self._others])

    def _make_room(self, number: int) -> None:
        """For meeting ``number``. What is in its memory is of two meetings before, and not needed."""
        size, room = self._by_turns[number % 2].shape
        if room < self._room:
            with torch.inference_mode(False):  # it outlives what it is made in
                memory = allocate(size * self._room, LINE_BYTES).tensor[: size * self._room]
            self._by_turns[number % 2], self._used_bytes[number % 2] = memory.view(size, self._room), 0


def _words(rows: Tensor) -> Any:
    return rows.view(torch.int64).numpy()


def _begun(group: Group, sends: Parts, receives: Parts) -> Wait:
    """Messages of a meeting; a rank that is lost is told of where they are waited for.

    It may be one that has ended well, and which comes to no other meeting.
    """
    return Messages(group.pg, group.ranks, tag=MEETING).begin_anyway(sends, receives)
