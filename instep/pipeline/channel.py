"""What the ranks of a pipeline send each other: activations on the way forward, gradients on the way back.

A message is a line of words, then its tensors. The words say what it is, so that ranks that are out of step
find out before they compute with it, and how the tensors look. With the first message of a kind that is
learned; from then on the next ones can be received before they are waited for:

    post 1RECV_F0      how it looks is not known: it is remembered
    take 1RECV_F0      wait for the words, then for the tensors
    post 1RECV_F1      words and tensors may come from now on
    take 1RECV_F1      wait until they are there

Two ranks send each other one message after the other, in the order in which they are taken.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from instep.errors import Desync
from instep.mesh.process_group import Group
from instep.pipeline.actions import SEND_FORWARD, Action

MAX_TENSORS, MAX_DIMS = 16, 8
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
VERSION = 1
FIELDS = (
    7  # version, whether the sender has left the step, step, stage, micro-batch, weight, number of tensors
)
NUM_WORDS = FIELDS + MAX_TENSORS * (2 + MAX_DIMS)
NO_STAGE = -1  # of an evaluation, whose batches may have any shapes
ENDING = "the end of a pipeline's step"

Kind: TypeAlias = tuple[int, str]
"""Stage and kind of a receive: its messages look alike."""


class Look(NamedTuple):
    """What there is to know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class Received(NamedTuple):
    """A message that has come; ``weight`` is the micro-batch's, as far as its sender knows."""

    weight: int
    tensors: list[Tensor]


class Posted:
    """A receive that is under way."""

    def __init__(self) -> None:
        self.words = torch.zeros(NUM_WORDS, dtype=torch.int64)
        self.works: list[Any] = []
        self.tensors: list[Tensor] = []


class StageChannel:
    """Messages between the ranks of ``group``, which has no other user; one thread uses it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._looks: dict[Kind, list[Look]] = {}  # of what is received
        self._told: dict[Kind, list[Look]] = {}  # of what is sent
        self._sent: list[tuple[Any, Tensor]] = []
        self._posted: dict[Action, Posted] = {}
        self._left: int | None = None  # the step that was given up
        self._waiting: defaultdict[int, deque[Action]] = defaultdict(deque)  # by source: posted, not known

    def send(self, action: Action, to: int, step: int, weight: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send ``tensors`` to group rank ``to``, as ``action``. They must not change until
        ``flush``.

        Raises:
            ValueError: they do not look like those of the first micro-batch.
        """
        self._require_whole(step)
        if (other := next((x for x in tensors if not isinstance(x, Tensor)), None)) is not None:
            raise TypeError(
                f"{action}: expected tensors from one stage to the next, got a {type(other).__name__}: cut "
                "elsewhere, or let the next layer make it"
            )
        looks = [Look(x.dtype, tuple(x.shape)) for x in tensors]
        known = self._told.setdefault((action.stage, action.kind), looks)
        if known != looks:
            raise ValueError(
                f"{action}: stage {action.stage} gave {_listed(known)} in the first micro-batch, and now "
                f"{_listed(looks)}: the next stage has its memory ready for these, so give all "
                "micro-batches the same shapes, by padding for instance"
            )
        self._send(_words(action, step, weight, looks), to)
        for x in tensors:
            self._send(x.detach().contiguous(), to)
        self._sent = [(work, x) for work, x in self._sent if not work.is_completed()]

    def post(self, action: Action, source: int) -> None:
        """Receive ``action`` from group rank ``source`` from now on, if it is known how that looks."""
        self._waiting[source].append(action)
        self._post_known(source)

    def take(self, action: Action, source: int, step: int) -> Received:
        """What ``action``, which was posted, receives from ``source``, once it is there.

        Raises:
            Desync: ``source`` sends something else, or has left the step.
            PeerLost: it did not come.
        """
        self._require_whole(step)
        while action not in self._posted:
            self._learn(source, step)
        posted = self._posted.pop(action)
        self._wait(posted, action)
        self._check(posted, action, source, step)
        return Received(int(posted.words[5]), posted.tensors)

    def send_alone(self, x: Tensor, to: int, tag: int) -> None:
        """Begin to send ``x``, of which the other one knows how it looks; messages of another ``tag``
        may come before it."""
        self._send(x.detach().contiguous(), to, tag)

    def receive_alone(self, x: Tensor, source: int, tag: int, operation: str) -> Tensor:
        """``x``, when it is what ``source`` has sent by ``send_alone``."""
        work = self._receive(x, source, tag)
        self.group.run(work.wait, operation)
        return x

    def send_values(self, values: Sequence[Tensor], to: int) -> None:
        """Begin to send ``values``, of which the other one knows nothing."""
        self._told.pop((NO_STAGE, SEND_FORWARD), None)
        self.send(Action(NO_STAGE, SEND_FORWARD, 0), to, 0, 1, values)

    def receive_values(self, source: int) -> list[Tensor]:
        """What ``source`` has sent by ``send_values``."""
        action = Action(NO_STAGE, SEND_FORWARD, 0)
        self._looks.pop((NO_STAGE, SEND_FORWARD), None)
        self.post(action, source)
        return self.take(action, source, 0).tensors

    def flush(self) -> None:
        """Wait until what was sent may be changed."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            if not work.is_completed():
                self.group.run(work.wait, ENDING)

    def leave(self, step: int) -> None:
        """Tell the others, where they expect a message, that this rank sends no more in ``step``.

        What they have posted for tensors is never sent: the group is of no use afterwards.
        """
        if self._left is not None:
            return
        self._left = step
        words = _words(Action(0, SEND_FORWARD, 0), step, 0, [])
        words[1] = 1
        for rank in range(self.group.size):
            if rank != self.group.rank:
                with suppress(RuntimeError):
                    self._send(words, rank)

    def _require_whole(self, step: int) -> None:
        if self._left is not None:
            raise Desync(
                f"rank {self.group.global_rank} comes to step {step} after step {self._left} was given up, "
                "with messages under way that nobody has taken: make another pipeline, or run the script by "
                "`instep run`, which does"
            )

    def _send(self, x: Tensor, to: int, tag: int = 0) -> None:
        if x.numel():
            self._sent.append((self._pg.send([_bytes(x)], to, tag), x))

    def _receive(self, x: Tensor, source: int, tag: int = 0) -> Any:
        return self._pg.recv([_bytes(x)], source, tag)

    @property
    def _pg(self) -> Any:
        assert self.group.pg is not None
        return self.group.pg

    def _post_known(self, source: int) -> None:
        waiting = self._waiting[source]
        while waiting and (looks := self._looks.get((waiting[0].stage, waiting[0].kind))) is not None:
            self._post_tensors(self._post_words(waiting.popleft(), source), looks, source)

    def _post_words(self, action: Action, source: int) -> Posted:
        posted = self._posted[action] = Posted()
        posted.works.append(self._receive(posted.words, source))
        return posted

    def _post_tensors(self, posted: Posted, looks: Sequence[Look], source: int) -> None:
        posted.tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in looks]
        posted.works += [self._receive(x, source) for x in posted.tensors if x.numel()]

    def _learn(self, source: int, step: int) -> None:
        """Wait for the words of the first message of a kind, which say how the others look."""
        action = self._waiting[source].popleft()
        posted = self._post_words(action, source)
        self._wait(posted, action)
        self._check(posted, action, source, step)
        looks = self._looks[action.stage, action.kind] = _looks(posted.words)
        self._post_tensors(posted, looks, source)
        self._post_known(source)

    def _wait(self, posted: Posted, action: Action) -> None:
        works, posted.works = posted.works, []

        def wait() -> None:
            for work in works:
                work.wait()
                if posted.words[1]:  # the sender has left: no tensors come
                    return

        if not all(work.is_completed() for work in works):
            self.group.run(wait, str(action))

    def _check(self, posted: Posted, action: Action, source: int, step: int) -> None:
        version, left, its_step, stage, micro_batch, _, _ = posted.words[:FIELDS].tolist()
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


def _words(action: Action, step: int, weight: int, looks: Sequence[Look]) -> Tensor:
    if len(looks) > MAX_TENSORS or any(len(look.shape) > MAX_DIMS for look in looks):
        raise ValueError(
            f"{action}: expected at most {MAX_TENSORS} tensors of at most {MAX_DIMS} dimensions between two "
            f"stages, got {_listed(looks)}: cut elsewhere, or pack them into fewer"
        )
    words = [VERSION, 0, step, action.stage, action.micro_batch, weight, len(looks)]
    for dtype, shape in looks:
        words += [DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))]
    return torch.tensor(words + [0] * (NUM_WORDS - len(words)), dtype=torch.int64)


def _looks(words: Tensor) -> list[Look]:
    numbers = words.tolist()
    rows = [numbers[at : at + 2 + MAX_DIMS] for at in range(FIELDS, NUM_WORDS, 2 + MAX_DIMS)]
    return [Look(DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for row in rows[: numbers[FIELDS - 1]]]


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _listed(looks: Sequence[Look]) -> str:
    return ", ".join(map(str, looks)) or "nothing"
