"""What the ranks of a pipeline send each other: activations on the way forward, gradients on the way back.

A message is a line of words, then its tensors. The words say what it is, so that ranks that are out of step
find out before they compute with it, and how the tensors look. Strides go along: what is computed from a
transposed tensor, or from one in ``torch.channels_last``, has other last bits than from a contiguous copy.
Two ranks send each other one message after the other, in the order in which they are posted.

Ranks that share memory receive a message where its sender has put it (``shm/mailboxes.py``); others receive
it over connections (``pipeline/connections.py``).

What is on a GPU travels through the host's memory, by gloo, and comes to the receiver's GPU. In NCCL what two
ranks send each other shares one stream: where both send before they receive, as schedules have it, neither
would go on.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.launch.rank_exit import mark_secondary
from instep.net.clocks import measure
from instep.net.process_group import Group
from instep.pipeline.actions import Action
from instep.pipeline.connections import WORDS, Connections
from instep.pipeline.message_words import (
    ENDING,
    EVALUATION,
    GONE,
    KINDS,
    LEAVES,
    LEFT,
    NO_STAGE,
    NUMBER,
    ROW,
    SENT_NS,
    STAYS,
    VALUES,
    VERSION,
    Check,
    as_sent,
    numbers_of,
    rows_for,
    sent_for,
    specs_of,
)
from instep.state.homes import dense_strides, with_strides

TELLING_S = 1.0  # those who compute find out later, by the connection that has ended
THERE_NS = 500_000  # in which a message is taken that was there already
Data: TypeAlias = tuple[int, int]
NO_DATA: Data = 0, -1


class MessageWait(NamedTuple):
    """When a message was waited for, when it was sent, as far as clocks tell, and from when it was under way:
    when its receive was posted, too. By this rank's clock."""

    start_ns: int
    sent_ns: int
    under_way_ns: int
    end_ns: int


class Received(NamedTuple):
    """A message that has come, with the ``number`` that its sender has given to it.

    ``waited`` is None if it was there already: then it is not known when it came.
    """

    number: int
    tensors: list[Tensor | None]
    waited: MessageWait | None


class StageChannel:
    """Messages between the ranks of ``group``; one thread uses it. They are all of the step begun last.

    What its sender had on a device of its own comes to ``device``, the rest to the CPU.
    """

    def __init__(self, group: Group, device: torch.device | None = None) -> None:
        self.group, self.device = group, device or torch.device("cpu")
        mailboxes = getattr(group.pg, "mailboxes", None)  # of a backend whose ranks share memory
        self._way = Connections(group) if mailboxes is None else SharedMemory(group, mailboxes)
        self._offsets_ns = measure(group).offsets_ns
        self._posted_ns: dict[Action, int] = {}
        self._step, self._num_micro_batches, self._data = EVALUATION, 0, NO_DATA
        self._has_left = False
        self.is_broken = False  # a rank does not come to the end of this step

    def begin(self, step: int, num_micro_batches: int = 0, data: Data = NO_DATA) -> None:
        """Messages are of this ``step`` from now on, or of an ``EVALUATION``.

        ``data``: identity and position of the source that its micro-batches have their data from, which have
        to be the same where inputs and where targets are read.

        Raises:
            Desync: this rank has left the one before.
        """
        if self._has_left:
            raise Desync(
                f"rank {self.group.global_rank} comes to {_named(step)} after {_named(self._step)} was given "
                "up, with messages under way that nobody has taken: make another pipeline, or run the script "
                "by `instep run`, which does"
            )
        self._step, self._num_micro_batches, self._data = step, num_micro_batches, data

    def send(self, action: Action, to: int, number: int, tensors: Sequence[Tensor | None]) -> None:
        """Begin to send ``tensors`` to group rank ``to``, as ``action``, with a ``number``. They must not
        change until ``flush``.

        Raises:
            TypeError: there are not only tensors.
            ValueError: there are too many of them.
        """
        if others := [x for x in tensors if not isinstance(x, Tensor | None)]:
            raise TypeError(
                f"{action}: expected a tensor or a tuple of tensors from stage {action.stage} to the next, "
                f"got {type(others[0]).__name__}: cut elsewhere, or let the next layer make it"
            )
        dense = [None if x is None else with_strides(x.detach(), dense_strides(x)) for x in tensors]
        words = self._words(action, number, rows_for(action, tensors, dense))
        self._way.send(to, words, [x.as_strided((x.numel(),), (1,)).cpu() for x in dense if x is not None])

    def post(self, action: Action, source: int) -> None:
        """Receive ``action`` from group rank ``source`` from now on."""
        self._posted_ns[action] = time.monotonic_ns()
        self._way.post(action, source)

    def take(self, action: Action, source: int) -> Received:
        """What ``action``, which was posted, receives from ``source``, once it is there.

        Tensors require gradients where those that were sent do.

        Raises:
            Desync: ``source`` sends something else, or has left the step.
            PeerLost: it did not come.
        """

        def check(words: Sequence[int], action: Action) -> None:
            self._check(words, action, source)

        start_ns = time.monotonic_ns()
        words, contiguous = self._way.take(action, source, check)
        waited = self._waited(action, source, words[SENT_NS], start_ns)
        return Received(words[NUMBER], [*as_sent(words, contiguous, self.device)], waited)

    def _waited(self, action: Action, source: int, sent_ns: int, start_ns: int) -> MessageWait | None:
        end_ns, posted_ns = time.monotonic_ns(), self._posted_ns.pop(action)
        ahead_ns = self._offsets_ns[source] - self._offsets_ns[self.group.rank]
        sent_ns = min(sent_ns - ahead_ns, end_ns)
        if sent_ns <= start_ns and end_ns - start_ns < THERE_NS:
            return None
        return MessageWait(start_ns, sent_ns, max(sent_ns, posted_ns), end_ns)

    def send_values(self, values: Sequence[Tensor | None], to: int) -> None:
        """Begin to send ``values``, of which the other one knows nothing."""
        self.send(Action(NO_STAGE, VALUES, 0), to, 0, values)

    def receive_values(self, source: int) -> list[Tensor | None]:
        """What ``source`` has sent by ``send_values``."""
        action = Action(NO_STAGE, VALUES, 0)
        self.post(action, source)
        return self.take(action, source).tensors

    def flush(self) -> None:
        """Wait until what was sent may be changed."""
        self._way.flush()

    def leave(self, error: BaseException) -> None:
        """Tell the others, where they expect a message, that this rank sends no more in this step.

        What they have posted for tensors is never sent: there is no use of this channel afterwards. Where
        this rank alone has ``error``, and does not come to the end of the step, wait a moment until they
        know: what follows may be its own end.
        """
        if self._has_left:
            return
        self._has_left = True
        if isinstance(error, PeerLost):  # elsewhere perhaps, along another axis
            self.is_broken |= not error.ranks or not set(error.ranks).isdisjoint(self.group.ranks)
        self.is_broken |= not isinstance(error, Exception)
        comes = self._step != EVALUATION and not self.is_broken
        words = self._words(Action(0, VALUES, 0), 0)
        words[LEFT] = GONE if self.is_broken else LEAVES
        with suppress(RuntimeError):
            self._way.tell(words, 0.0 if comes or isinstance(error, InstepError) else TELLING_S)

    def _words(self, action: Action, number: int, rows: Sequence[int] = ()) -> list[int]:
        """``rows`` are those of ``rows_for``."""
        head = [VERSION, STAYS, self._step, self._num_micro_batches, *self._data, *numbers_of(action)]
        return [*head, number, time.monotonic_ns(), 0, len(rows) // ROW, *rows]

    def _check(self, words: Sequence[int], action: Action, source: int) -> None:
        version, left, step, count, identity, position, *sent = words[:NUMBER]
        mine, other = self.group.global_rank, self.group.ranks[source]
        what = _named(EVALUATION) if self._step == EVALUATION else f"{action} of step {self._step}"
        waits = f"rank {mine} waits for rank {other} in {what}"
        if left:
            self.is_broken |= left == GONE
            reason = f"{waits}, which rank {other} has left by an error of its own: see there"
            raise mark_secondary(Desync(reason))
        if (version, step) == (VERSION, self._step) and count != self._num_micro_batches:
            raise Desync(
                f"rank {mine} makes step {step} with {self._num_micro_batches} micro-batches, and rank "
                f"{other} with {count}: pass the same data= on all ranks"
            )
        if (version, step) == (VERSION, self._step) and (identity, position) != self._data:
            differ = "order, data set or sizes" if identity != self._data[0] else "position"
            raise Desync(
                f"rank {mine} makes step {step} with other data than rank {other}, so that outputs would "
                f"meet the targets of other samples: {differ} of their loaders differ. Pass as data=, on all "
                "ranks, an instep.Loader with the same number of samples, sizes, seed, shuffle and position"
            )
        if (version, step, sent) != (VERSION, self._step, numbers_of(sent_for(action))):
            stage, kind, micro_batch, tie = sent
            found = Action(stage, KINDS[kind], micro_batch, tie) if kind < len(KINDS) else f"kind {kind}"
            raise Desync(
                f"{waits}, but rank {other} sends {found} of {_named(step)} (version {version}): both have "
                "to run the same script, with the same schedule and the same steps"
            )


class SharedMemory:
    """Messages between ranks that reach each other's memory: what was sent lies there, and is taken there."""

    def __init__(self, group: Group, mailboxes: Any) -> None:
        self._mailboxes = mailboxes
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._posted: defaultdict[int, deque[Action]] = defaultdict(deque)  # by source, in order
        self._come: dict[Action, tuple[list[int], list[Tensor]]] = {}  # before they were taken

    def send(self, to: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._mailboxes.send(to, WORDS, words, tensors)

    def post(self, action: Action, source: int) -> None:
        self._posted[source].append(action)

    def take(self, action: Action, source: int, check: Check) -> tuple[list[int], list[Tensor]]:
        while action not in self._come:
            first = self._posted[source].popleft()
            words, parts = self._mailboxes.take(source, WORDS, str(first))
            check(words, first)
            found = [spec.of(part) for spec, part in zip(specs_of(words), parts, strict=True)]
            self._come[first] = words, found
        return self._come.pop(action)

    def flush(self) -> None:
        self._mailboxes.flush(ENDING)

    def tell(self, words: Sequence[int], seconds: float) -> None:
        """Let all ranks have ``words``, for which there is no need to wait."""
        for to in self._others:
            self._mailboxes.send(to, WORDS, words, [])


def _named(step: int) -> str:
    return "an evaluation" if step == EVALUATION else f"step {step}"
