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
import weakref
import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from instep.events import GRADIENT_SYNC, Recorder
from instep.net.lane import Work
from instep.reduce.buckets import Bundle
from instep.reduce.gradient_shard import GradientShard, gradient_shard
from instep.reduce.header import UNSCALE, Header
from instep.reduce.node_format import IN_FLOAT32, NodeFormat
from instep.reduce.owners import GradientPeers, entry
from instep.shard import checks
from instep.shard.gather import Gathers, UnitHooks
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.reduce_scatter import NUM_BUFFERS, ReduceScatter, SlicedBucket, allocate_staging
from instep.shard.round_plan import Round, deal, plan_rounds, ranges
from instep.shard.shard_groups import ShardRanks
from instep.shard.unit import Unit
from instep.step.reduction import Reduction, ReductionOptions, StepPlan


class SliceReducer(Reduction, GradientPeers):
    """Reduces the gradients of whole ``units`` to one slice per rank of a shard group.

    ``parameters`` are the whole ones, whose ``.grad`` autograd fills, micro-batch by micro-batch;
    ``optimizer_parameters`` the shards, which have the reduced gradient after ``finish``. One that is there
    already when a reduction begins is added to.

    A gradient is taken for whole when it has come once, until it is known better: another one of the same
    micro-batch is then an error, unless it comes from a nested backward. ``overlap=False`` waits for the end
    of the micro-batch.
    """

    sharded = cut = overlaps = True
    late_fix = (
        "or several times in one micro-batch, pass overlap=False to fully_shard, which sends nothing before "
        "the micro-batch has ended, and needs memory for all of its gradients"
    )
    lost_fix = "close() the module, and shard one with a state that was kept over another group"
    changes: ClassVar[tuple[str, ...]] = (*Reduction.changes, "_update_digest", "_unreduced")
    buckets: list[SlicedBucket]

    def __init__(
        self,
        names: Sequence[str],
        units: Sequence[Unit],
        ranks: ShardRanks,
        recorder: Recorder,
        gathers: Gathers,
        hooks: UnitHooks,
        *,
        unused: bool | None = None,
        overlap: bool = True,
        nodes: NodeFormat = IN_FLOAT32,
    ) -> None:
        self.units, self.ranks, self._gathers, self._hooks = list(units), ranks, gathers, hooks
        by_name = {
            name: pair
            for unit in units
            for name, *pair in zip(unit.names, unit.whole, unit.parameters, strict=True)
        }
        how = type(self)  # its own strategy: units leave in plan order, whichever is complete first
        options = ReductionOptions(how, unused=unused, nodes=nodes)
        super().__init__(names, [by_name[name][0] for name in names], ranks.whole, recorder, options)
        self.groups = ranks.groups
        self.optimizer_parameters = [by_name[name][1] for name in names]
        if ranks.shard_group.size > 1:
            for p in self.optimizer_parameters:
                entry(p).peers = weakref.ref(self)
        self._overlaps = overlap
        self._reordered = True  # units leave in the order in which they were made, from the last to the root
        # One per unit: those of the last layers first, whose gradients come first; the root's last.
        position = {id(p): i for i, p in enumerate(self.parameters)}
        positions = [[position[id(p)] for p in unit.whole] for unit in units]
        order = sorted(range(len(units)), key=lambda k: -min(positions[k]))
        self.buckets = [SlicedBucket(units[k], i, positions[k], ranks, nodes) for i, k in enumerate(order)]
        self.place = {slot.position: bucket for bucket in self.buckets for slot in bucket.slots}
        self.exchange = self.reduce_scatter = ReduceScatter(
            ranks.whole,
            recorder,
            ordered=True,
            max_parameters=max([len(b.slots) for b in self.buckets], default=0),
        )
        self._num_staged = NUM_BUFFERS if ranks.shard_group.size > 1 else 1
        self._staging = allocate_staging(self.buckets, ranks.shard_group, self._num_staged)
        names_of = {id(p): name for p, name in zip(self.optimizer_parameters, self.names, strict=True)}
        held = [(names_of[id(x.parameter)], x.tensor) for unit in self.units for x in unit.held]
        num_ranks, num_slices = self.group.size, ranks.shard_group.size
        self._watch_over(held.copy, [range(first, num_ranks, num_slices) for first in range(num_slices)])
        self._rounds: tuple[Round, ...] = ()
        self._by_group: Sequence[range] = ()  # the leaves of this reduction
        self._staged_leaf = 0  # what goes into staging memory is of this leaf
        self._works: list[Work] = []  # of this reduction, one per unit and round
        self._num_launched = 0  # units of the open micro-batch
        self._waiting: set[int] = set()  # units that are complete, by number
        self._num_leaves_closed = 0
        # By position: a shard's ``.grad`` while no_sync keeps a gradient, and whether it stands for that.
        self._unreduced: dict[int, tuple[GradientShard, bool]] = {}
        self._update_digest = 0  # of the optimizers' steps and of writes to shards, on all ranks alike
        self.settled()

    def settled(self) -> None:
        """Writes to shards until now were the same on all ranks."""
        self._versions = [p._version for p in self.optimizer_parameters]

    def assign(self, num_leaves: int) -> StepPlan:
        ranks = self.ranks
        leaves = deal(num_leaves, ranks.shard_group.size, ranks.num_replicas, self.shift)
        return StepPlan(True, num_leaves, tuple(leaves))

    def refusal(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, ShardedOptimizer):
            return None
        problem = checks.why_not_on_shards(optimizer, self.group.size)
        return None if problem is None else f"is sharded: {problem}"

    def steps_now(self, optimizer: Optimizer) -> None:
        super().steps_now(optimizer)
        if self.group.size > 1 and not isinstance(optimizer, ShardedOptimizer):
            checks.guard_state(optimizer)
        step = repr(checks.describe_step(optimizer.param_groups))
        self._update_digest = zlib.crc32(step.encode(), self._update_digest)

    def stepped(self) -> None:
        increment_version(self.optimizer_parameters)  # fused optimizers write past torch's count of writes
        self.settled()
        super().stepped()

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        if plan.declared:  # no forward has begun
            self._gathers.begin_step()
            self.drop_discarded()
        for i in self._discarded():  # into what is still here, autograd has accumulated by now
            raise ValueError(
                f"the gradient of {self.names[i]!r} was kept under no_sync and discarded by zero_grad(), "
                "and a backward of an earlier forward was added to it: discard before the forward"
            )
        for i, (_, is_placed) in self._unreduced.items():
            if is_placed:
                self.optimizer_parameters[i].grad = None
        self._unreduced.clear()
        before = self._versions
        self.settled()
        if self._versions != before:  # writes since the last step, of which all ranks have to make the same
            counts = [now - then for now, then in zip(self._versions, before, strict=True)]
            self._update_digest = zlib.crc32(repr(counts).encode(), self._update_digest)
        for i, p in enumerate(self.optimizer_parameters):
            if p.grad is not None:  # added to; it may lie where the new one will
                self._update_digest = zlib.crc32(b"%d" % i, self._update_digest)
                self._set_gradient(i, p.grad.detach().clone())
        ranks = self.ranks
        placed = plan.num_leaves, ranks.shard_group.size, ranks.num_replicas
        shift = self.shift if plan.declared else 0
        self._rounds = plan_rounds(*placed, ranks.replica, shift)
        self._by_group = ranges(*placed, shift)
        self._works, self._num_leaves_closed = [], 0
        for bucket in self.buckets:
            bucket.num_kept = 0
            for slot in bucket.slots:
                slot.present = False
        self._num_launched = len(self.buckets)  # until a micro-batch is opened

    def open_leaf(self, leaf: int, *, last: bool) -> None:
        self._num_launched = 0
        self._waiting.clear()
        self._staged_leaf = leaf  # also when it is closed: its last unit leaves after that
        super().open_leaf(leaf, last=last)

    def arrived(self, i: int, *, settles: bool = True) -> None:
        super().arrived(i, settles=settles)
        if self.leaf is None and i not in self._unreduced:
            p = self.optimizer_parameters[i]
            is_placed = p.grad is None
            if p.grad is None:
                self._set_gradient(i, torch.zeros_like(p.detach()))
            if isinstance(p.grad, GradientShard):
                p.grad.instep_is_zeroed = False
                self._unreduced[i] = p.grad, is_placed

    def drop_discarded(self) -> None:
        """What ``no_sync`` has kept goes where ``zero_grad()`` has been called since."""
        for i in self._discarded():
            self.parameters[i].grad = None
            self.local[i] = False
            del self._unreduced[i]

    def _discarded(self) -> list[int]:
        return [
            i
            for i, (gradient, _) in self._unreduced.items()
            if self.optimizer_parameters[i].grad is not gradient or gradient.instep_is_zeroed
        ]

    def close_leaf(self) -> None:
        if self._declared:
            self._gathers.follow()  # before this rank waits for ranks that still gather
        self._num_leaves_closed += 1
        super().close_leaf()
        if not self._last:
            self._launch_all()

    def finish(self) -> None:
        """All micro-batches of this rank are closed: wait for the exchanges, and set every ``.grad``.

        Raises:
            Desync, PeerLost: as ``Exchange.run``.
            ValueError: a parameter got no gradient, and unused parameters are forbidden.
        """
        self._launch_all()
        for turn in self._rounds[self._num_leaves_closed :]:  # in which this rank has no micro-batch
            if turn.senders:
                self._gathers.follow()
            for bucket in self.buckets:
                self._send(bucket)
        with self.recorder.span(GRADIENT_SYNC, lane="host"):
            for work in self._works:
                work.wait()
            self._gathers.settle()
        self._exchange_statistics()
        self._report_unused()
        for bucket in self.buckets:
            for k in bucket.present_on_some():
                i = bucket.slots[k].position
                if (before := self.optimizer_parameters[i].grad) is None:
                    self._set_gradient(i, bucket.pieces[k])
                else:
                    before.detach().add_(bucket.pieces[k])
        self._succeeded()

    def leave(self) -> None:
        if self.plan is not None:
            self._gathers.leave(followed=self.plan.declared)
            super().leave()

    def _next_header(self, plan: StepPlan) -> Header | None:
        if len(self._works) == len(self._rounds) * len(self.buckets):
            return None
        turn, index = divmod(len(self._works), len(self.buckets))
        return self._header(self.buckets[index], plan, turn)

    def _reset(self) -> None:
        self._works = []  # one that has failed holds all that it worked on
        self.drop_gradients()

    def abandon(self) -> None:
        super().abandon()
        self.drop_gradients()
        self.buckets, self._works = [], []

    def interrupted(self) -> None:
        self._gathers.leave()

    def backward_ended(self) -> None:
        self._hooks.ended()

    @property
    def scratch(self) -> list[Tensor]:
        """The memory that reducing takes, beside that of the reduced gradients."""
        kept = [x for bucket in self.buckets for x in bucket.kept]
        return [*kept, *self._staging, *self.exchange.scratch]

    def square_sums(self, own: Sequence[float]) -> list[float]:
        """As ``GradientPeers`` says; shard groups have the same."""
        return self.all_square_sums(own if self.ranks.replica == 0 else ())

    def all_found_inf(self, found_inf: Tensor) -> None:
        """``found_inf`` is 1 on all ranks if it is on one. Collective: 4 bytes."""
        found = self.rendezvous(UNSCALE, "the check of gradients for what is not finite", [int(found_inf)])
        found_inf.fill_(max(words[0] for words in found))

    def _first_guess(self, i: int) -> int | None:
        """Once in a backward, as autograd has it: to wait for the end would need memory for all gradients."""
        return None if i in self._unsteady or self.is_nested() else 1

    def _set_gradient(self, i: int, values: Tensor) -> None:
        is_part = self.ranks.shard_group.size > 1
        self.optimizer_parameters[i].grad = gradient_shard(
            values, self.names[i], weakref.ref(self), is_part=is_part
        )

    def drop_gradients(self) -> None:
        """Neither a shard nor a whole parameter has a gradient any more."""
        self.gradients.drop()
        self._unreduced.clear()
        for p in self.optimizer_parameters:
            p.grad = None
        self.local = [False] * len(self.names)

    def _header(self, bucket: Bundle, plan: StepPlan, round: int = 0) -> Header:
        return super()._header(bucket, plan, round)._replace(update_digest=self._update_digest)

    def _settle(self, i: int) -> None:
        bucket = self.place[i]
        assert isinstance(bucket, SlicedBucket)
        ahead = bucket.index - self._num_launched  # units until it is the turn of this one
        number = len(self._works) + ahead
        if ahead < self._num_staged and (
            number < self._num_staged or self._works[number - self._num_staged].done()
        ):
            view = bucket.view_of(i, bucket.staged[number % self._num_staged])
            self.gradients.settle(i, view, final=True)

    def _close(self, bucket: Bundle) -> None:
        """Launch ``bucket`` and what has waited for it, in plan order, but for the last of the micro-batch.

        The last one waits until the micro-batch is closed: it is the rank's word that all has gone well.
        """
        assert isinstance(bucket, SlicedBucket)
        bucket.ready_ns = bucket.ready_ns or time.monotonic_ns()
        self._hooks.closed.add(bucket.unit.number)
        self._waiting.add(bucket.index)
        while self._num_launched in self._waiting and self._num_launched + 1 < len(self.buckets):
            self._launch_next()

    def _launch_all(self) -> None:
        """All units of the micro-batch are complete."""
        while self._num_launched < len(self.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        """The gradients of the next unit move out of ``.grad``, and leave."""
        bucket = self.buckets[self._num_launched]
        self._num_launched += 1
        if len(self._works) >= self._num_staged:
            before = self._works[-self._num_staged]
            if not before.done():
                with self.recorder.span(GRADIENT_SYNC, lane="host"):
                    before.wait()
            before.wait()
        buffer = bucket.staged[len(self._works) % self._num_staged]
        self.gradients.land(bucket, buffer)
        bucket.nodes.clear(buffer)  # other units have been there
        if self.observer is not None:
            self.observer(self._staged_leaf, bucket, buffer)
        self.gradients.take(bucket)
        self._send(bucket)

    def _send(self, bucket: SlicedBucket) -> None:
        assert self.plan is not None
        turn = len(self._works) // len(self.buckets)
        number = len(self._works) % self._num_staged
        header = self._header(bucket, self.plan, turn)
        computed, round_ = self.stream.computed(), self._rounds[turn]
        by_group = self._by_group if turn + 1 == len(self._rounds) else None

        def run() -> None:
            with self.stream.after(computed):
                self.reduce_scatter.run_round(bucket, number, header, round_, by_group)

        self._works.append(self.lane.submit(f"the exchange of unit {bucket.index} in round {turn}", run))
