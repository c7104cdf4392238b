"""Parameters that several stages use: an output layer with the weights of the embedding, say.

Such a parameter belongs to the first of its stages, which alone reduces its gradient, steps it and saves it.
Each other one computes with a copy, a leaf of its own also where the owner is on the same rank, which has the
values as of the step's begin. Of every micro-batch the gradient of a copy is given to the first stage, which
adds its own: within a micro-batch, as one rank would, so that the bits are those of one rank. That takes a
message of the parameter's size per micro-batch, which is part of the schedule (``Schedule.ties``). Only the
last of its stages may use it more than once: one rank adds the gradients use by use, not stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from instep.pipeline.actions import RECEIVE_TIED, Action
from instep.pipeline.channel import StageChannel
from instep.pipeline.home import PipelineHome
from instep.pipeline.message_words import VALUES


class Tied(NamedTuple):
    """A parameter, and the numbers of the ``stages`` that use it, in order: of most it is one."""

    parameter: Tensor
    stages: Sequence[int]


def ties_of(named: Mapping[str, Tensor], parts: Sequence[nn.Module]) -> list[Tied]:
    """Which stages use each of the ``named`` parameters; ``parts`` are the layers of each stage."""
    users: dict[int, list[int]] = {id(p): [] for p in named.values()}
    for number, part in enumerate(parts):
        for p in part.parameters():
            users[id(p)].append(number)
    return [Tied(p, users[id(p)]) for p in named.values()]


class TiedParameters:
    """Those of ``used`` that several stages use, of which stage s is on rank ``stage_ranks[s]``.

    A step: ``refresh``; then the layers of a stage run with what is ``copied``, and its backwards of weights
    between ``begin_backward`` and ``end_backward``.
    """

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
        self.copies = {
            i: nn.Parameter(p.data if home.holds(p) else home.empty_like(p), p.requires_grad)
            for i, (p, (_, *users)) in enumerate(self.tied)
            if any(stage_ranks[user] == rank for user in users)
        }
        self.memory = [x for i, x in self.copies.items() if not home.holds(self.tied[i].parameter)]
        # On this rank, by tie, stage and micro-batch, until it is sent or added.
        self._given: dict[tuple[int, int, int], Tensor | None] = {}

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """As a ``Schedule`` has them."""
        return tuple(tuple(one.stages) for one in self.tied)

    def copied(self, stage: int) -> dict[int, nn.Parameter]:
        """The copies that ``stage`` computes with, by the identity of the parameter."""
        return {id(p): self.copies[i] for i, (p, (_, *users)) in enumerate(self.tied) if stage in users}

    def shared(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        """Parameters that later stages use, too, each with the leaf that ``stage`` computes with."""
        return [
            (p, p if stage == stages[0] else self.copies[i])
            for i, (p, stages) in enumerate(self.tied)
            if stage in stages[:-1]
        ]

    def refresh(self) -> None:
        """Copies have the parameters' values. Collective over the ranks that have one."""
        self._given.clear()
        for i, (p, stages) in enumerate(self.tied):
            values = Action(stages[0], VALUES, 0, i)
            owner, *others = dict.fromkeys(self.stage_ranks[stage] for stage in stages)
            if self.rank == owner:
                if i in self.copies:
                    self.copies[i].data = p.data
                for rank in others:
                    self.channel.send(values, rank, 0, [p.detach()])
            elif self.rank in others:
                self.channel.post(values, owner)
                (came,) = self.channel.take(values, owner).tensors
                assert came is not None
                self.copies[i].data.copy_(came)

    def receives(self, action: Action) -> list[Action]:
        """Of the gradients that ``action`` of a stage on this rank adds to its own, from other ranks."""
        return [
            Action(user, RECEIVE_TIED, action.micro_batch, i)
            for i, (_, (owner, *users)) in enumerate(self.tied)
            for user in users
            if owner == action.stage and self.stage_ranks[user] != self.rank
        ]

    def send(self, action: Action, micro_batch: int) -> None:
        """Begin to send what ``action`` says: a gradient, or that there is none."""
        to = self.stage_ranks[self.tied[action.tie].stages[0]]
        self.channel.send(action, to, 0, [self._given.pop((action.tie, action.stage, micro_batch))])

    def came(self, action: Action, micro_batch: int, gradient: Tensor | None) -> None:
        """``gradient`` is what ``action`` waited for."""
        self._given[action.tie, action.stage, micro_batch] = gradient

    def begin_backward(self, stage: int, micro_batch: int) -> None:
        """``stage`` adds its gradients to those that others have of what belongs to it."""
        for i, (p, (owner, *users)) in enumerate(self.tied):
            if owner == stage:
                p.grad = None
                for user in reversed(users):  # as the backward of one rank comes to them
                    found = self._given.pop((i, user, micro_batch))
                    if p.grad is None or found is None:
                        p.grad = found if p.grad is None else p.grad
                    else:
                        p.grad.add_(found)

    def end_backward(self, stage: int, micro_batch: int) -> None:
        """The gradients of ``stage`` for what belongs to others are theirs."""
        for i, (_, (_, *users)) in enumerate(self.tied):
            if stage in users:
                copy = self.copies[i]
                self._given[i, stage, micro_batch], copy.grad = copy.grad, None
