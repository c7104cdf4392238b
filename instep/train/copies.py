"""Memory copies of a sharded state: one of every rank, all of one step, put together by whoever is there.

A rank copies the pieces that it owns (``checkpoint.owned``), so all copies together are the state once: those
of the first row, where there are several, and the others' are empty. When ranks have been lost, those of the
next generation, however many, each read the ranges that they hold from the copies of the one before. See
``elastic.memory`` for why there always is a step that all of them have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from instep.checkpoint import pieces
from instep.checkpoint.manifest import Json, parse_json
from instep.checkpoint.owned import Holding, holding, merged, owned
from instep.checkpoint.pieces import Row, Source
from instep.checkpoint.reload import reload
from instep.elastic.member import Member
from instep.elastic.memory import Copy, Kept, common_step, offsets, tensor_bytes
from instep.train.trainer import Made, Trainer

DESCRIPTION_BYTES = 1 << 24


@dataclass(frozen=True)
class Reader:
    """One rank's copy of one step, as a place of pieces."""

    copy: Copy
    half: int
    starts: dict[str, int]  # bytes

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``pieces.Reader``."""
        begin = self.starts[name] + first * out.itemsize
        out.copy_(self.copy.bytes_of(self.half, begin, out.nbytes).view(out.dtype))


class Copies:
    """One rank's own copy, and what it knows of those that a generation before has left."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._sets: dict[int, list[Kept]] = {}  # by generation
        self._own: Copy | None = None
        self._begun: int | None = None  # the generation that began the set of the own one

    def take_over(self, kept: Sequence[Kept]) -> None:
        """A generation begins, for which the supervisor holds ``kept``."""
        self._own, self._begun = None, None
        sets: dict[int, list[Kept]] = {}
        for one in kept:
            sets.setdefault(one.generation, []).append(one)
        self._sets = {number: one for number, one in sets.items() if len(one) == one[0].num_ranks}

    def newest(self) -> tuple[int, int]:
        """The newest step that all copies of a set have, and the set; -1 if there is none."""
        found = [(common_step(self._attach(number)), number) for number in self._sets]
        return max(found, default=(-1, -1))

    def restore(self, trainer: Trainer, step: int, number: int) -> None:
        """Give ``trainer`` its part of ``step`` from set ``number``. Collective."""
        division = _divided(trainer)
        copies = self._attach(number)
        bodies = [_body(copy, copy.halves[step]) for copy in copies]
        rows = [pieces.rows_from_json(body["rows"]) for body in bodies]
        source = Source(
            entries=pieces.assemble({str(rank): its for rank, its in enumerate(rows)}),
            readers={
                str(rank): Reader(copy, copy.halves[step], _starts(its))
                for rank, (copy, its) in enumerate(zip(copies, rows, strict=True))
            },
        )
        rest = merged([body["rest"] for body in bodies])
        reload(source, rest, step, trainer.module, trainer.optimizer, division, None)
        trainer.steps_done = step
        trainer.health.restore(bodies[0]["health"])
        trainer.last = None if bodies[0]["last"] is None else Made(**bodies[0]["last"])
        if len(copies) == division.group.size:  # it is written on
            self._own, self._begun = copies[division.group.rank], number
            self._own.return_to(step)

    def write(self, trainer: Trainer) -> None:
        """Copy what this rank owns of the state."""
        division = _divided(trainer)
        own = owned(trainer.module, trainer.optimizer, division)
        body = {
            "rows": pieces.rows_to_json(map(pieces.row, own.parts)),
            "rest": own.rest,
            "health": trainer.health.state(),
            "last": None if trainer.last is None else asdict(trainer.last),
        }
        description, live = json.dumps(body).encode(), [part.tensor for part in own.parts]
        if self._own is not None and self._own.fits(description, live):
            self._own.write(description, live, trainer.steps_done)
            return
        room = 2 * len(description), tensor_bytes(live)
        self._own = Copy.create(*room) if self._own is None else self._own.grown(*room)
        self._own.write(description, live, trainer.steps_done)
        self._member.hand_over(self._own, division.group.rank, division.group.size, self._begun)

    def _attach(self, number: int) -> list[Copy]:
        """The copies of a set, by rank."""
        return [Copy.attach(kept.place) for kept in sorted(self._sets[number], key=lambda kept: kept.rank)]


def division_of(trainer: Trainer) -> Holding | None:
    """How the state of ``trainer`` is divided; None where every rank has all of it."""
    return holding(trainer.module, trainer.optimizer, trainer.group)


def _divided(trainer: Trainer) -> Holding:
    division = division_of(trainer)
    assert division is not None
    return division


def _body(copy: Copy, half: int) -> Json:
    return parse_json(copy.description(half) or b"", DESCRIPTION_BYTES)


def _starts(rows: Sequence[Row]) -> dict[str, int]:
    nbytes = [(last - first) * dtype.itemsize for _, _, dtype, first, last in rows]
    return dict(zip((row[0] for row in rows), offsets(nbytes), strict=True))
