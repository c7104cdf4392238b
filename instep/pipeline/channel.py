"""What the ranks of a pipeline send each other: activations on the way forward, gradients on the way back.

Every message says of which step and action it is, so that ranks that are out of step find out before they
compute with it, and how its tensors look (``message_words.py``). Two ranks send each other one message after
the other, in the order in which they are posted.

Ranks that share memory receive a message where its sender has put it (``shm/mailboxes.py``); others receive
it over connections (``connections.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.launch.rank_exit import mark_secondary
from instep.net.clocks import measure
from instep.net.process_group import Group
from instep.pipeline.actions import Action
from instep.pipeline.connections import NEWS, PACKETS, Check, Connections
from instep.pipeline.message_words import (
    ENDING,
    EVALUATION,
    GONE,
    HEAD,
    LEAVES,
    NO_STAGE,
    NUM_KEYS,
    STAYS,
    VALUES,
    VERSION,
    MessageHead,
    described,
    numbers_of,
    sent_for,
    specs_of,
)

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

    What its sender had on a device of its own comes to ``device``, the rest to the CPU; ``directions`` as of
    ``Connections``.
    """

    def __init__(
        self, group: Group, device: torch.device | None = None, directions: Sequence[Group] = ()
    ) -> None:
        self.group, self.device, self.directions = group, device or torch.device("cpu"), directions
        mailboxes = getattr(group.pg, "mailboxes", None)  # of a backend whose ranks share memory
        self._way: Connections | SharedMemory
        if mailboxes is None:
            self._way = Connections(group, self.device, directions)
        else:
            self._way = SharedMemory(group, self.device, mailboxes)
        self._offsets_ns = measure(group).offsets_ns
        self._posted: defaultdict[int, deque[tuple[Action, int]]] = defaultdict(deque)  # by source, and when
        self._come: dict[Action, tuple[MessageHead, list[Tensor | None], int]] = {}  # before they were taken
        self._step, self._num_micro_batches, self._data = EVALUATION, 0, NO_DATA
        self._has_left = False
        self.is_broken = False  # a rank does not come to the end of this step

    @contextmanager
    def begun(self, step: int, num_micro_batches: int = 0, data: Data = NO_DATA) -> Iterator[None]:
        """Inside, messages are of this ``step``, or of an ``EVALUATION``; the others are told if it fails.

        ``data``: identity and position of the source that its micro-batches have their data from, which have
        to be the same where inputs and where targets are read.

        Raises:
            Desync: this rank has left the one before.
        """
        try:
            if self._has_left:
                raise Desync(
                    f"rank {self.group.global_rank} comes to {_named(step)} after {_named(self._step)} was "
                    "given up, with messages under way that nobody has taken: make another pipeline, or run "
                    "the script by `instep run`, which does"
                )
            self._step, self._num_micro_batches, self._data = step, num_micro_batches, data
            self._way.begin()
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def send(self, action: Action, to: int, number: int, tensors: Sequence[Tensor | None]) -> None:
        """Begin to send ``tensors`` to group rank ``to``, as ``action``, with a ``number``. They must not
        change until ``flush``.

        Raises:
            TypeError: they cannot be sent.
        """
        rows, found = described(action, tensors)
        head = MessageHead._make((*self._key(action), number, time.monotonic_ns(), len(tensors)))
        self._way.send(action, to, head, rows, found)

    def post(self, action: Action, source: int) -> None:
        """Receive ``action`` from group rank ``source`` from now on."""
        self._posted[source].append((action, time.monotonic_ns()))
        self._way.post(action, source)

    def take(self, action: Action, source: int) -> Received:
        """What ``action``, which was posted, receives from ``source``, once it is there.

        Tensors require gradients where those that were sent do.

        Raises:
            Desync: ``source`` sends something else, or has left the step.
            PeerLost: it did not come.
        """
        start_ns = time.monotonic_ns()
        while action not in self._come:
            first, posted_ns = self._posted[source].popleft()
            check = partial(self._check, action=first, source=source)
            self._come[first] = (*self._way.take(source, str(first), check), posted_ns)
        head, tensors, posted_ns = self._come.pop(action)
        return Received(head.number, tensors, self._waited(source, head.sent_ns, posted_ns, start_ns))

    def _waited(self, source: int, sent_ns: int, posted_ns: int, start_ns: int) -> MessageWait | None:
        end_ns = time.monotonic_ns()
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
        left = GONE if self.is_broken else LEAVES
        head = MessageHead._make((*self._key(NEWS), 0, time.monotonic_ns(), 0))._replace(left=left)
        with suppress(RuntimeError):
            self._way.tell(head, 0.0 if comes or isinstance(error, InstepError) else TELLING_S)

    def _key(self, action: Action) -> tuple[int, ...]:
        """The words that say what a message is, sent as ``action``."""
        return VERSION, STAYS, self._step, self._num_micro_batches, *self._data, *numbers_of(action)

    def _check(self, head: MessageHead, action: Action, source: int) -> None:
        """Raise ``Desync`` unless it is the head that ``action`` waits for."""
        if head[:NUM_KEYS] == self._key(sent_for(action)):
            return
        mine, other = self.group.global_rank, self.group.ranks[source]
        what = _named(EVALUATION) if self._step == EVALUATION else f"{action} of step {self._step}"
        waits = f"rank {mine} waits for rank {other} in {what}"
        if head.left:
            self.is_broken |= head.left == GONE
            reason = f"{waits}, which rank {other} has left by an error of its own: see there"
            raise mark_secondary(Desync(reason))
        if (head.version, head.step) != (VERSION, self._step):
            pass
        elif head.num_micro_batches != self._num_micro_batches:
            raise Desync(
                f"rank {mine} makes step {head.step} with {self._num_micro_batches} micro-batches, and rank "
                f"{other} with {head.num_micro_batches}: pass the same data= on all ranks"
            )
        elif (head.data_identity, head.data_position) != self._data:
            differ = "order, data set or sizes" if head.data_identity != self._data[0] else "position"
            raise Desync(
                f"rank {mine} makes step {head.step} with other data than rank {other}, so that outputs "
                f"would meet the targets of other samples: {differ} of their loaders differ. Pass as data=, "
                "on all ranks, an instep.Loader with the same number of samples, sizes, seed, shuffle and "
                "position"
            )
        raise Desync(
            f"{waits}, but rank {other} sends {head.action} of {_named(head.step)} (version {head.version}): "
            "both have to run the same script, with the same schedule and the same steps"
        )


class SharedMemory:
    """Messages between ranks that reach each other's memory: what was sent lies there, and is taken there."""

    def __init__(self, group: Group, device: torch.device, mailboxes: Any) -> None:
        self._mailboxes, self._device = mailboxes, device
        self._others = [rank for rank in range(group.size) if rank != group.rank]

    def begin(self) -> None:
        """Nothing: any size is as good."""

    def send(
        self, action: Action, to: int, head: MessageHead, rows: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        self._mailboxes.send(to, PACKETS, [*head, *rows], tensors)

    def post(self, action: Action, source: int) -> None:
        """Nothing: it lies there when it comes."""

    def take(self, source: int, label: str, check: Check) -> tuple[MessageHead, list[Tensor | None]]:
        words, parts = self._mailboxes.take(source, PACKETS, label)
        head = MessageHead(*words[:HEAD])
        check(head)
        left = iter(parts)
        specs = specs_of(words[HEAD:])
        return head, [None if spec is None else spec.of(next(left), self._device) for spec in specs]

    def flush(self) -> None:
        self._mailboxes.flush(ENDING)

    def tell(self, head: MessageHead, seconds: float) -> None:
        """Let all ranks have ``head``, for which there is no need to wait."""
        for to in self._others:
            self._mailboxes.send(to, PACKETS, head, [])


def _named(step: int) -> str:
    return "an evaluation" if step == EVALUATION else f"step {step}"
