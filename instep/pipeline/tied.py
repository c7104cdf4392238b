"""Parameters that several stages use: an output layer with the weights of the embedding, say.

Such a parameter belongs to the first of its stages, which alone reduces its gradient, steps it and saves it.
Each other one computes with an *alias*, which gets the values before a step. Of every micro-batch the
gradient that an alias has got is given to the first stage, which adds its own: within a micro-batch, as one
rank would, so that the bits are those of one rank. That takes a message of the parameter's size per
micro-batch, which is part of the schedule (``Schedule.ties``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from instep.pipeline.actions import RECEIVE_TIED, Action
from instep.pipeline.channel import Received, StageChannel
from instep.pipeline.home import PipelineHome
from instep.pipeline.message_words import VALUES
from instep.pipeline.stage import TiedCopy, TiedOwner
from instep.step.micro_batches import MicroBatch


class Tied(NamedTuple):
    """Parameter ``name``, and the numbers of the ``stages`` that use it, in order: of most it is one."""

    name: str
    parameter: Tensor
    stages: Sequence[int]


def ties_of(named: Mapping[str, Tensor], parts: Sequence[nn.Module]) -> list[Tied]:
    """Which stages use each of the ``named`` parameters; ``parts`` are the layers of each stage."""
    users: dict[int, list[int]] = {id(p): [] for p in named.values()}
    for number, part in enumerate(parts):
        for p in part.parameters():
            users[id(p)].append(number)
    return [Tied(name, p, users[id(p)]) for name, p in named.items()]


class TiedParameters:
    """Parameters ``used`` by several stages, of which stage s is on rank ``stage_ranks[s]``."""

    def __init__(
        self,
        used: Sequence[Tied],
        stage_ranks: Sequence[int],
        rank: int,
        home: PipelineHome,
        channel: StageChannel,
    ) -> None:
        self.tied = [one for one in used if len(one.stages) > 1]
        self.stage_ranks, self.rank, self.channel = stage_ranks, rank, channel
        self._home = home
        self._aliases: dict[int, nn.Parameter] = {}
        # On this rank, by tie, stage and micro-batch, until it is sent or fetched.
        self._given: dict[tuple[int, int, int], Tensor | None] = {}

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """As a ``Schedule`` has them."""
        return tuple(tuple(one.stages) for one in self.tied)

    def copies(self, stage: int) -> list[TiedCopy]:
        """Those that ``stage``, on this rank, uses, and that belong to another one."""
        return [
            TiedCopy(one.parameter, self._alias(i), partial(self._give, i, stage))
            for i, one in enumerate(self.tied)
            if stage in one.stages[1:]
        ]

    def owners(self, stage: int) -> list[TiedOwner]:
        """Those that belong to ``stage``, on this rank, and that others use."""
        return [
            TiedOwner(one.parameter, partial(self._fetch, i))
            for i, one in enumerate(self.tied)
            if stage == one.stages[0]
        ]

    def refresh(self) -> None:
        """Aliases have the parameters' values. Collective over the ranks that use one."""
        self._given.clear()
        for i, (_, p, stages) in enumerate(self.tied):
            values = Action(stages[0], VALUES, 0, i)
            owner, *others = dict.fromkeys(self.stage_ranks[stage] for stage in stages)
            if self.rank == owner:
                if i in self._aliases:
                    self._aliases[i].data = p.data
                for rank in others:
                    self.channel.send(values, rank, 0, [p.detach()])
            elif self.rank in others:
                self.channel.post(values, owner)
                (came,) = self.channel.take(values, owner).tensors
                assert came is not None
                self._aliases[i].data.copy_(came)

    def receives(self, action: Action) -> list[Action]:
        """Of the gradients that ``action`` of a stage on this rank adds to its own, from other ranks."""
        return [
            Action(user, RECEIVE_TIED, action.micro_batch, i)
            for i, (_, _, (owner, *users)) in enumerate(self.tied)
            for user in users
            if owner == action.stage and self.stage_ranks[user] != self.rank
        ]

    def send(self, action: Action, micro_batch: MicroBatch) -> None:
        """Begin to send what ``action`` says: a gradient, or that there is none."""
        owner = self.tied[action.tie].stages[0]
        found = self._given.pop((action.tie, action.stage, micro_batch.index))
        self.channel.send(action, self.stage_ranks[owner], 0, [found])

    def came(self, action: Action, micro_batch: MicroBatch, received: Received) -> None:
        """``received`` is what ``action`` waited for."""
        (gradient,) = received.tensors
        self._given[action.tie, action.stage, micro_batch.index] = gradient

    @property
    def memory(self) -> list[Tensor]:
        """What aliases take on this rank."""
        return [x for i, x in self._aliases.items() if not self._home.holds(self.tied[i].parameter)]

    def _alias(self, i: int) -> nn.Parameter:
        if i not in self._aliases:
            p = self.tied[i].parameter
            values = p.data if self._home.holds(p) else self._home.empty_like(p)
            self._aliases[i] = nn.Parameter(values, p.requires_grad)
        return self._aliases[i]

    def _give(self, i: int, stage: int, micro_batch: MicroBatch, gradient: Tensor | None) -> None:
        self._given[i, stage, micro_batch.index] = gradient

    def _fetch(self, i: int, micro_batch: MicroBatch) -> Tensor | None:
        total: Tensor | None = None
        for stage in reversed(self.tied[i].stages[1:]):  # as the backward of one rank comes to them
            found = self._given.pop((i, stage, micro_batch.index))
            if total is None or found is None:
                total = found if total is None else total
            else:
                total.add_(found)
        return total
