"""What the ranks of a pipeline send each other: activations on the way forward, gradients on the way back.

A message is a line of words, then its tensors. The words say what it is, so that ranks that are out of step
find out before they compute with it, and how the tensors look. Strides go along: what is computed from a
transposed tensor, or from one in ``torch.channels_last``, has other last bits than from a contiguous copy.
Two ranks send each other one message after the other, in the order in which they are taken.

Ranks that share memory receive a message where its sender has put it (``shm/mailboxes.py``). Over connections
a receive needs memory of its own before it is there. How much, is learned with the first message of a kind;
from then on the next ones can be received before they are waited for:

    post 1RECV_F0      how it looks is not known: it is remembered
    take 1RECV_F0      wait for the words, then for the tensors
    post 1RECV_F1      words and tensors may come from now on
    take 1RECV_F1      wait until they are there

A thread waits for each connection, in each direction: when a message comes while the rank computes it is
there, and what is sent is let go as soon as it is.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from instep.errors import Desync
from instep.memory import ALIGN_BYTES
from instep.mesh.axes import round_up
from instep.mesh.clocks import measure
from instep.mesh.process_group import Group
from instep.ordered.homes import dense_strides, with_strides
from instep.pipeline.actions import SEND_FORWARD, Action
from instep.work import Running

MAX_TENSORS, MAX_DIMS = 16, 8
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
VERSION = 2
# Version, whether the sender has left the step, step, stage, micro-batch, weight, when it was sent, number of
# tensors.
FIELDS = 8
LEFT, WEIGHT, SENT_NS = 1, 5, 6
ROW = 2 + 2 * MAX_DIMS  # of a tensor: dtype, number of dimensions, shape, strides
NUM_WORDS = FIELDS + MAX_TENSORS * ROW
WORD, ALIGN = 8, ALIGN_BYTES["cpu"]
HEAD_BYTES = round_up(NUM_WORDS * WORD, ALIGN)
TELLING_S = 1.0  # those who compute find out later, by the connection that has ended
SHORT_BYTES = 1 << 18  # of a message: to copy so much costs less than a second one
THERE_NS = 20_000  # in which a message is taken that was there already
NO_STAGE = -1  # of an evaluation, whose batches may have any shapes
STAGES = 0  # the tag of what stages send each other
ENDING = "the end of a pipeline's step"

Kind: TypeAlias = tuple[int, str]
"""Stage and kind of a receive: its messages look alike."""
Check: TypeAlias = Callable[[Sequence[int], Action], None]
"""Raises if the words are not those that an action waits for."""


class Look(NamedTuple):
    """What there is to know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def new(self) -> Tensor:
        """Memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype)

    def of(self, part: Tensor) -> Tensor:
        """``part``, its bytes, as such a tensor."""
        return part.view(self.dtype).view(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class MessageWait(NamedTuple):
    """When a message was waited for, when it was sent, as far as clocks tell, and from when it was under way:
    when its receive was posted, too. By this rank's clock."""

    start_ns: int
    sent_ns: int
    under_way_ns: int
    end_ns: int


class Received(NamedTuple):
    """A message that has come; ``weight`` is the micro-batch's, as far as its sender knows.

    ``waited`` is None if it was there already: then it is not known when it came.
    """

    weight: int
    tensors: list[Tensor]
    waited: MessageWait | None


class StageChannel:
    """Messages between the ranks of ``group``, which has no other user; one thread uses it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        mailboxes = getattr(group.pg, "mailboxes", None)  # of a backend whose ranks share memory
        self._way = Connections(group) if mailboxes is None else SharedMemory(group, mailboxes)
        self._told: dict[Kind, list[Look]] = {}  # of what is sent
        self._offsets_ns = measure(group).offsets_ns
        self._posted_ns: dict[Action, int] = {}
        self._left: int | None = None  # the step that was given up

    def send(self, action: Action, to: int, step: int, weight: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send ``tensors`` to group rank ``to``, as ``action``. They must not change until
        ``flush``.

        Raises:
            ValueError: they do not look like those of the first micro-batch.
        """
        self._require_whole(step)
        if others := [x for x in tensors if not isinstance(x, Tensor)]:
            raise TypeError(
                f"{action}: expected tensors from one stage to the next, got a {type(others[0]).__name__}: "
                "cut elsewhere, or let the next layer make it"
            )
        looks, kind = [Look(x.dtype, tuple(x.shape)) for x in tensors], (action.stage, action.kind)
        dense = [with_strides(x.detach(), dense_strides(x)) for x in tensors]
        is_first = kind not in self._told or action.stage == NO_STAGE
        known = looks if is_first else self._told[kind]
        if known != looks:
            raise ValueError(
                f"{action}: stage {action.stage} gave {_listed(known)} in the first micro-batch, and now "
                f"{_listed(looks)}: the next stage has its memory ready for these, so give all "
                "micro-batches the same shapes, by padding for instance"
            )
        words = _words(action, step, weight, _rows(action, looks, [x.stride() for x in dense]))
        self._told[kind] = looks
        flat = [x.as_strided((x.numel(),), (1,)) for x in dense]
        self._way.send(to, STAGES, words, flat, is_known=not is_first)

    def post(self, action: Action, source: int) -> None:
        """Receive ``action`` from group rank ``source`` from now on, if it is known how that looks."""
        self._posted_ns[action] = time.monotonic_ns()
        self._way.post(action, source)

    def take(self, action: Action, source: int, step: int) -> Received:
        """What ``action``, which was posted, receives from ``source``, once it is there.

        Raises:
            Desync: ``source`` sends something else, or has left the step.
            PeerLost: it did not come.
        """
        self._require_whole(step)

        def check(words: Sequence[int], action: Action) -> None:
            self._check(words, action, source, step)

        start_ns = time.monotonic_ns()
        words, contiguous = self._way.take(action, source, check)
        waited = self._waited(action, source, words[SENT_NS], start_ns)
        strided = zip(contiguous, _strides(words), strict=True)
        return Received(words[WEIGHT], [x.as_strided(x.shape, its) for x, its in strided], waited)

    def _waited(self, action: Action, source: int, sent_ns: int, start_ns: int) -> MessageWait | None:
        end_ns, posted_ns = time.monotonic_ns(), self._posted_ns.pop(action)
        if end_ns - start_ns < THERE_NS:
            return None
        ahead_ns = self._offsets_ns[source] - self._offsets_ns[self.group.rank]
        sent_ns = min(sent_ns - ahead_ns, end_ns)
        return MessageWait(start_ns, sent_ns, max(sent_ns, posted_ns), end_ns)

    def send_alone(self, x: Tensor, to: int, tag: int) -> None:
        """Begin to send ``x``, of which the other one knows how it looks; messages of another ``tag``
        may come before it."""
        self._way.send(to, tag, [], [x])

    def receive_alone(self, look: Look, source: int, tag: int, operation: str) -> Tensor:
        """What ``source`` has sent by ``send_alone``, once it is there."""
        return self._way.alone(look, source, tag, operation)

    def send_values(self, values: Sequence[Tensor], to: int) -> None:
        """Begin to send ``values``, of which the other one knows nothing."""
        self.send(Action(NO_STAGE, SEND_FORWARD, 0), to, 0, 1, values)

    def receive_values(self, source: int) -> list[Tensor]:
        """What ``source`` has sent by ``send_values``."""
        action = Action(NO_STAGE, SEND_FORWARD, 0)
        self.post(action, source)
        return self.take(action, source, 0).tensors

    def flush(self) -> None:
        """Wait until what was sent may be changed."""
        self._way.flush()

    def leave(self, step: int, *, patient: bool) -> None:
        """Tell the others, where they expect a message, that this rank sends no more in ``step``.

        What they have posted for tensors is never sent: the group is of no use afterwards. ``patient``: wait
        a moment until they know, as what follows may be the end of this rank.
        """
        if self._left is not None:
            return
        self._left = step
        words = _words(Action(0, SEND_FORWARD, 0), step, 0)
        words[LEFT] = 1
        with suppress(RuntimeError):
            self._way.tell(words, TELLING_S if patient else 0.0)

    def _require_whole(self, step: int) -> None:
        if self._left is not None:
            raise Desync(
                f"rank {self.group.global_rank} comes to step {step} after step {self._left} was given up, "
                "with messages under way that nobody has taken: make another pipeline, or run the script by "
                "`instep run`, which does"
            )

    def _check(self, words: Sequence[int], action: Action, source: int, step: int) -> None:
        version, left, its_step, stage, micro_batch, *_ = words[:FIELDS]
        mine, other = self.group.global_rank, self.group.ranks[source]
        if left:
            raise Desync(
                f"rank {mine} waits for rank {other} in {action} of step {step}, which rank {other} has left "
                "by an error of its own: see there"
            )
        sent = action.stage + {"RECV_F": -1, "RECV_B": 1}.get(action.kind, 0)
        if (version, its_step, stage, micro_batch) != (VERSION, step, sent, action.micro_batch):
            raise Desync(
                f"rank {mine} waits for rank {other} in {action} of step {step}, but rank {other} sends what "
                f"stage {stage} has made of micro-batch {micro_batch} in step {its_step} (version {version}"
                "): both have to run the same script, with the same schedule and the same steps"
            )


class SharedMemory:
    """Messages between ranks that reach each other's memory: what was sent lies there, and is taken there."""

    def __init__(self, group: Group, mailboxes: Any) -> None:
        self._mailboxes = mailboxes
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._posted: defaultdict[int, deque[Action]] = defaultdict(deque)  # by source, in order
        self._come: dict[Action, tuple[list[int], list[Tensor]]] = {}  # before they were taken

    def send(
        self,
        to: int,
        tag: int,
        words: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        is_known: bool = False,
    ) -> None:
        self._mailboxes.send(to, tag, words, tensors)

    def post(self, action: Action, source: int) -> None:
        self._posted[source].append(action)

    def take(self, action: Action, source: int, check: Check) -> tuple[list[int], list[Tensor]]:
        while action not in self._come:
            first = self._posted[source].popleft()
            words, parts = self._mailboxes.take(source, STAGES, str(first))
            check(words, first)
            found = [look.of(part) for look, part in zip(_looks(words), parts, strict=True)]
            self._come[first] = words, found
        return self._come.pop(action)

    def alone(self, look: Look, source: int, tag: int, operation: str) -> Tensor:
        return look.of(self._mailboxes.take(source, tag, operation).parts[0])

    def flush(self) -> None:
        self._mailboxes.flush(ENDING)

    def tell(self, words: Sequence[int], seconds: float) -> None:
        """Let all ranks have ``words``, for which there is no need to wait."""
        for to in self._others:
            self._mailboxes.send(to, STAGES, words, [])


class Posted:
    """A receive that is under way, by ``work``. What is short comes with its words."""

    def __init__(self, looks: Sequence[Look]) -> None:
        starts, nbytes = _places(looks)
        self.is_short = nbytes <= SHORT_BYTES
        self.memory = torch.zeros(nbytes if self.is_short else HEAD_BYTES, dtype=torch.uint8)
        self.tensors = [
            look.of(self.memory[start : start + look.nbytes]) if self.is_short else look.new()
            for look, start in zip(looks, starts, strict=True)
        ]
        self.work: Running

    @property
    def words(self) -> list[int]:
        found: list[int] = self.memory[: NUM_WORDS * WORD].view(torch.int64).tolist()
        return found


class Connections:
    """Messages between ranks that only a process group connects."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._looks: dict[Kind, list[Look]] = {}  # of what is received
        self._sent: list[Running] = []
        self._posted: dict[Action, Posted] = {}
        self._waiting: defaultdict[int, deque[Action]] = defaultdict(deque)  # by source: posted, not known

    def send(
        self,
        to: int,
        tag: int,
        words: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        is_known: bool = False,
    ) -> None:
        """``is_known``: the receiver is ready for such tensors, so that what is short comes at once."""
        whole = [x.detach().contiguous().resolve_conj().resolve_neg() for x in tensors]
        if words:
            starts, nbytes = _places([Look(x.dtype, tuple(x.shape)) for x in whole])
            is_short = is_known and nbytes <= SHORT_BYTES
            packet = torch.zeros(nbytes if is_short else HEAD_BYTES, dtype=torch.uint8)
            packet[: len(words) * WORD].view(torch.int64).copy_(torch.tensor(words))
            if is_short:
                for x, start in zip(whole, starts, strict=True):
                    packet[start : start + x.nbytes].copy_(_bytes(x))
            whole = [packet] if is_short else [packet, *whole]
        works = [self._pg.send([_bytes(x)], to, tag) for x in whole if x.numel()]

        def wait(kept: Sequence[Tensor] = whole) -> None:  # until it is sent, and not longer
            _wait_for_all(works)

        self._sent.append(self.group.start(wait, ENDING, f" to rank {to}"))

    def tell(self, words: Sequence[int], seconds: float) -> None:
        """Send all ranks ``words``, and wait so long at most until they have them."""
        self._sent, until = [], time.monotonic() + seconds
        for rank in range(self.group.size):
            if rank != self.group.rank:
                self.send(rank, STAGES, words, [])
        for work in self._sent:
            with suppress(TimeoutError):
                work.wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def post(self, action: Action, source: int) -> None:
        self._waiting[source].append(action)
        self._post_known(source)

    def take(self, action: Action, source: int, check: Check) -> tuple[list[int], list[Tensor]]:
        while action not in self._posted:
            self._learn(source, check)
        posted = self._posted.pop(action)
        self.group.wait(posted.work, str(action))
        words = posted.words
        check(words, action)
        return words, posted.tensors

    def alone(self, look: Look, source: int, tag: int, operation: str) -> Tensor:
        x = look.new()
        works = self._receive([x], source, tag)
        line = f" from rank {source}, tag {tag}"
        self.group.wait(self.group.start(lambda: _wait_for_all(works), operation, line), operation)
        return x

    def flush(self) -> None:
        sent, self._sent = self._sent, []
        for work in sent:
            self.group.wait(work, ENDING)

    @property
    def _pg(self) -> Any:
        assert self.group.pg is not None
        return self.group.pg

    def _receive(self, tensors: Sequence[Tensor], source: int, tag: int = STAGES) -> list[Any]:
        return [self._pg.recv([_bytes(x)], source, tag) for x in tensors if x.numel()]

    def _post_known(self, source: int) -> None:
        waiting = self._waiting[source]
        while waiting and (looks := self._looks.get((waiting[0].stage, waiting[0].kind))) is not None:
            self._post(waiting.popleft(), source, looks)

    def _learn(self, source: int, check: Check) -> None:
        """Wait for the words of the first message of a kind, which say how the others look."""
        action = self._waiting[source].popleft()
        posted = self._post(action, source, [])
        self.group.wait(posted.work, str(action))
        check(words := posted.words, action)
        looks = _looks(words)
        if action.stage != NO_STAGE:
            self._looks[action.stage, action.kind] = looks
        posted.tensors = [look.new() for look in looks]
        works = self._receive(posted.tensors, source)
        posted.work = self._start(lambda: _wait_for_all(works), action, source)
        self._post_known(source)

    def _post(self, action: Action, source: int, looks: Sequence[Look]) -> Posted:
        posted = self._posted[action] = Posted(looks)
        (first,) = self._receive([posted.memory], source)
        others = [] if posted.is_short else self._receive(posted.tensors, source)

        def wait() -> None:
            first.wait()
            if not posted.words[LEFT]:  # else no tensors come
                _wait_for_all(others)

        posted.work = self._start(wait, action, source)
        return posted

    def _start(self, wait: Callable[[], None], action: Action, source: int) -> Running:
        return self.group.start(wait, str(action), f" from rank {source}")


def _wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _words(action: Action, step: int, weight: int, rows: Sequence[int] = ()) -> list[int]:
    """``rows`` are those of ``_rows``."""
    numbers = [VERSION, 0, step, action.stage, action.micro_batch, weight, time.monotonic_ns()]
    return [*numbers, len(rows) // ROW, *rows]


def _rows(action: Action, looks: Sequence[Look], strides: Sequence[tuple[int, ...]]) -> list[int]:
    if len(looks) > MAX_TENSORS or any(len(look.shape) > MAX_DIMS for look in looks):
        raise ValueError(
            f"{action}: expected at most {MAX_TENSORS} tensors of at most {MAX_DIMS} dimensions between two "
            f"stages, got {_listed(looks)}: cut elsewhere, or pack them into fewer"
        )
    words = []
    for (dtype, shape), its in zip(looks, strides, strict=True):
        left = [0] * (MAX_DIMS - len(shape))
        words += [DTYPES.index(dtype), len(shape), *shape, *left, *its, *left]
    return words


def _looks(words: Sequence[int]) -> list[Look]:
    return [Look(DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for row in _rows_of(words)]


def _strides(words: Sequence[int]) -> list[list[int]]:
    return [list(row[2 + MAX_DIMS : 2 + MAX_DIMS + row[1]]) for row in _rows_of(words)]


def _rows_of(words: Sequence[int]) -> list[Sequence[int]]:
    return [words[FIELDS + i * ROW : FIELDS + (i + 1) * ROW] for i in range(words[FIELDS - 1])]


def _places(looks: Sequence[Look]) -> tuple[list[int], int]:
    """Where each tensor of a message begins, after its words, and where the message ends."""
    starts, end = [], HEAD_BYTES
    for look in looks:
        starts.append(end)
        end += round_up(look.nbytes, ALIGN)
    return starts, end


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _listed(looks: Sequence[Look]) -> str:
    return ", ".join(map(str, looks)) or "nothing"
