"""From the gradients of a rank's micro-batches to those that every rank has: what all strategies share."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.comm.cost import busy_share
from instep.events import GRADIENT_SYNC, Recorder
from instep.hook import weakly
from instep.net.lane import Work
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket, Bundle, Caps, make_buckets
from instep.reduce.exchange import OrderedAllReduce
from instep.reduce.header import Header
from instep.replicate.auto_cap import AUTO, DEFAULT_MB, MEASURED, WARM_UP, Sample, choose_cap_mb, probing_caps
from instep.replicate.bucketed import Bucketed
from instep.replicate.comm_hook import CommHook
from instep.state.boxes import boxes_of, is_cut
from instep.state.elementwise import why_not_on_boxes
from instep.step.reduction import ONE_GROUP, GradientGroups, Reduction, ReductionOptions, StepPlan
from instep.step.replica_watch import ReplicaWatch

BACKWARDS = ("backward", "weight gradient")


class Reducer(Reduction):
    """Reduces the gradients of ``parameters`` over ``group``, or over ``groups``, leaf by leaf.

    The groups have no other user. After ``finish`` every ``.grad`` is the reduced gradient.
    """

    # The buckets too: the first exchanges may change their order and size.
    changes: ClassVar[tuple[str, ...]] = (
        *(*Reduction.changes, "buckets", "place", "_order", "_next_order"),
        *("caps", "_samples", "_with_large"),
    )
    buckets: list[Bucket]
    caps: Caps  # of the buckets now

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        group: Group,
        recorder: Recorder,
        options: ReductionOptions,
        groups: GradientGroups = ONE_GROUP,
    ) -> None:
        self._is_cut = any(map(is_cut, parameters))
        if self._is_cut and options.nodes.counts_elements:
            raise ValueError(
                f"nodes={options.nodes} with layers that are cut over ranks: their elements are counted from "
                "the first one of a rank's part, so that gradients would depend on the number of ranks: use "
                "nodes='bfloat16', rounding='nearest'"
            )
        super().__init__(names, parameters, group, recorder, options, groups)
        self.strategy = options.strategy(weakly(self._launch))
        self.exchange = OrderedAllReduce(
            group,
            recorder,
            ordered=options.ordered,
            max_parameters=len(self.names),
            data_ranks=self.data_ranks,
        )
        named = enumerate(zip(self.names, self.parameters, strict=True))
        shared = [one for i, one in named if groups.of.get(i, group).size > 1]
        self._watch_over(shared.copy, self.bundling.alike or [range(group.size)])
        self.comm_hook: CommHook | None = None
        self._awaits = False  # backward has ended: what leaves now is waited for at once
        self._samples: list[Sample] | None = None  # until the size of buckets is chosen
        if not isinstance(options.caps, str):
            self.caps = options.caps
        elif names and group.size > 1 and issubclass(options.strategy, Bucketed):
            self.caps, self._samples = probing_caps, []
        else:
            self.caps = DEFAULT_MB
        # Backward computes gradients in about the reverse of the order in which layers were registered.
        self._make_buckets(list(reversed(range(len(self.names)))))

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        if self.comm_hook is not None:
            self.comm_hook.begin()
        if self._samples is not None:
            self.exchange.flights = []
        for bucket in self.buckets:
            bucket.begin(plan.num_leaves, self.gradients.num_attached, plan.leaves)
        self.strategy.begin(self.buckets)
        self._awaits = False

    def finish(self) -> None:
        """All leaves of this rank are closed: wait for the exchanges, and set every ``.grad``.

        Raises:
            Desync, PeerLost: as ``OrderedAllReduce.run``.
            ValueError: a parameter got no gradient, and unused parameters are forbidden.
        """
        assert self.plan is not None
        for bucket in self.buckets:
            if not bucket.counter.roots and not bucket.launched:  # a rank without leaves
                bucket.ready_ns = time.monotonic_ns()
                self.strategy.ready(bucket)
        with self.recorder.span(GRADIENT_SYNC, lane="host"):
            self._awaits = True
            self.strategy.finish()
            if self.comm_hook is not None:
                self.comm_hook.finish(self.group)
            if not self._reordered:
                self._reorder()
            elif self._samples is not None:
                self._measure(self._samples)
        if self.statistics is not None:
            self._exchange_statistics()
        self._report_unused()
        for bucket in self.buckets:
            self.gradients.attach(bucket, bucket.present_on_some(), whole=True)
        self._succeeded()
        if self.compares:
            if (boxes := next(filter(None, map(boxes_of, self.parameters)), None)) is not None:
                boxes.require_same_gradients([*zip(self.names, self.parameters, strict=True)])
            self.compares = False
        if self._next_order is not None:
            self._make_buckets(self._next_order)

    def refusal(self, optimizer: Optimizer) -> str | None:
        """As ``Reduction`` says; a sharded optimizer has checked it."""
        is_plain = self._is_cut and not hasattr(type(optimizer), "__instep_state__")
        return why_not_on_boxes(optimizer) if is_plain else None

    def reduce_by(self, hook: CommHook) -> CommHook:
        """From now on ``hook`` reduces, and what ranks hold is not compared any more.

        Raises:
            ValueError: nodes of the sum tree are to be rounded, or exchanges are to be measured.
        """
        if self.options.caps == AUTO:
            raise ValueError(
                "a communication hook with bucket_cap_mb='auto', which measures the exchanges that a hook "
                "replaces: pass a size in MiB"
            )
        if self.options.nodes.rounds:
            nodes = self.options.nodes.nodes
            raise ValueError(
                f"a communication hook with nodes={nodes!r}, but a hook adds by itself: leave one of them out"
            )
        self.comm_hook = hook
        self.watch = ReplicaWatch(self.group, list, ())
        return hook

    def _next_header(self, plan: StepPlan) -> Header | None:
        following = next((bucket for bucket in self.buckets if not bucket.launched), None)
        return None if following is None else self._header(following, plan)

    def _reset(self) -> None:
        self._make_buckets(self._order)  # the lane may still be writing to the old ones

    def abandon(self) -> None:
        super().abandon()
        self.buckets = []

    def _make_buckets(self, order: list[int]) -> None:
        self._order = order
        self._next_order: list[int] | None = None
        by_group: dict[Group, list[int]] = {}
        for i in order:
            by_group.setdefault(self.bundling.of.get(i, self.group), []).append(i)
        members: list[list[int]] = []
        for positions in by_group.values():
            members += self.strategy.group(self.parameters, positions, self.caps)
        if len(by_group) > 1:  # else they are in the order in which backward completes them
            members.sort(key=lambda its: order.index(its[-1]))
        self.buckets = make_buckets(
            self.parameters,
            members,
            self.group,
            nodes=self.options.nodes,
            groups=self.bundling.of,
        )
        for bucket in self.buckets:
            if bucket.group is not self.group or self.bundling.data_ranks:
                bucket.places = [self.group.ranks.index(rank) for rank in bucket.group.ranks]
        self.place = {slot.position: bucket for bucket in self.buckets for slot in bucket.slots}
        large = {i for i, is_large in enumerate(self.gradients.is_large) if is_large}
        self._with_large = {self.place[i].index for i in large}

    def _settle(self, i: int) -> None:
        bucket = self.place[i]
        assert isinstance(bucket, Bucket) and bucket.leaf is not None and self.plan is not None
        if bucket.adds:
            return
        self.gradients.settle(i, bucket.view_of(i, bucket.leaf), final=self.plan.declared)

    def _close(self, bucket: Bundle) -> None:
        """The open leaf is whole: bring it into the bucket and merge it; after the last one, let it go."""
        assert isinstance(bucket, Bucket) and bucket.leaf is not None
        assert self.leaf is not None and self.plan is not None
        self.gradients.land(bucket, bucket.leaf, adds=bucket.adds)
        if self.observer is not None:
            self.observer(self.leaf, bucket, bucket.leaf)
        bucket.close(self.leaf)
        if self.plan.declared:
            self.gradients.take(bucket)
        elif bucket.index in self._with_large:
            # Small gradients can wait for the exchange, to be attached once.
            is_large = self.gradients.is_large
            large = [k for k, slot in enumerate(bucket.slots) if slot.present and is_large[slot.position]]
            self.gradients.attach(bucket, large, whole=False)
        if self._last:
            bucket.ready_ns = bucket.ready_ns or time.monotonic_ns()
            self.strategy.ready(bucket)

    def _launch(self, bucket: Bucket) -> Work:
        assert self.plan is not None
        plan, stream = self.plan, self.stream
        header = self._header(bucket, plan)
        bucket.launched = True
        name = f"the exchange of bucket {bucket.index}"
        if self.comm_hook is not None:
            return self._hook(self.comm_hook, bucket, header._replace(hooked=1), name)

        run = partial(self.exchange.run, bucket, header)
        if stream.is_used:
            run = partial(stream.run_after, stream.computed(), run)
        # In this thread where it waits anyway: to hand over, and back, takes a turn of the interpreter each.
        return (self.lane.run if self._awaits else self.lane.submit)(name, run)

    def _hook(self, hook: CommHook, bucket: Bucket, header: Header, name: str) -> Work:
        """Let ``hook`` begin with ``bucket``, once all ranks have come to it."""
        agreed = self.lane.run(name, partial(self.exchange.exchange_headers, bucket, header, name))
        agreed.wait()
        hook.start(bucket, self.parameters, is_last=bucket is self.buckets[-1])
        return agreed

    def _reorder(self) -> None:
        """Adopt the order in which rank 0 saw the gradients, once, for the steps to come."""
        self._reordered = True
        seen = self._seen
        order = torch.tensor(
            [*seen, *(i for i in self._order if i not in seen)], dtype=torch.int64, device="cpu"
        )
        name = "the broadcast of the bucket order"
        self.lane.run(name, lambda: self.group.broadcast(order, name)).wait()
        if order.tolist() != self._order:
            self._next_order = order.tolist()

    def _measure(self, samples: list[Sample]) -> None:
        """Keep the times of this reduction; after the last one, adopt the bucket size that rank 0 chooses."""
        took = [event.duration_s for event in self.recorder.so_far() if event.name in BACKWARDS]
        samples.append(Sample(self.exchange.flights or (), took[-1] if took else 0.0))
        if len(samples) < WARM_UP + MEASURED:
            return
        hiding, peers = 0.0, self.group.peers  # a link between hosts, or a GPU, takes no core
        if self.parameters[0].device.type == "cpu" and {peer.host for peer in peers.table} == {peers.me.host}:
            hiding = busy_share(self.group.size, torch.get_num_threads(), len(os.sched_getaffinity(0)))
        size = torch.tensor([choose_cap_mb(samples[WARM_UP:], hiding)], dtype=torch.float64, device="cpu")
        name = "the broadcast of the bucket size"
        self.lane.run(name, lambda: self.group.broadcast(size, name)).wait()
        self.caps, self._next_order = size.item(), self._order
        self._samples = self.exchange.flights = None
