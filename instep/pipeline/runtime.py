"""A rank's part of a step: its program of actions, executed one after the other on its stages; and the end of
a step, to which all ranks of a pipeline come, or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from instep.errors import Desync, PeerLost
from instep.events import PIPELINE, Recorder, Span
from instep.memory import bytes_of, tensor_of
from instep.net.agree import all_tell, attempt
from instep.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    RECEIVE_TIED,
    SEND_BACKWARD,
    SEND_FORWARD,
    SEND_TIED,
    SPANS,
    WEIGHT_GRADIENT,
    Action,
)
from instep.pipeline.channel import MessageWait, Received, StageChannel
from instep.pipeline.communication import SENT, next_stage, send_of
from instep.pipeline.message_words import DTYPES, ENDING, EVALUATION
from instep.pipeline.stage import Gradients, Stage, Values
from instep.pipeline.tied import TiedParameters
from instep.step.micro_batches import DataSource, MicroBatch
from instep.step.reduction import StepPlan
from instep.step.running_statistics import running_buffers

END_BYTES = 1 << 32  # at most, of what one rank tells at the end of a step: running statistics
Losses: TypeAlias = Mapping[int, Tensor]
"""Of the last stage, by micro-batch."""
Loss: TypeAlias = Callable[[Any, MicroBatch], Tensor]
"""``loss(output, micro_batch)``: a scalar."""
Inputs: TypeAlias = Callable[[MicroBatch], Any]
"""``inputs(micro_batch)``: what the first layer is called with, a tuple for several arguments."""


def first_of_data(micro_batch: MicroBatch) -> Any:
    """What the first layer is called with, where a loader's samples are (inputs, targets)."""
    if micro_batch.data is None:
        raise TypeError(
            "step(): a number of micro-batches says nothing of what is in them: pass inputs=, a function of "
            "the micro-batch, or an instep.Loader as data="
        )
    return micro_batch.data[0]


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
    The k-th micro-batch of an action is ``task.own[k]``.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        stage_ranks: Sequence[int],
        channel: StageChannel,
        tied: TiedParameters,
        task: StepTask,
        recorder: Recorder,
    ) -> None:
        self.stages, self.stage_ranks, self.channel, self.task = stages, stage_ranks, channel, task
        self.tied, self.recorder = tied, recorder
        self._losses: dict[int, Tensor] = {}
        self._rank = stage_ranks[next(iter(stages))]
        self._last_stage = len(stage_ranks) - 1
        self._known: dict[int, MicroBatch] = {}  # from the first action that needs it to the last
        self._num_read = 0
        self._left = dict.fromkeys(stages, len(task.own))  # micro-batches that weights wait for
        self._made: dict[Action, Sequence[Any]] = {}  # results that another stage still needs
        self._execute: dict[str, Callable[[Action], None]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT_GRADIENT: self._input_gradient,
            WEIGHT_GRADIENT: self._weight_gradient,
            SEND_FORWARD: self._send,
            SEND_BACKWARD: self._send,
            SEND_TIED: self._send_tied,
            RECEIVE_FORWARD: self._post,
            RECEIVE_BACKWARD: self._post,
            RECEIVE_TIED: self._post,
        }

    def execute(self, plan: StepPlan, program: Callable[[], Sequence[Action]]) -> Losses:
        """Do what ``program()`` says (see ``pipeline/communication.py``), and reduce gradients by ``plan``;
        the losses in order. The other ranks are told if it fails."""
        data = plan.data_identity, plan.data_position
        with self.channel.begun(self.task.step, plan.num_leaves, data), ExitStack() as stack:
            with _waits(self.recorder):
                self.tied.refresh()
            for stage in self.stages.values():
                stack.enter_context(stage.begun(plan))
            actions = program() if self.task.own else ()
            last = {action.micro_batch: i for i, action in enumerate(actions)}
            for i, action in enumerate(actions):
                try:
                    self._execute[action.kind](action)
                except Exception as error:
                    leaf = self.task.own[action.micro_batch]
                    error.add_note(f"in {action}, of micro-batch {leaf}, in stage {action.stage}")
                    raise
                if last[action.micro_batch] == i:
                    self._known.pop(action.micro_batch, None)
            with _waits(self.recorder):
                self.channel.flush()
        return {leaf: self._losses[leaf] for leaf in self.task.own if self._losses}

    def _forward(self, action: Action) -> None:
        stage, micro_batch = self._of(action)
        if action.stage == 0:
            given = self.task.inputs(micro_batch)
            values = given if isinstance(given, tuple) else (given,)
        else:
            before = Action(action.stage - 1, FORWARD, action.micro_batch)
            made = self._result(before, Action(action.stage, RECEIVE_FORWARD, action.micro_batch))
            values = tuple(
                [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in made]
            )
        if action.stage < self._last_stage:
            self._made[action] = stage.forward(micro_batch, values)
            self._require_inside(stage)
            return
        (loss,) = stage.forward(micro_batch, values, lambda output: self.task.loss(output, micro_batch))
        self._losses[micro_batch.index] = loss.detach().reshape(())
        self._require_inside(stage)

    def _require_inside(self, stage: Stage) -> None:
        """Raise ``ValueError`` for what ``inputs`` or ``loss`` trains, and no stage reduces and steps."""
        for p in stage.outside or ():
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is used by inputs or loss in stage {stage.number}, "
                "and is in none of its layers: it would get a gradient on rank "
                f"{self.channel.group.global_rank} alone. Make it part of a layer that uses it, or, if it is "
                "not trained, call its requires_grad_(False)"
            )

    def _backward(self, action: Action) -> None:
        gradients, (stage, micro_batch) = self._gradients(action), self._of(action)
        self._take_tied(action)
        self._keep(action, stage.backward(micro_batch, gradients, last=self._is_last(action)))

    def _input_gradient(self, action: Action) -> None:
        gradients, (stage, micro_batch) = self._gradients(action), self._of(action)
        self._keep(action, stage.input_gradients(micro_batch, gradients))

    def _weight_gradient(self, action: Action) -> None:
        stage, micro_batch = self._of(action)
        self._take_tied(action)
        stage.weight_gradients(micro_batch, last=self._is_last(action))

    def _send(self, action: Action) -> None:
        tensors = self._made.pop(Action(action.stage, SENT[action.kind], action.micro_batch))
        to = self.stage_ranks[next_stage(action)]
        weight = self._micro_batch(action).checked_weight()
        self.channel.send(action, to, weight, tensors)

    def _send_tied(self, action: Action) -> None:
        self.tied.send(action, self.task.own[action.micro_batch])

    def _post(self, action: Action) -> None:
        self.channel.post(action, self.stage_ranks[send_of(action).stage])

    def _of(self, action: Action) -> tuple[Stage, MicroBatch]:
        return self.stages[action.stage], self._micro_batch(action)

    def _micro_batch(self, action: Action) -> MicroBatch:
        while self._num_read <= action.micro_batch:
            self._known[self._num_read] = next(self.task.read)
            self._num_read += 1
        return self._known[action.micro_batch]

    def _gradients(self, action: Action) -> Gradients | None:
        """Those of what the stage has given; None where that was the loss."""
        if action.stage == self._last_stage:
            return None
        needed = Action(action.stage + 1, INPUT_GRADIENT, action.micro_batch)
        return self._result(needed, Action(action.stage, RECEIVE_BACKWARD, action.micro_batch))

    def _result(self, needed: Action, receive: Action) -> Sequence[Any]:
        """What ``needed`` has made, here or on another rank."""
        source = self.stage_ranks[needed.stage]
        if source == self._rank:
            return self._made.pop(needed)
        arrival = self._take(receive, receive.stage)
        if receive.kind == RECEIVE_BACKWARD:  # the loss has been computed, and may have set it
            self._micro_batch(receive).weight = arrival.number
        return arrival.tensors

    def _take_tied(self, action: Action) -> None:
        """The gradients that other ranks have of parameters of this stage, before it adds its own."""
        for receive in self.tied.receives(action):
            arrival = self._take(receive, action.stage)
            self.tied.came(receive, self.task.own[receive.micro_batch], *arrival.tensors)

    def _take(self, receive: Action, stage: int) -> Received:
        """What has come for ``stage``; the timeline is told for how long it was waited for."""
        source = self.stage_ranks[send_of(receive).stage]
        arrival = self.channel.take(receive, source)
        if arrival.waited is not None:
            num_bytes = sum(x.nbytes for x in arrival.tensors if x is not None)
            self._record(receive, stage, source, arrival.waited, num_bytes)
        return arrival

    def _record(self, receive: Action, stage: int, source: int, waited: MessageWait, num_bytes: int) -> None:
        """Tell the timeline of a message: waited for until it was sent, by a rank, then until it was here."""
        recorder, peer = self.stages[stage].recorder, self.channel.group.ranks[source]
        leaf = self.task.own[receive.micro_batch]
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

    def _keep(self, action: Action, gradients: Gradients) -> None:
        if action.stage:
            self._made[action.result] = gradients

    def _is_last(self, action: Action) -> bool:
        self._left[action.stage] -= 1
        return self._left[action.stage] == 0


class StepEnd:
    """The ranks of ``group``, of one pipeline, end their steps together.

    A rank that has raised says so in one small exchange, and then all of them raise. With it goes what all
    are to have: the losses, and running statistics of ``module``, whose stages, ``parts``, are on
    ``stage_ranks`` and have changed them.
    """

    def __init__(
        self,
        channel: StageChannel,
        recorder: Recorder,
        module: nn.Module,
        parts: Sequence[nn.Module],
        stage_ranks: Sequence[int],
    ) -> None:
        self.channel, self.recorder, self.group = channel, recorder, channel.group
        self._statistics: list[list[Tensor]] = [[] for _ in range(self.group.size)]  # by rank
        ranks: defaultdict[int, set[int]] = defaultdict(set)
        for part, its in zip(parts, stage_ranks, strict=True):
            for x in part.buffers():
                ranks[id(x)].add(its)
        for x in running_buffers(module.modules()):
            first, *others = sorted(ranks[id(x)])
            if others:
                name = next(name for name, buffer in module.named_buffers() if buffer is x)
                raise ValueError(
                    f"buffer {name!r} is a running statistic of layers on ranks {first} and {others[0]}, "
                    "each of which would follow its own alone: make a norm for each layer, or let them all "
                    "be in one stage"
                )
            self._statistics[first].append(x)

    def together(self, execute: Callable[[], Losses], stages: Mapping[int, Stage]) -> list[Tensor]:
        """``execute()`` this rank's part, which is of its ``stages``; the losses of all. Collective.

        Raises:
            Exception: this rank's own. Gradients are dropped then, and running statistics as before.
            Desync, PeerLost: another rank has raised; it is named, with its error.
        """
        before = [(x, x.clone()) for x in self._statistics[self.group.rank]]
        try:
            losses, told = self._agree(attempt(execute))
        except BaseException as error:
            self.channel.leave(error)
            for stage in stages.values():
                stage.take_back()
            with torch.no_grad():
                for x, values in before:
                    x.copy_(values)
            raise
        found = list(losses.values())
        for rank, data in enumerate(told):
            if rank != self.group.rank:
                found += self._hear(data, self._statistics[rank])
        return found

    def _agree(self, attempted: Callable[[], Losses]) -> tuple[Losses, list[bytes]]:
        if self.channel.is_broken:  # then this rank has failed, too
            attempted()
        with _waits(self.recorder):
            return all_tell(
                self.group, ENDING, attempted, self._tell, errors=(PeerLost, Desync), limit=END_BYTES
            )

    def _tell(self, losses: Losses) -> bytes:
        if self.group.size == 1:
            return b""
        its = [bytes([DTYPES.index(x.dtype)]) + bytes_of(x) for x in losses.values()]
        return b"".join([*map(bytes_of, self._statistics[self.group.rank]), *its])

    def _hear(self, data: bytes, statistics: Sequence[Tensor]) -> list[Tensor]:
        """Take over what another rank has told; its losses."""
        losses, at = [], 0
        for x in statistics:
            x.copy_(tensor_of(data[at : at + x.nbytes], x.dtype).view(x.shape))
            at += x.nbytes
        while at < len(data):
            dtype = DTYPES[data[at]]
            losses.append(
                tensor_of(data[at + 1 : at + 1 + dtype.itemsize], dtype).view(()).to(self.channel.device)
            )
            at += 1 + dtype.itemsize
        return losses


def evaluate(
    stages: Mapping[int, Stage],
    stage_ranks: Sequence[int],
    channel: StageChannel,
    tied: TiedParameters,
    values: Values,
) -> Values:
    """What the model gives for ``values``, on all ranks; they are as for an ``Executor``. Collective."""
    rank, last = channel.group.rank, stage_ranks[-1]
    with channel.begun(EVALUATION):
        tied.refresh()
        for number, (before, its) in enumerate(pairwise([stage_ranks[0], *stage_ranks])):
            if rank == before != its:
                channel.send_values(values, its)
            if rank == its:
                given = values if before == its else tuple(channel.receive_values(before))
                values = stages[number].evaluate(given)
        if rank != last:
            values = tuple(channel.receive_values(last))
        else:
            for other in range(channel.group.size):
                if other != last:
                    channel.send_values(values, other)
        channel.flush()
    return values


def read_in_order(own: Sequence[int], count: int, source: DataSource | None) -> Iterator[MicroBatch]:
    """The micro-batches ``own``, of ``count``, with their data from ``source``."""
    if source is None:
        yield from (MicroBatch(leaf, count) for leaf in own)
        return
    for leaf, (values, weight) in zip(own, source.read(own), strict=True):
        yield MicroBatch(leaf, count, weight, values)


def _waits(recorder: Recorder) -> Span:
    """Around what waits for ranks with other stages, or for their messages."""
    return recorder.span(PIPELINE, lane="host")
