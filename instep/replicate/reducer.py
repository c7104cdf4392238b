"""From gradients that appear one by one to reduced gradients: what all strategies share.

Autograd says when a gradient has been accumulated, but not when it is whole: a parameter that is used in
two checkpointed segments, or in two backwards of one micro-batch, is accumulated twice. Sending it after
the first time would lose the rest without an error. So the first leaf of all is reduced at the end of
backward, and its accumulations are counted; from then on a gradient is whole after as many. Whatever does
not come to its count is reduced at the end of backward, and what goes beyond its count after it has left
is an error, never a wrong sum.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.events import Recorder
from instep.mesh.device import Stream
from instep.mesh.group import Group
from instep.ordered.buckets import Bucket, Caps, make_buckets
from instep.ordered.exchange import Exchange
from instep.ordered.header import VERSION, Header
from instep.replicate.gradients import Gradients
from instep.replicate.naive import Naive
from instep.replicate.unused import describe
from instep.work import Lane, Work


@dataclass(frozen=True)
class Options:
    """How to reduce: what a user chose once for the wrapper."""

    strategy: type[Naive]
    caps: Caps = 25
    ordered: bool = True
    unused: bool | None = None  # parameters without a gradient: True allows, None warns once, False raises


@dataclass(frozen=True)
class Plan:
    """Who contributes which leaves to one reduction. ``leaves[r]`` belong to rank r; G in all."""

    declared: bool
    num_leaves: int
    leaves: Sequence[Sequence[int]]


class Reducer:
    """Reduces the gradients of ``parameters`` over ``group``, which nobody else uses, leaf by leaf.

    A step in time order: ``begin``; for each leaf ``open_leaf``, ``arrived`` from the parameters' hooks,
    ``close_leaf``; then ``finish``, after which every ``.grad`` is the reduced gradient. ``leave`` instead
    of ``finish`` tells the other ranks that this one gives the step up, and drops its gradients.

    ``local[i]``: ``.grad`` of parameter i holds something that no exchange has seen. ``sparse`` are the
    positions of the parameters whose ``.grad`` shall be sparse; they travel dense.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        group: Group,
        recorder: Recorder,
        options: Options,
        sparse: Collection[int] = (),
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.group = group
        self.recorder = recorder
        self.options = options
        self.lane = Lane(f"instep exchange, rank {group.rank}", inline=group.size == 1)
        self.strategy = options.strategy(self._launch)
        self.exchange = Exchange(group, recorder, ordered=options.ordered, max_parameters=len(self.names))
        self.stream = Stream(self.parameters[0].device if self.parameters else torch.device("cpu"))
        self.steps = 0  # optimizer steps so far
        self.exchanges = 0  # reductions since the last one
        self.given_up = False  # the last one of them
        self.local = [False] * len(self.names)
        self.plan: Plan | None = None
        self.leaf: int | None = None
        self.observer: Callable[[int, Bucket], None] | None = None  # is shown each leaf in a bucket, whole
        self._seen: list[int] = []  # parameters in the order of their first gradient
        self._expected: list[int | None] = [None] * len(self.names)  # None: only at the end of backward
        self._unsteady: set[int] = set()
        self.gradients = Gradients(self.names, self.parameters, sparse)
        self._reordered = not (options.strategy.overlaps and names) or group.size == 1
        self._warned_unused = False
        # Backward computes gradients in about the reverse of the order in which layers were registered.
        self._make_buckets(list(reversed(range(len(self.names)))))

    def begin(self, plan: Plan, weight: Callable[[], int]) -> None:
        """A reduction begins. ``weight()`` is asked for this rank's sum of weights when buckets leave.

        Raises:
            PeerLost: the group has lost a rank before; what it still owes would be paired with new exchanges.
        """
        self.leave()  # the reduction before, if its backward raised
        self.lane.drain()
        if isinstance(lost := self.lane.failed, PeerLost):
            raise PeerLost(
                f"{lost}. This group is lost: go on over another one, with model.rebind(process_group)",
                ranks=lost.ranks,
                operation=lost.operation,
            )
        if self.lane.failed is not None:
            self.lane.reset()
        self.plan, self._declared = plan, plan.declared
        self._weight = weight
        for bucket in self.buckets:
            bucket.begin(plan.num_leaves, self.gradients.num_attached(bucket))
        self.strategy.begin(self.buckets)

    def open_leaf(self, leaf: int, *, last: bool) -> None:
        """Gradients that arrive from now on belong to ``leaf``; after the ``last`` one buckets may leave."""
        self.leaf, self._last = leaf, last
        self._counts = [0] * len(self.names)
        self.gradients.open_leaf()
        for bucket in self.buckets:
            bucket.leaf = bucket.counter.open()
            bucket.pending = len(bucket.slots)

    def arrived(self, i: int) -> None:
        """Autograd has accumulated into the ``.grad`` of parameter i."""
        self.local[i] = True
        if self.leaf is None:
            return
        if not self._reordered and self._counts[i] == 0 and i not in self._seen:
            self._seen.append(i)
        self._counts[i] += 1
        self.gradients.came(i, final=self._declared)
        expected = self._expected[i]
        if expected is None or self._counts[i] < expected or not self.strategy.overlaps:
            return
        bucket = self.place[i]
        if bucket.leaf is None:
            raise self._late(i, expected)
        if self._counts[i] == expected:
            bucket.pending -= 1
            if bucket.pending == 0:
                self._close(bucket)

    def close_leaf(self) -> None:
        """The leaf's backward has ended: what has not been whole until now, is."""
        for bucket in self.buckets:
            if bucket.leaf is not None:
                self._close(bucket)
        self.leaf = None
        self._learn()

    def finish(self) -> None:
        """All leaves of this rank are closed: wait for the exchanges, and set every ``.grad``.

        Raises:
            Desync, PeerLost: as ``Exchange.run``.
            ValueError: a parameter got no gradient, and unused parameters are forbidden.
        """
        assert self.plan is not None
        for bucket in self.buckets:
            if not bucket.counter.roots and not bucket.launched:
                self.strategy.ready(bucket)  # a rank without leaves
        with self.recorder.span("exposed", lane="communication"):
            self.strategy.finish()
            if not self._reordered:
                self._reorder()
        self._report_unused()
        for bucket in self.buckets:
            for k, slot in enumerate(bucket.slots):
                if any(present[k] for present in bucket.presence):
                    self.gradients.attach(bucket, slot, whole=True)
        self.local = [False] * len(self.names)
        self.exchanges += 1
        self.given_up = False
        self.plan = None
        if self._next_order is not None:
            self._make_buckets(self._next_order)

    def leave(self) -> None:
        """Give the reduction up, if one is under way: let the other ranks know, and drop every ``.grad``.

        Some of the gradients may be reduced by now, some are whole and some are not: no sum for anybody.
        """
        if self.plan is None:
            return
        plan, self.plan, self.leaf = self.plan, None, None
        following = next((bucket for bucket in self.buckets if not bucket.launched), None)
        if following is not None and self.group.size > 1:
            header = self._header(following, plan, 1)
            self.lane.submit("leaving a step", lambda: self.exchange.leave(header, "leaving a step"))
        self.exchanges += 1
        self.given_up = True
        self.gradients.drop()
        self.local = [False] * len(self.names)
        self._make_buckets(self._order)  # the lane may still be writing to the old ones

    def stepped(self) -> None:
        """An optimizer has used the gradients."""
        self.steps += 1
        self.exchanges = 0

    def _make_buckets(self, order: list[int]) -> None:
        self._order = order
        self._next_order: list[int] | None = None
        groups = self.strategy.group(self.parameters, order, self.options.caps)
        self.buckets = make_buckets(
            self.parameters,
            groups,
            self.group.size,
            ordered=self.options.ordered,
            allocate=self.group.allocate,
        )
        self.place = {slot.position: bucket for bucket in self.buckets for slot in bucket.slots}

    def _close(self, bucket: Bucket) -> None:
        """The open leaf is whole: bring it into the bucket and merge it; after the last one, let it go."""
        assert bucket.leaf is not None and self.leaf is not None and self.plan is not None
        self.gradients.land(bucket, bucket.leaf)
        if self.observer is not None:
            self.observer(self.leaf, bucket)
        bucket.counter.push(self.leaf, bucket.leaf)
        bucket.leaf = None
        if self.plan.declared:
            self.gradients.take(bucket)
        else:
            for slot in bucket.slots:
                if slot.present:
                    self.gradients.attach(bucket, slot, whole=False)
        if self._last:
            self.strategy.ready(bucket)

    def _launch(self, bucket: Bucket) -> Work:
        assert self.plan is not None
        plan, computed = self.plan, self.stream.computed()
        header = self._header(bucket, plan, self._weight())
        bucket.launched = True

        def run() -> None:
            with self.stream.after(computed):
                self.exchange.run(bucket, header, plan.leaves)

        return self.lane.submit(f"the exchange of bucket {bucket.index}", run)

    def _header(self, bucket: Bucket, plan: Plan, weight: int) -> Header:
        return Header(
            version=VERSION,
            declared=int(plan.declared),
            step=self.steps,
            exchange=self.exchanges,
            bucket=bucket.index,
            num_elements=bucket.num_elements,
            num_leaves=plan.num_leaves,
            num_own=len(plan.leaves[self.group.rank]),
            weight=weight,
            ready_ns=time.monotonic_ns(),
            left=0,
        )

    def _learn(self) -> None:
        """Compare the accumulations of the closed leaf with what was expected."""
        for i, count in enumerate(self._counts):
            expected = self._expected[i]
            if count == 0 or count == expected:
                continue
            if expected is None and i not in self._unsteady:
                self._expected[i] = count
            else:
                self._unsteady.add(i)
                self._expected[i] = None

    def _late(self, i: int, expected: int) -> Desync:
        self._unsteady.add(i)
        self._expected[i] = None
        return Desync(
            f"rank {self.group.global_rank}: parameter {self.names[i]!r} received gradient number "
            f"{self._counts[i]} of this backward after its bucket had left; so far there were {expected} per "
            "backward. If the model uses it a varying number of times, pass strategy='flat', which sends "
            "nothing before backward has ended"
        )

    def _reorder(self) -> None:
        """Adopt the order in which rank 0 saw the gradients, once, for the steps to come."""
        self._reordered = True
        seen = set(self._seen)
        order = torch.tensor(
            self._seen + [i for i in self._order if i not in seen], dtype=torch.int64, device="cpu"
        )
        work = self.lane.submit(
            "the broadcast of the bucket order",
            lambda: self.group.broadcast(order, "the broadcast of the bucket order"),
        )
        work.wait()
        if order.tolist() != self._order:
            self._next_order = order.tolist()

    def _report_unused(self) -> None:
        """Warn once, or raise, about parameters that some rank had no gradient for, though it had others."""
        if self.options.unused or (self.options.unused is None and self._warned_unused):
            return
        unused = describe(self.buckets, self.names, self.group.ranks)
        if not unused:
            return
        message = f"no gradient came for {unused} in step {self.steps}"
        if self.options.unused is False:
            raise ValueError(
                f"{message}, and find_unused_parameters=False forbids it: pass True or freeze them"
            )
        self._warned_unused = True
        if self.group.rank == 0:
            warnings.warn(
                f"{message}: where other ranks had one, zero was averaged in; where none had, .grad was left "
                "alone. Pass find_unused_parameters=True if this is meant",
                stacklevel=2,
            )
