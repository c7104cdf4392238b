"""What the ranks of a pipeline send each other: activations on the way forward, gradients on the way back.

A message is a line of words, then its tensors. The words say what it is, so that ranks that are out of step
find out before they compute with it, and how the tensors spec. Strides go along: what is computed from a
transposed tensor, or from one in ``torch.channels_last``, has other last bits than from a contiguous copy.
Two ranks send each other one message after the other, in the order in which they are taken.

Ranks that share memory receive a message where its sender has put it (``shm/mailboxes.py``). Over connections
a receive needs memory of its own before it is there. What is short comes with its words, and the memory for
it is always of one size; the tensors of a long message follow the words, which say how much memory they need:

    post 1RECV_F0      words may come from now on, and then tensors
    take 1RECV_F0      wait until they are there

So no message has to spec like the one before. Threads take turns with the one that computes, and each turn
costs time, so they wait only for what is long: once a rank has sent something long, a thread receives from
it while this rank computes, and what is long is let go as soon as it is sent. A short message has come when
its last word is in its memory.

What is on a GPU travels through the host's memory, by gloo, and comes to the receiver's GPU. In NCCL what two
ranks send each other shares one stream: where both send before they receive, as schedules have it, neither
would go on.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.memory import ALIGN_BYTES
from instep.mesh.axes import round_up
from instep.mesh.clocks import measure
from instep.mesh.process_group import Group
from instep.mesh.rank_process import as_told
from instep.ordered.homes import dense_strides, with_strides
from instep.pipeline.actions import SENDS, Action
from instep.pipeline.communication import send_of
from instep.work import Running

MAX_TENSORS, MAX_DIMS = 16, 8
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
VERSION = 5
# Version, whether the sender has left the step, step, its number of micro-batches, identity and position of
# their data; of the action stage, kind, micro-batch and tie; a number that goes along, when it was sent,
# where a short message ends, in bytes (its last word says again when it was sent), number of tensors.
FIELDS = 14
LEFT, STEP, COUNT, NUMBER, SENT_NS, END = 1, 2, 3, 10, 11, 12
STAYS, LEAVES, GONE = range(3)  # what word LEFT says: LEAVES comes to the end of the step, GONE does not
# Of a tensor: whether it is there, and needs a gradient; whether it is on the rank's own device, and not on
# the CPU; dtype, number of dimensions, shape, strides.
ROW = 4 + 2 * MAX_DIMS
ABSENT, CONSTANT, TRAINED = range(3)  # an input without a gradient, say, is absent
NUM_WORDS = FIELDS + MAX_TENSORS * ROW
WORD, ALIGN = 8, ALIGN_BYTES["cpu"]
HEAD_BYTES = round_up(NUM_WORDS * WORD, ALIGN)
TELLING_S = 1.0  # those who compute find out later, by the connection that has ended
SHORT_BYTES = 1 << 18  # of a message, with its words: to copy so much costs less than a second one
SHORT_SENDS = 64  # that are under way with nobody to wait for them
LOOKS, LOOK_S = 50, 20e-6  # at a short message that is waited for, before a thread waits for it
THERE_NS = 20_000  # in which a message is taken that was there already
VALUES = "VALUES"  # the kind of a message that is no part of a schedule: both ends name it alike
KINDS = (*SENDS, VALUES)
EVALUATION = -1  # in the place of a step
NO_STAGE = -1  # of what goes through an evaluation
WORDS, TENSORS = range(2)  # tags: of what is received at once, and of what follows
ENDING = "the end of a pipeline's step"

Data: TypeAlias = tuple[int, int]
NO_DATA: Data = 0, -1
Check: TypeAlias = Callable[[Sequence[int], Action], None]
"""Raises if the words are not those that an action waits for."""


class TensorSpec(NamedTuple):
    """What there is to know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def new(self) -> Tensor:
        """Memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def of(self, part: Tensor) -> Tensor:
        """``part``, its bytes, as such a tensor."""
        return part.view(self.dtype).view(self.shape)


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
        words = self._words(action, number, _rows(action, tensors, dense))
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
        return Received(words[NUMBER], [*_strided(words, contiguous, self.device)], waited)

    def _waited(self, action: Action, source: int, sent_ns: int, start_ns: int) -> MessageWait | None:
        end_ns, posted_ns = time.monotonic_ns(), self._posted_ns.pop(action)
        if end_ns - start_ns < THERE_NS:
            return None
        ahead_ns = self._offsets_ns[source] - self._offsets_ns[self.group.rank]
        sent_ns = min(sent_ns - ahead_ns, end_ns)
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
        """``rows`` are those of ``_rows``."""
        head = [VERSION, STAYS, self._step, self._num_micro_batches, *self._data, *_numbers(action)]
        return [*head, number, time.monotonic_ns(), 0, len(rows) // ROW, *rows]

    def _check(self, words: Sequence[int], action: Action, source: int) -> None:
        version, left, step, count, identity, position, *sent = words[:NUMBER]
        mine, other = self.group.global_rank, self.group.ranks[source]
        what = _named(EVALUATION) if self._step == EVALUATION else f"{action} of step {self._step}"
        waits = f"rank {mine} waits for rank {other} in {what}"
        if left:
            self.is_broken |= left == GONE
            reason = f"{waits}, which rank {other} has left by an error of its own: see there"
            raise as_told(Desync(reason))
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
        expected = action if action.kind == VALUES else send_of(action)
        if (version, step, sent) != (VERSION, self._step, _numbers(expected)):
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
            found = [spec.of(part) for spec, part in zip(_specs(words), parts, strict=True)]
            self._come[first] = words, found
        return self._come.pop(action)

    def flush(self) -> None:
        self._mailboxes.flush(ENDING)

    def tell(self, words: Sequence[int], seconds: float) -> None:
        """Let all ranks have ``words``, for which there is no need to wait."""
        for to in self._others:
            self._mailboxes.send(to, WORDS, words, [])


class Posted:
    """A receive from group rank ``source`` over ``pg``: of ``words`` and ``tensors``, by ``receive``.

    ``memory`` is for a short message, and free again afterwards. ``work`` is what executes that, if it is
    another thread.
    """

    def __init__(self, pg: Any, source: int, memory: Tensor) -> None:
        self.source, self.memory, self._pg = source, memory, pg
        self._seen = self.memory.view(torch.int64).numpy()
        self._seen[:FIELDS] = 0  # of a message that came before, perhaps
        self._first = _begun(pg.recv, memory, source, WORDS)
        self.words: list[int] = []
        self.tensors: list[Tensor] = []
        self.is_long = False
        self.work: Running | None = None

    def comes_soon(self) -> bool:
        """Whether a short message is there, perhaps after a moment: what it says last has been written.

        That would be wrong where the same was in this memory before; then ``receive`` waits.
        """
        for _ in range(LOOKS):
            end, sent_ns = self._seen[END] // WORD, self._seen[SENT_NS]
            if 0 < end <= len(self._seen) and self._seen[end - 1] == sent_ns:
                return True
            time.sleep(LOOK_S)
        return False

    def receive(self) -> None:
        """Wait until the message is there."""
        self._first()
        self.words = self._seen[:NUM_WORDS].tolist()
        if self.words[: LEFT + 1] != [VERSION, STAYS]:
            return  # no tensors come
        specs = _specs(self.words)
        starts, nbytes = _places([spec.nbytes for spec in specs])
        self.is_long = nbytes > SHORT_BYTES
        if self.is_long:
            self.tensors = [spec.new() for spec in specs]
            _wait_for_all([_begun(self._pg.recv, x, self.source, TENSORS) for x in self.tensors if x.numel()])
        else:
            parts = (self.memory[start : start + x.nbytes] for x, start in zip(specs, starts, strict=True))
            self.tensors = [spec.of(part.clone()) for spec, part in zip(specs, parts, strict=True)]


class Connections:
    """Messages between ranks that only a process group connects."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sent: list[Running] = []
        self._short: list[tuple[Callable[[], object], Tensor]] = []  # under way, with nobody to wait for it
        self._posted: dict[Action, Posted] = {}
        self._long: set[int] = set()  # the ranks that have sent something long
        self._free: list[Tensor] = []  # memory for short messages

    def send(self, to: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        whole = [x.detach().contiguous().resolve_conj().resolve_neg() for x in tensors]
        starts, nbytes = _places([x.nbytes for x in whole])
        is_short = nbytes <= SHORT_BYTES
        packet = torch.empty(nbytes if is_short else HEAD_BYTES, dtype=torch.uint8, device="cpu")
        numbers = packet.view(torch.int64).numpy()
        numbers[: len(words)] = words
        if not is_short:
            waits = [_begun(self._pg.send, packet, to, WORDS)]
            waits += [_begun(self._pg.send, x, to, TENSORS) for x in whole if x.numel()]
            self._await(waits, [packet, *whole], f" to rank {to}")
            return
        for x, start in zip(whole, starts, strict=True):
            packet[start : start + x.nbytes].copy_(_bytes(x))
        numbers[END], numbers[-1] = nbytes, words[SENT_NS]
        self._short.append((_begun(self._pg.send, packet, to, WORDS), packet))
        if len(self._short) > SHORT_SENDS:
            self._await_short()

    def tell(self, words: Sequence[int], seconds: float) -> None:
        """Send all ranks ``words``, and wait so long at most until they have them."""
        self._sent, self._short, until = [], [], time.monotonic() + seconds
        for rank in range(self.group.size):
            if rank != self.group.rank:
                self.send(rank, words, [])
                self._await_short(f" to rank {rank}")
        for work in self._sent:
            with suppress(TimeoutError):
                work.wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def post(self, action: Action, source: int) -> None:
        memory = self._free.pop() if self._free else torch.empty(SHORT_BYTES, dtype=torch.uint8, device="cpu")
        self._posted[action] = Posted(self._pg, source, memory)
        if source in self._long:
            self._receive_posted(source)

    def take(self, action: Action, source: int, check: Check) -> tuple[list[int], list[Tensor]]:
        posted = self._posted[action]
        if posted.work is None and posted.comes_soon():
            posted.receive()
        else:
            self._receive_posted(source, action)
            assert posted.work is not None
            self.group.wait(posted.work, str(action))
        self._free.append(self._posted.pop(action).memory)
        if posted.is_long and source not in self._long:
            self._long.add(source)
            self._receive_posted(source)
        check(posted.words, action)
        return posted.words, posted.tensors

    def flush(self) -> None:
        self._await_short()
        sent, self._sent = self._sent, []
        for work in sent:
            self.group.wait(work, ENDING)

    @property
    def _pg(self) -> Any:
        assert self.group.pg is not None
        return self.group.pg

    def _receive_posted(self, source: int, last: Action | None = None) -> None:
        """A thread receives all that was posted, up to ``last``: what is long, in the order of its sender."""
        for action, posted in self._posted.items():
            if posted.source == source and posted.work is None:
                posted.work = self.group.start(posted.receive, str(action), f" from rank {source}")
            if action == last:
                return

    def _await_short(self, line: str = "") -> None:
        short, self._short = self._short, []
        if short:
            self._await([wait for wait, _ in short], [packet for _, packet in short], line)

    def _await(self, waits: Sequence[Callable[[], object]], kept: Sequence[Tensor], line: str) -> None:
        """Keep tensors until they are sent, and not longer."""

        def wait(kept: Sequence[Tensor] = kept) -> None:
            _wait_for_all(waits)

        self._sent.append(self.group.start(wait, ENDING, line))


def _begun(begin: Callable[..., Any], x: Tensor, rank: int, tag: int) -> Callable[[], object]:
    """Begin to send or to receive; what is returned waits. It fails where a connection has ended already: who
    waits for it says whose."""
    try:
        wait: Callable[[], object] = begin([_bytes(x)], rank, tag).wait
    except RuntimeError as error:
        return partial(_raise, error.with_traceback(None))
    return wait


def _wait_for_all(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


def _raise(error: Exception) -> NoReturn:
    raise error


def _numbers(action: Action) -> list[int]:
    return [action.stage, KINDS.index(action.kind), action.micro_batch, action.tie]


def _named(step: int) -> str:
    return "an evaluation" if step == EVALUATION else f"step {step}"


def _rows(action: Action, tensors: Sequence[Tensor | None], dense: Sequence[Tensor | None]) -> list[int]:
    """``dense`` are the ``tensors`` with the strides that they are sent with."""
    if len(tensors) > MAX_TENSORS or any(x is not None and x.ndim > MAX_DIMS for x in tensors):
        listed = ", ".join("None" if x is None else f"{x.dtype} {tuple(x.shape)}" for x in tensors)
        raise ValueError(
            f"{action}: expected at most {MAX_TENSORS} tensors of at most {MAX_DIMS} dimensions between two "
            f"stages, got {listed}: cut elsewhere, or pack them into fewer"
        )
    words = []
    for x, its in zip(tensors, dense, strict=True):
        if x is None or its is None:
            words += [ABSENT] + [0] * (ROW - 1)
        else:
            state, left = TRAINED if x.requires_grad else CONSTANT, [0] * (MAX_DIMS - x.ndim)
            here, dtype = int(_is_on_device(x)), DTYPES.index(x.dtype)
            words += [state, here, dtype, x.ndim, *x.shape, *left, *its.stride(), *left]
    return words


def _is_on_device(x: Tensor) -> bool:
    return not x.is_cpu


def _specs(words: Sequence[int]) -> list[TensorSpec]:
    """Of the tensors that are there."""
    rows = [row[2:] for row in _rows_of(words) if row[0] != ABSENT]
    return [TensorSpec(DTYPES[dtype], tuple(shape[:ndim])) for dtype, ndim, *shape in rows]


def _strided(
    words: Sequence[int], contiguous: Sequence[Tensor], device: torch.device
) -> Iterator[Tensor | None]:
    """All tensors of a message: those that are there as they were sent."""
    found = iter(contiguous)
    for state, is_on_device, *row in _rows_of(words):
        if state == ABSENT:
            yield None
        else:
            x = next(found)
            x = x.to(device) if is_on_device else x
            strides = row[2 + MAX_DIMS : 2 + MAX_DIMS + x.ndim]
            yield x.as_strided(x.shape, strides).requires_grad_(state == TRAINED)


def _rows_of(words: Sequence[int]) -> list[Sequence[int]]:
    return [words[FIELDS + i * ROW : FIELDS + (i + 1) * ROW] for i in range(words[FIELDS - 1])]


def _places(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor of a message begins, after its words, and where its last word ends, in bytes."""
    starts, end = [], HEAD_BYTES
    for nbytes in lengths:
        starts.append(end)
        end += round_up(nbytes, ALIGN)
    return starts, end + WORD


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
