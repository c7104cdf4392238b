"""Parameters that several stages use: an output layer with the weights of the embedding, say.

Such a parameter belongs to the first of its stages, which alone reduces its gradient, steps it and saves it.
Each other one computes with an *alias*, which gets the values before a step. Of every micro-batch the
gradient that an alias has got is given to the first stage, which adds its own: within a micro-batch, as one
rank would, so that the bits are those of one rank. That takes a message of the parameter's size per
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.pipeline.channel import Look, StageChannel
from instep.pipeline.home import PipelineHome
from instep.pipeline.stage import Mirrored, Shared
from instep.step.micro_batches import MicroBatch

FIRST_TAG = 1  # of messages; without one are those of stages


class Tied(NamedTuple):
    """Parameter ``name``, and the numbers of the ``stages`` that use it, in order."""

    name: str
    parameter: Tensor
    stages: Sequence[int]


class TiedParameters:
    """The ``tied`` parameters of a pipeline, whose stage s is on rank ``stage_ranks[s]`` of ``channel``."""

    def __init__(
        self,
        tied: Sequence[Tied],
        stage_ranks: Sequence[int],
        rank: int,
        home: PipelineHome,
        channel: StageChannel,
    ) -> None:
        self.tied, self.stage_ranks, self.rank, self.channel = tied, stage_ranks, rank, channel
        self._home = home
        self._aliases: dict[int, nn.Parameter] = {}
        self._given: dict[tuple[int, int, int], Tensor | None] = {}  # on this rank, until it is fetched

    def mirrored(self, stage: int) -> list[Mirrored]:
        """Those that ``stage``, on this rank, uses, and that belong to another one."""
        return [
            Mirrored(one.parameter, self._alias(i), partial(self._give, i, stage))
            for i, one in enumerate(self.tied)
            if stage in one.stages[1:]
        ]

    def shared(self, stage: int) -> list[Shared]:
        """Those that belong to ``stage``, on this rank, and that others use."""
        return [
            Shared(one.parameter, partial(self._fetch, i))
            for i, one in enumerate(self.tied)
            if stage == one.stages[0]
        ]

    def refresh(self) -> None:
        """Aliases have the parameters' values. Collective over the ranks that use one."""
        self._given.clear()
        for i, (name, p, stages) in enumerate(self.tied):
            owner, *others = dict.fromkeys(self.stage_ranks[stage] for stage in stages)
            if self.rank == owner:
                if i in self._aliases:
                    self._aliases[i].data = p.data
                for rank in others:
                    self.channel.send_alone(p, rank, FIRST_TAG + i)
            elif self.rank in others:
                operation = f"the values of {name!r}, which two stages use"
                found = self.channel.receive_alone(_look(p), owner, FIRST_TAG + i, operation)
                self._aliases[i].data.copy_(found)

    @property
    def memory(self) -> list[Tensor]:
        """What aliases take on this rank."""
        return [x for i, x in self._aliases.items() if not self._home.holds(self.tied[i].parameter)]

    def _alias(self, i: int) -> nn.Parameter:
        if i not in self._aliases:
            p = self.tied[i].parameter
            empty = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            self._aliases[i] = nn.Parameter(p.data if self._home.holds(p) else empty, p.requires_grad)
        return self._aliases[i]

    def _give(self, i: int, stage: int, micro_batch: MicroBatch, gradient: Tensor | None) -> None:
        owner = self.stage_ranks[self.tied[i].stages[0]]
        if owner == self.rank:
            self._given[i, stage, micro_batch.index] = gradient
        else:
            p = self.tied[i].parameter
            whole = torch.zeros(p.shape, dtype=p.dtype) if gradient is None else gradient
            self.channel.send_alone(whole, owner, FIRST_TAG + i)

    def _fetch(self, i: int, micro_batch: MicroBatch) -> Tensor | None:
        name, p, stages = self.tied[i]
        total: Tensor | None = None
        for stage in reversed(stages[1:]):  # as the backward of one rank comes to them
            source = self.stage_ranks[stage]
            if source == self.rank:
                found = self._given.pop((i, stage, micro_batch.index))
            else:
                operation = f"the gradient of {name!r} from stage {stage}, micro-batch {micro_batch.index}"
                found = self.channel.receive_alone(_look(p), source, FIRST_TAG + i, operation)
            if found is not None:
                total = found if total is None else total.add_(found)
        return total


def _look(p: Tensor) -> Look:
    return Look(p.dtype, tuple(p.shape))
