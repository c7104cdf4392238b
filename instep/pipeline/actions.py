"""A pipeline's schedule as data: what every rank does, in which order. No model, no process, no time.

A *stage* is a run of layers, held by one rank; a rank may hold several (*chunks* of the model). An action
is one thing that a rank does with one stage and one micro-batch. It is written as torch writes it, stage,
kind and micro-batch, so that a schedule is a text file, a row of actions per rank:

    # 1f1b: 2 ranks, 2 stages, 3 micro-batches
    rank 0: 0F0 0F1  .  0B0 0F2 0B1  .  0B2
    rank 1:  .  1F0 1B0 1F1 1B1 1F2 1B2

Time goes from left to right; an action stands in the column in which it would run if each took as long as any
other and messages took no time. A dot is a rank that waits. Only the order within a row is part of the
schedule: dots are not, and neither are sends and receives (``instep.pipeline.communication`` derives them).

Who does what in which order is legal if every action comes after what it needs (``needs``):

    0F0 -> 1F0 -> 2F0       forward needs the stage before,
                   |
    0B0 <- 1B0 <- 2B0       backward its own forward and the stage after.

A full backward B is an input-gradient I, which the stage before waits for, and a weight-gradient W, for which
no other stage waits: taken apart, W may fill what would be a bubble. Only where stages share a parameter (a
*tie*) does the first of them wait for the W or B of the others, whose gradients it adds to its own.

Source of the letters: ``torch.distributed.pipelining``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = COMPUTE = ("F", "B", "I", "W")
SENDS = SEND_FORWARD, SEND_BACKWARD, SEND_TIED = ("SEND_F", "SEND_B", "SEND_W")
RECEIVES = RECEIVE_FORWARD, RECEIVE_BACKWARD, RECEIVE_TIED = ("RECV_F", "RECV_B", "RECV_W")
# What they are called in a timeline, measured or simulated: computation, and messages by their receive.
SPANS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
    RECEIVE_FORWARD: "activations",
    RECEIVE_BACKWARD: "gradients",
    RECEIVE_TIED: "gradients",
}
IDLE = "."
_ACTION = re.compile(rf"(\d{{1,9}})([{''.join(COMPUTE)}])(\d{{1,9}})")
NO_TIE = -1
_LABEL = re.compile(r"rank\s+(\d{1,9})\s*:")


class Action(NamedTuple):
    """One thing that a rank does: ``kind`` is one of ``COMPUTE``, ``SENDS`` or ``RECEIVES``.

    A send names the stage whose result goes out, a receive the stage that what comes in is for: 0SEND_F3 and
    1RECV_F3 are the two ends of one message. Of a gradient of the weights of a ``tie``, by its number in the
    schedule, both name the stage that sends it: 3SEND_W2/0 and 3RECV_W2/0.
    """

    stage: int
    kind: str
    micro_batch: int
    tie: int = NO_TIE

    def __str__(self) -> str:
        tie = "" if self.tie == NO_TIE else f"/{self.tie}"
        return f"{self.stage}{self.kind}{self.micro_batch}{tie}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The computation that ``str`` has written.

        Raises:
            ValueError: ``text`` is none.
        """
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ValueError(
                f"expected a stage, one of {', '.join(COMPUTE)}, and a micro-batch, such as 2F0, "
                f"got {text[:40]!r}"
            )
        return cls(int(found[1]), found[2], int(found[3]))

    @property
    def result(self) -> Action:
        """What the next stage may need of it: of a full backward its input-gradient, else itself."""
        return self._replace(kind=INPUT_GRADIENT) if self.kind == BACKWARD else self

    @property
    def results(self) -> tuple[Action, ...]:
        """All that others may need of it: a full backward makes both gradients."""
        return (self.result, self._replace(kind=WEIGHT_GRADIENT)) if self.kind == BACKWARD else (self,)


def needs(action: Action, num_stages: int) -> list[Action]:
    """The results without which ``action``, one of ``COMPUTE``, cannot begin."""
    stage, kind, micro_batch, _ = action
    if kind == FORWARD:
        return [Action(stage - 1, FORWARD, micro_batch)] if stage else []
    if kind == WEIGHT_GRADIENT:
        return [Action(stage, INPUT_GRADIENT, micro_batch)]
    own = Action(stage, FORWARD, micro_batch)
    return [own, Action(stage + 1, INPUT_GRADIENT, micro_batch)] if stage + 1 < num_stages else [own]


Rows = Sequence[Sequence[Action]]  # by rank: what it does, in this order


class GridPlace(NamedTuple):
    """Where in a schedule: the action of ``rank`` with so many before it."""

    rank: int
    position: int


def in_order(
    rows: Rows, needed: Callable[[Action], Collection[Action]]
) -> Iterator[tuple[GridPlace, Action]]:
    """All actions, each after those before it in its row and after whatever is ``needed`` for it.

    Every rank goes on as far as it can, again and again; which rank comes first makes no difference to what
    is reached. Where ranks wait for each other, or for what no rank does, it ends early.
    """
    done: set[Action] = set()
    reached = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while reached[rank] < len(row) and done.issuperset(needed(row[reached[rank]])):
                action = row[reached[rank]]
                yield GridPlace(rank, reached[rank]), action
                done.update(action.results)
                reached[rank] += 1
                moved = True


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in which order; ``str`` of it is the text that ``parse`` reads.

    It may be illegal: ``instep.pipeline.check`` says so. ``ties`` are no part of the text: they are the
    model's.
    """

    rows: tuple[tuple[Action, ...], ...]  # by rank, of COMPUTE
    stage_ranks: tuple[int, ...]  # by stage, the rank that holds it
    num_micro_batches: int
    name: str = ""
    ties: tuple[tuple[int, ...], ...] = ()  # by parameter of several stages: these, in order

    @classmethod
    def of(cls, rows: Rows, name: str = "") -> Schedule:
        """The schedule of these rows; a stage is held by the first rank that does something with it.

        Raises:
            ValueError: a rank has no action, or a stage between others has none.
        """
        holders: dict[int, int] = {}
        for rank, row in enumerate(rows):
            if not row:
                raise ValueError(f"expected every rank to do something, but rank {rank} has no action")
            for action in row:
                holders.setdefault(action.stage, rank)
        if not rows:
            raise ValueError("expected a row of actions per rank, got none")
        num_stages = len(holders)
        if absent := [stage for stage in range(num_stages) if stage not in holders]:
            raise ValueError(
                f"expected stages 0 to {max(holders)}, but no rank has an action of stage {absent[0]}"
            )
        last = max(action.micro_batch for row in rows for action in row)
        stage_ranks = tuple(holders[stage] for stage in range(num_stages))
        return cls(tuple(map(tuple, rows)), stage_ranks, last + 1, name)

    @classmethod
    def parse(cls, text: str, name: str = "") -> Schedule:
        """The schedule in a text file: a line per rank, its actions apart by blanks or commas.

        Dots and empty cells are ranks that wait; what follows "#" is a comment; a line may begin with
        "rank 0:". So the grid of ``str`` is such a file.

        Raises:
            ValueError: it is none, with the line.
        """
        rows: list[list[Action]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            cells = line.partition("#")[0].strip()
            if not cells:
                continue
            if label := _LABEL.match(cells):
                if int(label[1]) != len(rows):
                    raise ValueError(f"line {number}: expected rank {len(rows)}, got rank {label[1]}")
                cells = cells[label.end() :]
            try:
                words = re.split(r"[,\s]+", cells)
                rows.append([Action.parse(word) for word in words if word not in ("", IDLE)])
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        return cls.of(rows, name)

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    def needs(self, action: Action) -> list[Action]:
        """The results without which ``action`` cannot begin."""
        tied = {user: None for _, user in self.tied_to(action)}  # each once, in order
        return [
            *needs(action, self.num_stages),
            *(Action(user, WEIGHT_GRADIENT, action.micro_batch) for user in tied),
        ]

    def tied_to(self, action: Action) -> list[tuple[int, int]]:
        """Each tie, by number, and stage whose gradient ``action`` adds to its own: it is of the first."""
        if action.kind not in (BACKWARD, WEIGHT_GRADIENT):
            return []
        return [
            (tie, user)
            for tie, (owner, *users) in enumerate(self.ties)
            for user in users
            if owner == action.stage
        ]

    def __str__(self) -> str:
        kinds = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_micro_batches} micro-batches"
        return f"# {self.name}: {kinds}\n{self.grid()}\n" if self.name else f"# {kinds}\n{self.grid()}\n"

    def grid(self, marked: Collection[GridPlace] = ()) -> str:
        """A line per rank, in the columns of a run in which every action takes one unit of time.

        What cannot run at all stands behind the rest. Under each of the ``marked`` places it says
        "^^^ <-- here".
        """
        columns = self._columns()
        width = max((len(str(action)) for row in self.rows for action in row), default=1)
        label = len(f"rank {self.num_ranks - 1}: ")
        lines = []
        for rank, row in enumerate(self.rows):
            cells = [IDLE] * (max(columns[rank], default=-1) + 1)
            for column, action in zip(columns[rank], row, strict=True):
                cells[column] = str(action)
            line = f"rank {rank}: ".rjust(label) + " ".join(f"{cell:^{width}}" for cell in cells)
            lines.append(line.rstrip())
            here = sorted(place.position for place in marked if place.rank == rank)
            under = ""
            for position in here:  # behind the last one if something is missing in this row
                at = columns[rank][position] if position < len(row) else len(cells)
                under = f"{under:{label + at * (width + 1)}}{'^' * width}"
            lines += [f"{under} <-- here"] if here else []
        return "\n".join(lines)

    def _columns(self) -> list[list[int]]:
        """By rank and index: when an action runs, if each takes one unit of time and messages take none."""
        columns: list[list[int]] = [[] for _ in self.rows]
        ends: dict[Action, int] = {}
        for place, action in in_order(self.rows, self.needs):
            row = columns[place.rank]
            begin = max([row[-1] + 1 if row else 0, *(ends[needed] for needed in self.needs(action))])
            row.append(begin)
            ends.update(dict.fromkeys(action.results, begin + 1))
        behind = max((row[-1] + 2 for row in columns if row), default=0)
        for row, actions in zip(columns, self.rows, strict=True):
            row += range(behind, behind + len(actions) - len(row))
        return columns
