"""The reducer of stages 2 and 3: every micro-batch's gradients go to their owners; no rank keeps whole ones.

    rank 0   |= forward, backward of micro-batch 0 =|= forward, backward of micro-batch 2 =|
    rank 1   |= forward, backward of micro-batch 1 =|= forward, backward of micro-batch 3 =|
    network                      |-u3-|-u2-|-u1-|-u0-|              |-u3-|-u2-|-u1-|-u0-|     u: unit

Every rank takes part in every round, with a micro-batch or without: a rank that has none left sends headers
alone, and adds up its slices. Bytes per rank: G/W times S (W-1)/W, where gradients that are kept whole need
2 S (W-1)/W once.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054, section 5.2 (gradient partitioning); the order of micro-batches is this library's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.events import GRADIENT_SYNC, Recorder
from instep.hook import weakly
from instep.memory import bytes_of, tensor_of
from instep.net.lane import Work
from instep.reduce.buckets import Bundle, Caps
from instep.reduce.header import NORM, UNSCALE
from instep.reduce.node_format import IN_FLOAT32, NodeFormat
from instep.reduce.norm import block_square_sums
from instep.reduce.placeholder import placeholder, was_written
from instep.shard import checks
from instep.shard.flat_parameters import FlatParameters
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.reduce_scatter import ReduceScatter, SlicedBucket, Staging
from instep.shard.round_plan import Round, deal, plan_rounds, ranges
from instep.shard.shard_groups import ShardRanks
from instep.shard.sliced_optimizer import SlicedOptimizer, SteppingRanks, sliced_optimizer
from instep.shard.unit import Divided
from instep.state.homes import DividedOptimizer, ParameterShard
from instep.step.reduction import Reduction, ReductionOptions, StepPlan, Update
from instep.step.replica_watch import Replica

NORM_BYTES = 1 << 32  # at most, of one rank's sums of blocks
GRADIENT_NORM = "the gradient norm"


class SliceReducer(Reduction):
    """Reduces the gradients of ``parameters``, which live in ``spaces``, to one slice per rank of a
    shard group.

    After ``finish`` every ``.grad`` is a placeholder, and ``gradient_of`` has this rank's pieces. A gradient
    that is there already when a micro-batch begins, as after a second plain backward, is added to, as ever.

    A gradient is taken for whole when it has come once, until it is known better: another one of the same
    micro-batch is then an error, unless it comes from a nested backward. ``overlap=False`` waits for the end
    of the micro-batch.

    ``closed(space)`` is called when the gradients of its parameters are whole, of the open micro-batch;
    ``ended()`` when backward has ended; ``problem(parameter)`` may say why a gradient that has come cannot be
    right. ``hooks`` are to be removed when the wrapper goes.
    """

    sharded = True
    where: ClassVar[str] = "in slices, one on each rank"
    late_fix = (
        "or several times in one micro-batch, pass overlap=False to fully_shard, which sends nothing before "
        "the micro-batch has ended, and needs memory for all of its gradients"
    )
    lost_fix = "close() the module, and shard one with a state that was kept over another group"
    changes: ClassVar[tuple[str, ...]] = (*Reduction.changes, "_carried")
    buckets: list[SlicedBucket]

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        spaces: Sequence[Divided],
        ranks: ShardRanks,
        recorder: Recorder,
        *,
        unused: bool | None = None,
        overlap: bool = True,
        nodes: NodeFormat = IN_FLOAT32,
    ) -> None:
        options = ReductionOptions(InUnitOrder, unused=unused, nodes=nodes)
        super().__init__(names, parameters, ranks.whole, recorder, options)
        self.ranks = ranks
        self._overlaps = overlap
        self._reordered = True  # units leave in the order in which they were made, from the last to the root
        self.spaces = list(spaces)
        self._position = {id(p): i for i, p in enumerate(self.parameters)}
        self.buckets = self._make_buckets()
        self.place = {slot.position: bucket for bucket in self.buckets for slot in bucket.slots}
        self.exchange = self.reduce_scatter = ReduceScatter(
            ranks, recorder, max_parameters=max([len(b.slots) for b in self.buckets], default=0)
        )
        self.reduce_scatter.staging = Staging(self.buckets, ranks.shard_group)
        self._watch_over(*self._replicas())
        self.turns = InUnitOrder(weakly(self._stage))
        self.closed: Callable[[FlatParameters], None] | None = None
        self.ended: Callable[[], None] | None = None
        self.problem: Callable[[Tensor], str | None] | None = None
        self._rounds: tuple[Round, ...] = ()
        self._by_group: Sequence[range] = ()  # the leaves of this reduction
        self._staged_leaf = 0  # what goes into staging memory is of this leaf
        self._works: list[Work] = []  # of this reduction, one per unit and round
        self._placeholders = [
            placeholder(p, self, name, self._bucket(i).value_dtype)
            for i, (p, name) in enumerate(zip(self.parameters, self.names, strict=True))
        ]
        self._carried: set[int] = set()  # parameters with a reduced gradient that the next one is added to
        self._put_aside: set[int] = set()  # of those, whose placeholder made way in this backward
        coming = weakly(self._coming)
        self.hooks: list[Any] = [
            parameter.register_hook(partial(coming, i)) for i, parameter in enumerate(self.parameters)
        ]
        for space in self.spaces:
            space.gradient_source = weakly(self.gradient_of)
            space.divide = weakly(self._divide)

    def _sliced(self, optimizer: Optimizer) -> SlicedOptimizer:
        ranks = self.ranks
        among = SteppingRanks(ranks.shard_group, ranks.num_replicas, self.lane, self.recorder)
        return sliced_optimizer(optimizer, among)

    def _divide(self, optimizer: Optimizer) -> DividedOptimizer:
        """The state of a plain ``optimizer`` of these parameters."""
        return self._sliced(optimizer).describe()

    def _replicas(self) -> tuple[Callable[[], Sequence[Replica]], Sequence[Sequence[int]]]:
        """What this rank holds that others hold too, and which ranks hold the same."""
        num_ranks, num_slices = self.group.size, self.ranks.shard_group.size
        if all(space.resident for space in self.spaces):
            named = list(zip(self.names, self.parameters, strict=True))
            return named.copy, [range(num_ranks)]
        slices = [range(first, num_ranks, num_slices) for first in range(num_slices)]

        spaces, names, position = self.spaces, self.names, self._position

        def held() -> Sequence[Replica]:
            pieces = (held for space in spaces for held in space.held)
            return [(names[position[id(x.parameter)]], x.tensor) for x in pieces]

        return held, slices

    def assign(self, num_leaves: int) -> StepPlan:
        ranks = self.ranks
        return StepPlan(
            True, num_leaves, deal(num_leaves, ranks.shard_group.size, ranks.num_replicas, self.shift)
        )

    def refusal(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, ShardedOptimizer):
            return None
        problem = checks.why_not_in_slices(type(optimizer), optimizer.defaults)
        return None if problem is None else f"has its gradient in slices, one on each rank: {problem}"

    def update(self, optimizer: Optimizer) -> Update | None:
        return None if isinstance(optimizer, ShardedOptimizer) else self._sliced(optimizer).step

    def begin(self, plan: StepPlan) -> None:
        self._require_unmoved()
        super().begin(plan)
        self._forget_discarded()
        ranks = self.ranks
        placed = plan.num_leaves, ranks.shard_group.size, ranks.num_replicas
        shift = self.shift if plan.declared else 0
        self._rounds = plan_rounds(*placed, ranks.replica, shift)
        self._by_group = ranges(*placed, shift)
        self._works = []
        for bucket in self.buckets:
            bucket.num_kept = 0
            for slot in bucket.slots:
                slot.present = False
        self.turns.begin(())

    def open_leaf(self, leaf: int, *, last: bool) -> None:
        self.turns.begin(self.buckets)
        self._staged_leaf = leaf  # also when it is closed: its last unit leaves after that
        super().open_leaf(leaf, last=last)

    def arrived(self, i: int, *, settles: bool = True) -> None:
        if self.problem is not None and (problem := self.problem(self.parameters[i])) is not None:
            raise ValueError(problem)
        super().arrived(i, settles=settles)

    def close_leaf(self) -> None:
        super().close_leaf()
        if not self._last:
            self.turns.finish()

    def finish(self) -> None:
        """All micro-batches of this rank are closed: wait for the exchanges, and set every ``.grad``.

        Raises:
            Desync, PeerLost: as ``Exchange.run``.
            ValueError: a parameter got no gradient, and unused parameters are forbidden.
        """
        self.turns.finish()
        while len(self._works) < self._num_exchanges:  # rounds in which this rank has no micro-batch
            self._send(self.buckets[len(self._works) % len(self.buckets)])
        with self.recorder.span(GRADIENT_SYNC, lane="host"):
            for work in self._works:
                work.wait()
        self._exchange_afterwards()
        self._report_unused()
        for bucket in self.buckets:
            for k in bucket.present_on_some():
                position = bucket.slots[k].position
                self.parameters[position].grad = self._placeholders[position]
        self.local = [False] * len(self.names)
        self._carried.clear()
        self.exchanges += 1
        self.given_up = False
        self.plan = None

    def leave(self) -> None:
        if self.plan is None:
            return
        plan, self.plan, self.leaf = self.plan, None, None
        if self.group.size > 1 and len(self._works) < self._num_exchanges:
            turn, index = divmod(len(self._works), len(self.buckets))
            header = self._header(self.buckets[index], plan, turn)
            name, exchange = "leaving a step", self.exchange
            self.lane.submit(name, lambda: exchange.announce_leave(header, name), awaited=False)
        else:
            self._leave_afterwards()
        self._works = []  # one that has failed holds all that it worked on
        self.exchanges += 1
        self.given_up = True
        self.gradients.drop()
        self._carried.clear()
        self.local = [False] * len(self.names)

    def abandon(self) -> None:
        super().abandon()
        self.buckets, self._works = [], []

    def backward_ended(self) -> None:
        self._put_back()
        if self.ended is not None:
            self.ended()

    @property
    def scratch(self) -> list[Tensor]:
        """The memory that reducing takes, beside that of the reduced gradients."""
        kept = [x for bucket in self.buckets for x in bucket.kept]
        return [*kept, *self.reduce_scatter.staging.segments, *self.exchange.scratch]

    def gradient_of(self, held: ParameterShard) -> Tensor | None:
        """What ``held.tensor`` is to be stepped with: the piece of the reduced gradient, in its dtype."""
        i = self._position[id(held.parameter)]
        if self._stands_in(i):
            return self._bucket(i).piece(held)
        gradient = held.parameter.grad  # if there is one, the training loop has put it there
        return None if gradient is None else held.part_of(gradient).to(held.tensor.dtype)

    def square_sums(self, placeholders: Sequence[Tensor], whole: Sequence[Tensor]) -> list[float]:
        """Sums of squares of all blocks of these gradients. Collective: 8 bytes per block."""
        own = [block_square_sums(piece).cpu() for piece in self._pieces(placeholders)]
        mine = torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *own])
        data, group = bytes_of(mine), self.ranks.shard_group
        lengths = dict(zip(self.group.ranks, self.rendezvous(NORM, GRADIENT_NORM, [len(data)]), strict=True))
        everyone: list[bytes] = []

        def gather() -> None:
            of_group = [lengths[rank][0] for rank in group.ranks]
            everyone.extend(group.all_gather_bytes(data, GRADIENT_NORM, limit=NORM_BYTES, lengths=of_group))

        self.lane.run(GRADIENT_NORM, gather).wait()
        return [value for data in everyone for value in tensor_of(data, torch.float64).tolist()]

    def scale(self, placeholders: Sequence[Tensor], factor: float) -> None:
        """Multiply this rank's pieces of these gradients."""
        for piece in self._pieces(placeholders):
            piece.mul_(factor)

    def unscale(
        self,
        placeholders: Sequence[Tensor],
        whole: Sequence[Tensor],
        found_inf: Tensor,
        inverse_scale: Tensor,
    ) -> None:
        """As ``scale``, by a ``GradScaler``; ``found_inf`` is 1 on all ranks if a piece is not finite on one.
        Collective: 4 bytes."""
        if pieces := list(self._pieces(placeholders)):
            torch._amp_foreach_non_finite_check_and_unscale_(pieces, found_inf, inverse_scale)
        found = self.rendezvous(UNSCALE, "the check of gradients for what is not finite", [int(found_inf)])
        found_inf.fill_(max(words[0] for words in found))

    def discard(self, placeholders: Sequence[Tensor]) -> None:
        """The parameters of these gradients have none any more."""
        gone = set(map(id, placeholders))
        for i, stands_in in enumerate(self._placeholders):
            if id(stands_in) in gone and self.parameters[i].grad is stands_in:
                self.parameters[i].grad = None

    def used(self, placeholders: Sequence[Tensor]) -> None:
        """What makes the optimizer's step (``update``) looks whether there are gradients."""

    def _first_guess(self, i: int) -> int | None:
        """Once in a backward, as autograd has it: to wait for the end would need memory for all gradients."""
        return None if i in self._unsteady or self.is_nested() else 1

    @property
    def _num_exchanges(self) -> int:
        return len(self._rounds) * len(self.buckets)

    def _bucket(self, i: int) -> SlicedBucket:
        bucket = self.place[i]
        assert isinstance(bucket, SlicedBucket)
        return bucket

    def _make_buckets(self) -> list[SlicedBucket]:
        """One per space: those of the last layers first, whose gradients come first; the root's last."""
        positions = [[self._position[id(p)] for p in space.parameters] for space in self.spaces]
        order = sorted(range(len(self.spaces)), key=lambda k: -min(positions[k]))
        how = self.ranks.shard_group.rank, self.ranks.replicate_group, self.options.nodes
        return [SlicedBucket.of(self.spaces[k], i, positions[k], *how) for i, k in enumerate(order)]

    def _pieces(self, placeholders: Iterable[Tensor]) -> Iterator[Tensor]:
        """This rank's pieces of the gradients that ``placeholders`` stand for."""
        wanted = set(map(id, placeholders))
        for space in self.spaces:
            for held in space.held:
                i = self._position[id(held.parameter)]
                if id(self._placeholders[i]) in wanted:
                    yield self._bucket(i).piece(held)

    def _open(self, bucket: Bundle) -> None:
        """Nothing: gradients wait in ``.grad`` until it is their unit's turn."""

    def _settle(self, i: int) -> None:
        bucket = self._bucket(i)
        number = self._buffer_number(bucket.index - self.turns.num_launched)
        if number is not None:
            view = bucket.view_of(i, self.reduce_scatter.staging.buffer(number, bucket))
            self.gradients.settle(i, view, final=True)

    def _buffer_number(self, ahead: int) -> int | None:
        """Of the staging memory for the unit that comes ``ahead`` units from now; None if it is in use."""
        num_buffers, unit = self.reduce_scatter.staging.num_buffers, len(self._works) + ahead
        if ahead >= num_buffers or (unit >= num_buffers and not self._works[unit - num_buffers].done()):
            return None
        return unit % num_buffers

    def _close(self, bucket: Bundle) -> None:
        assert isinstance(bucket, SlicedBucket)
        bucket.ready_ns = bucket.ready_ns or time.monotonic_ns()
        if self.closed is not None:
            self.closed(bucket.space)
        self.turns.ready(bucket)

    def _stage(self, bucket: Bundle) -> Work:
        """It is the turn of ``bucket``: its gradients move out of ``.grad``, and leave."""
        assert isinstance(bucket, SlicedBucket)
        staging = self.reduce_scatter.staging
        number = len(self._works) % staging.num_buffers
        if len(self._works) >= staging.num_buffers:
            before = self._works[-staging.num_buffers]
            if not before.done():
                with self.recorder.span(GRADIENT_SYNC, lane="host"):
                    before.wait()
            before.wait()
        carried = self._carry(bucket)
        buffer = staging.buffer(number, bucket)
        self.gradients.land(bucket, buffer)
        bucket.nodes.clear(buffer)  # other units have been there
        if self.observer is not None:
            self.observer(self._staged_leaf, bucket, buffer)
        self.gradients.take(bucket)
        for slot in bucket.slots:
            slot.present = slot.present or slot.position in self._carried
        return self._send(bucket, carried)

    def _carry(self, bucket: SlicedBucket) -> list[slice]:
        """The parts of this rank's slice that count for every micro-batch; their placeholders go."""
        for slot in bucket.slots:
            if self._stands_in(slot.position):
                self.parameters[slot.position].grad = None
                self._carried.add(slot.position)
        if not self._carried:
            return []
        own = [held for held in bucket.space.held if self._position[id(held.parameter)] in self._carried]
        return [bucket.range_of(held) for held in own]

    def _forget_discarded(self) -> None:
        """What was carried is gone where ``.grad`` is None by now: ``zero_grad()`` discards all of a sum."""
        self._carried = {
            i for i in self._carried if i in self._put_aside or self.parameters[i].grad is not None
        }

    def _send(self, bucket: SlicedBucket, carried: Sequence[slice] = ()) -> Work:
        assert self.plan is not None
        turn = len(self._works) // len(self.buckets)
        number = len(self._works) % self.reduce_scatter.staging.num_buffers
        num_carried = sum(slot.position in self._carried for slot in bucket.slots)
        header = self._header(bucket, self.plan, turn, num_carried)
        computed, rounds, by_group = self.stream.computed(), self._rounds, self._by_group

        def run() -> None:
            with self.stream.after(computed):
                is_last = turn + 1 == len(rounds)
                self.reduce_scatter.run_round(
                    bucket, number, header, rounds[turn], by_group, is_last=is_last, carried=carried
                )

        self._works.append(self.lane.submit(f"the exchange of unit {bucket.index} in round {turn}", run))
        return self._works[-1]

    def _stands_in(self, i: int) -> bool:
        """Whether the ``.grad`` of parameter i stands for a gradient in slices.

        Raises:
            ValueError: it did, until it was written to.
        """
        gradient = self.parameters[i].grad
        if gradient is None or gradient is not self._placeholders[i]:
            return False
        if was_written(gradient):
            raise ValueError(
                f"the .grad of {self.names[i]!r} was written to, and only stands for a gradient in slices: "
                "discard gradients with zero_grad(set_to_none=True), scale them with instep.clip_grad_norm_"
            )
        return True

    def _coming(self, i: int, gradient: Tensor) -> None:
        """Autograd is about to accumulate into the ``.grad`` of parameter i, which a placeholder cannot take.

        Or ``autograd.grad`` asks for the gradient: then nothing is accumulated, and it has to be put back.
        """
        if self.parameters[i].grad is None:
            self._carried.discard(i)
        elif self._stands_in(i):
            self.parameters[i].grad = None
            self._carried.add(i)
            if not self._put_aside:
                torch.autograd.Variable._execution_engine.queue_callback(self._put_back)
            self._put_aside.add(i)

    def _put_back(self) -> None:
        """Backward has ended: placeholders return where nothing has come."""
        aside, self._put_aside = self._put_aside, set()
        for i in aside & self._carried:
            if self.parameters[i].grad is None and self.plan is None:
                self._carried.discard(i)
                if not self.local[i]:  # else one has come, and is gone again with all of the sum
                    self.parameters[i].grad = self._placeholders[i]

    def _require_unmoved(self) -> None:
        for space in self.spaces:
            if (parameter := space.moved()) is not None:
                raise ValueError(
                    f"parameter {self.names[self._position[id(parameter)]]!r} has other memory than when it "
                    "was sharded (module.to(), .data = ..., vector_to_parameters, parametrizations): convert "
                    "first, then call fully_shard; change values in place, p.copy_(values) under no_grad()"
                )


class InUnitOrder:
    """The strategy of slices: the units of every micro-batch leave in plan order, whichever is whole first.

    For each micro-batch ``begin``, then ``ready``, then ``finish``. The last unit waits for ``finish``: it is
    the rank's word that the micro-batch has gone well. Nothing waits here for what was launched.
    """

    overlaps = True

    def __init__(self, launch: Callable[[Bundle], Work]) -> None:
        self.launch = launch
        self.buckets: Sequence[Bundle] = ()
        self.num_launched = 0
        self._waiting: set[int] = set()

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]:
        """All in one: what travels together is cut by the module's units instead."""
        return [list(order)]

    def begin(self, buckets: Sequence[Bundle]) -> None:
        self.buckets = buckets
        self.num_launched = 0
        self._waiting.clear()

    def ready(self, bucket: Bundle) -> None:
        """Launch ``bucket``, and those that were waiting for it, but for the last."""
        self._waiting.add(bucket.index)
        while self.num_launched in self._waiting and self.num_launched + 1 < len(self.buckets):
            self._launch_next()

    def finish(self) -> None:
        """Launch what has not been; all are whole."""
        while self.num_launched < len(self.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        self.num_launched += 1
        self.launch(self.buckets[self.num_launched - 1])
