"""A rank's part of a step: its program of actions, executed one after the other on its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from instep.events import PIPELINE
from instep.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    SPANS,
    WEIGHT_GRADIENT,
    Action,
)
from instep.pipeline.channel import MessageWait, StageChannel
from instep.pipeline.stage import Stage
from instep.step.micro_batches import MicroBatch

Loss: TypeAlias = Callable[[Any, MicroBatch], Tensor]
"""``loss(output, micro_batch)``: a scalar."""
Inputs: TypeAlias = Callable[[MicroBatch], Any]
"""``inputs(micro_batch)``: what the first layer is called with, a tuple for several arguments."""


class StepTask(NamedTuple):
    """What a step computes: ``own`` are this pipeline's micro-batches, whose data ``read`` yields."""

    step: int
    own: Sequence[int]
    read: Iterator[MicroBatch]
    inputs: Inputs
    loss: Loss


class Executor:
    """Executes what one rank does in one step.

    ``stages`` are this rank's, by number, and ``stage_ranks`` says which rank of ``channel`` has which stage.
    The k-th micro-batch of an action is ``task.own[k]``. ``losses`` are those of the last stage.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        stage_ranks: Sequence[int],
        channel: StageChannel,
        task: StepTask,
    ) -> None:
        self.stages, self.stage_ranks, self.channel, self.task = stages, stage_ranks, channel, task
        self.losses: dict[int, Tensor] = {}
        self._rank = stage_ranks[next(iter(stages))]
        self._last_stage = len(stage_ranks) - 1
        self._known: list[MicroBatch] = []
        self._left = dict.fromkeys(stages, len(task.own))  # micro-batches that weights wait for
        self._made: dict[Action, Sequence[Any]] = {}  # results that another stage still needs
        self._execute: dict[str, Callable[[Action], None]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT_GRADIENT: self._input_gradient,
            WEIGHT_GRADIENT: self._weight_gradient,
            SEND_FORWARD: self._send,
            SEND_BACKWARD: self._send,
            RECEIVE_FORWARD: self._post,
            RECEIVE_BACKWARD: self._post,
        }

    def run(self, program: Sequence[Action]) -> None:
        """Execute ``program``: see ``pipeline/communication.py``."""
        for action in program:
            self._execute[action.kind](action)

    def _forward(self, action: Action) -> None:
        stage, micro_batch = self._of(action)
        if action.stage == 0:
            given = self.task.inputs(micro_batch)
            values = given if isinstance(given, tuple) else (given,)
        else:
            made = self._result(
                action._replace(stage=action.stage - 1), action._replace(kind=RECEIVE_FORWARD)
            )
            values = tuple(x.detach() if isinstance(x, Tensor) else x for x in made)
        if action.stage < self._last_stage:
            self._made[action] = stage.forward(micro_batch, values)
            return
        (loss,) = stage.forward(micro_batch, values, lambda output: self.task.loss(output, micro_batch))
        self.losses[micro_batch.index] = loss.detach().reshape(())

    def _backward(self, action: Action) -> None:
        gradients, (stage, micro_batch) = self._gradients(action), self._of(action)
        self._keep(action, stage.backward(micro_batch, gradients, last=self._is_last(action)))

    def _input_gradient(self, action: Action) -> None:
        gradients, (stage, micro_batch) = self._gradients(action), self._of(action)
        self._keep(action, stage.input_gradients(micro_batch, gradients))

    def _weight_gradient(self, action: Action) -> None:
        stage, micro_batch = self._of(action)
        stage.weight_gradients(micro_batch, last=self._is_last(action))

    def _send(self, action: Action) -> None:
        forward = action.kind == SEND_FORWARD
        tensors = self._made.pop(action._replace(kind=FORWARD if forward else INPUT_GRADIENT))
        to = self.stage_ranks[action.stage + (1 if forward else -1)]
        weight = self._of(action)[1].checked_weight()
        self.channel.send(action, to, self.task.step, weight, tensors)

    def _post(self, action: Action) -> None:
        sender = action.stage + (-1 if action.kind == RECEIVE_FORWARD else 1)
        self.channel.post(action, self.stage_ranks[sender])

    def _of(self, action: Action) -> tuple[Stage, MicroBatch]:
        while len(self._known) <= action.micro_batch:
            self._known.append(next(self.task.read))
        return self.stages[action.stage], self._known[action.micro_batch]

    def _gradients(self, action: Action) -> Sequence[Tensor] | None:
        """Those of what the stage has given; None where that was the loss."""
        if action.stage == self._last_stage:
            return None
        needed = Action(action.stage + 1, INPUT_GRADIENT, action.micro_batch)
        return self._result(needed, action._replace(kind=RECEIVE_BACKWARD))

    def _result(self, needed: Action, receive: Action) -> Sequence[Any]:
        """What ``needed`` has made, here or on another rank."""
        source = self.stage_ranks[needed.stage]
        if source == self._rank:
            return self._made.pop(needed)
        arrival = self.channel.take(receive, source, self.task.step)
        if arrival.waited is not None:
            num_bytes = sum(x.nbytes for x in arrival.tensors)
            self._record(receive, source, arrival.waited, num_bytes)
        if receive.kind == RECEIVE_BACKWARD:  # the loss has been computed, and may have set it
            self._of(receive)[1].weight = arrival.weight
        return arrival.tensors

    def _record(self, receive: Action, source: int, waited: MessageWait, num_bytes: int) -> None:
        """Tell the timeline of a message: waited for until it was sent, by a rank, then until it was here."""
        recorder, peer = self.stages[receive.stage].recorder, self.channel.group.ranks[source]
        leaf, stage = self.task.own[receive.micro_batch], receive.stage
        start_ns, sent_ns, under_way_ns, end_ns = waited
        if sent_ns > start_ns:
            recorder.put(PIPELINE, start_ns, sent_ns, lane="host", leaf=leaf, peer=peer, stage=stage)
        recorder.put(PIPELINE, max(start_ns, sent_ns), end_ns, lane="host", leaf=leaf, stage=stage)
        recorder.put(
            SPANS[receive.kind],
            under_way_ns,
            end_ns,
            lane="communication",
            num_bytes=num_bytes,
            leaf=leaf,
            peer=peer,
            stage=stage,
        )

    def _keep(self, action: Action, gradients: Sequence[Tensor]) -> None:
        if action.stage:
            self._made[action.result] = gradients

    def _is_last(self, action: Action) -> bool:
        self._left[action.stage] -= 1
        return self._left[action.stage] == 0
