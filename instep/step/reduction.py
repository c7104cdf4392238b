"""From gradients that appear one by one to whole leaves of the sum tree: what all reducers share.

A leaf is the gradient of one micro-batch, or of all that a rank has accumulated where the loop declares none.

Autograd says when a gradient has been accumulated, but not when it is whole: a parameter that is used in
two checkpointed segments, or in two backwards of one micro-batch, is accumulated twice. Sending it after
the first time would lose the rest without an error. So the first leaf of all is reduced at the end of
backward, and its accumulations are counted; from then on a gradient is whole after as many. Whatever does
not come to its count is reduced at the end of backward, and what goes beyond its count after it has left
is an error, never a wrong sum.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.errors import Desync, PeerLost
from instep.events import BATCH_NORM, Recorder, Span
from instep.memory import bytes_of
from instep.net.device import Stream
from instep.net.lane import Lane, Work
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket, Bundle, Caps
from instep.reduce.exchange import OrderedAllReduce
from instep.reduce.header import COMPARE, VERSION, Header
from instep.reduce.node_format import IN_FLOAT32, NodeFormat
from instep.reduce.tree import host_major, rotated
from instep.step.gradients import Gradients
from instep.step.replica_watch import Replica, ReplicaWatch

SHOWN = 8  # unused parameters, in a message
COMPARISON = "the comparison of gradients that no exchange has seen"
Closure: TypeAlias = Callable[[], Any]
Update: TypeAlias = Callable[[Closure | None], Any]
"""Makes a step, with the closure that the optimizer was given, and returns what that has returned."""


class Strategy(Protocol):
    """Which gradients travel together, and when: what the reducer asks of a strategy.

    In a step: ``begin``, ``ready`` for each whole bucket during backward, ``finish`` after it.

    ``overlaps``: buckets are told of as soon as they are whole, not only when backward has ended.
    """

    overlaps: bool

    def __init__(self, launch: Callable[[Bucket], Work]) -> None: ...

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]: ...

    def begin(self, buckets: Sequence[Bucket]) -> None: ...

    def ready(self, bucket: Bucket) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class ReductionOptions:
    """How to reduce: what a user chose once for the wrapper."""

    strategy: type[Strategy]
    caps: Caps = 25
    ordered: bool = True
    unused: bool | None = None  # parameters without a gradient: True allows, None warns, False raises
    check_replicas: bool = True  # whether ranks compare what they hold alike
    nodes: NodeFormat = IN_FLOAT32

    def __post_init__(self) -> None:
        if self.nodes.rounds and not self.ordered:
            raise ValueError(
                f"nodes={self.nodes.nodes!r} with ordered=False, where the backend adds, and no tree: leave "
                "one of them out"
            )


class PostReduceExchange(Protocol):
    """What ranks exchange once all gradients of a reduction have arrived, before any is set."""

    def exchange(self) -> None:
        """Collective, and the others are told if it cannot be done here."""

    def leave(self) -> None:
        """Let the others, who have come to ``exchange``, know that this rank will not."""


@dataclass(frozen=True)
class StepPlan:
    """Who contributes which leaves to one reduction. ``leaves[r]`` belong to rank r; G in all.

    ``step`` is what the random numbers of a declared step are keyed by; the rest is of its ``DataSource``.
    """

    declared: bool
    num_leaves: int
    leaves: Sequence[Sequence[int]]
    step: int = -1
    data_position: int = -1
    data_identity: int = 0


class Reduction(ABC):
    """Counts the gradients of ``parameters`` in, leaf by leaf; subclasses say what becomes of whole ones.

    A step in time order: ``begin``; for each leaf ``open_leaf``, ``arrived`` from the parameters' hooks,
    ``close_leaf``; then ``finish``, after which every gradient is reduced. ``leave`` instead of ``finish``
    tells the other ranks that this one gives the step up, and drops its gradients.

    ``local[i]``: ``.grad`` of parameter i holds something that no exchange has seen. ``place[i]`` is the
    bundle that parameter i travels in. ``changes`` names what a step changes here, beside gradients.
    """

    sharded = False  # every rank gets all of every gradient
    late_fix = "pass strategy='flat', which sends nothing before backward has ended"
    lost_fix = "go on over another one, with model.rebind(process_group)"
    changes: ClassVar[tuple[str, ...]] = (
        "steps",
        "exchanges",
        "given_up",
        "observer",
        "local",
        "_reordered",
        "_seen",
        "_expected",
        "_unsteady",
        "_warned_unused",
        "watch",
    )
    exchange: OrderedAllReduce
    buckets: Sequence[Bundle]  # in the order of their exchanges
    place: dict[int, Bundle]

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        group: Group,
        recorder: Recorder,
        options: ReductionOptions,
        sparse: Collection[int] = (),
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.group = group
        self.recorder = recorder
        self.options = options
        self.lane = Lane(
            f"instep exchange, rank {group.rank}", inline=group.size == 1, profiled_as="exchange"
        )
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.stream = Stream(device, inline=self.lane.inline)
        self.steps = 0  # optimizer steps so far
        self.ends_steps = True  # an optimizer's step ends what is recorded as a step
        self.all_step = True  # every rank's optimizer makes the same step
        self.exchanges = 0  # reductions since the last one
        self.num_reductions = 0  # that have gone well, in all
        self.given_up = False  # the last one of them
        self._update: Span | None = None
        self.local = [False] * len(self.names)
        self.plan: StepPlan | None = None
        self.weight = 1  # this rank's sum of weights, of the micro-batches that have had gradients
        self.shift = 0  # of declared steps: each rank has the share of the one so many after it
        self.leaf: int | None = None
        self.afterwards: PostReduceExchange | None = None  # of this reduction
        self.num_running = 0
        self.buffers = 0  # a checksum of the module's, once the last leaf is closed
        self.input_digest: Callable[[], int] = int  # of the inputs of a declared step
        # Is shown each leaf in a bucket, whole, and the memory that it is in.
        self.observer: Callable[[int, Any, Tensor], None] | None = None
        self.is_nested: Callable[[], bool] = bool  # whether a backward inside another one runs now
        self._overlaps = options.strategy.overlaps
        self._rounds_nodes = options.nodes.rounds
        self._reordered = not (options.strategy.overlaps and names) or group.size == 1
        self._seen: dict[int, None] = {}  # parameters in the order of their first gradient
        self._expected: list[int | None] = [None] * len(self.names)  # None: only at the end of backward
        self._unsteady: set[int] = set()
        self.gradients = Gradients(self.names, self.parameters, sparse)
        self._warned_unused: set[int] = set()  # parameters

    @property
    def watch(self) -> ReplicaWatch:
        """Compares what ranks hold alike, in each exchange."""
        return self._watch

    @watch.setter
    def watch(self, watch: ReplicaWatch) -> None:
        self._watch, self.exchange.compare = watch, watch.compare

    @abstractmethod
    def finish(self) -> None:
        """All leaves of this rank are closed: wait until the gradients are reduced."""

    @abstractmethod
    def leave(self) -> None:
        """Give the reduction up, if one is under way: let the other ranks know, and drop every ``.grad``."""

    def abandon(self) -> None:
        """End here, for good: no rank is told, and memory is free for what goes on in this one's place."""
        self.plan = self.leaf = None
        self.gradients.drop()
        self.place = {}

    @abstractmethod
    def _open(self, bucket: Bundle) -> None:
        """A leaf begins."""

    def _settle(self, i: int) -> None:  # noqa: B027 - it may wait for the others of its bundle
        """A gradient of parameter i has come, of the open leaf; it may be the first of several."""

    @abstractmethod
    def _close(self, bucket: Bundle) -> None:
        """The gradients of ``bucket`` are whole, of the open leaf."""

    def assign(self, num_leaves: int) -> StepPlan:
        """Who computes what in a declared step of ``num_leaves``."""
        num_hosts = self.group.num_hosts
        leaves = host_major(num_leaves, num_hosts, self.group.size // num_hosts)
        return StepPlan(True, num_leaves, rotated(leaves, self.shift))

    @property
    def micro_batch(self) -> int | None:
        """The one whose gradients come now, of a declared step."""
        return self.leaf if self.plan is not None and self.plan.declared else None

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Why ``optimizer`` cannot use these gradients, or None."""
        return None

    def update(self, optimizer: Optimizer) -> Update | None:
        """What makes a step of ``optimizer`` in the place of its own; None where its own can."""
        return None

    def backward_ended(self) -> None:  # noqa: B027 - most have nothing to do
        """Backward has ended, or (it raised) will not."""

    def disable_reporting(self) -> None:
        """From now on: no observer of leaves, no warning of unused parameters, no look at replicas."""
        self.observer = None
        self.watch = ReplicaWatch(self.group, list, ())
        self._warned_unused = set(range(len(self.names)))

    def begin(self, plan: StepPlan) -> None:
        """A reduction begins; ``weight`` becomes this rank's sum of weights before its buckets leave.

        Raises:
            PeerLost: the group has lost a rank before; what it still owes would be paired with new exchanges.
        """
        self.recorder.ensure_step()  # also of a rank that has nothing to compute
        if self.plan is not None:  # of the reduction before: its backward raised
            self.leave()
        if isinstance(lost := self.lane.settle(), PeerLost):
            raise PeerLost(
                f"{lost}. This group is lost: {self.lost_fix}",
                ranks=lost.ranks,
                operation=lost.operation,
            )
        self._watch.begin()
        self.plan, self._declared = plan, plan.declared
        self.weight = 0 if plan.declared else 1
        self.afterwards, self.num_running, self.buffers = None, 0, 0
        self.exchange.buffers, self.exchange.input_digests = [], []
        if self._rounds_nodes:
            # The key of random rounding: a declared step that is repeated must have the same bits.
            key = (1, plan.step, 0) if plan.declared else (0, self.steps, self.exchanges)
            for bucket in self.buckets:
                bucket.begin_nodes(*key)

    def has_zeros(self, positions: Collection[int]) -> None:
        """The gradients at ``positions`` were zeros before this reduction: without others they stay zeros."""
        for bucket in self.buckets if positions else ():
            for slot in bucket.slots:
                slot.present |= slot.position in positions

    def open_leaf(self, leaf: int, *, last: bool) -> None:
        """Gradients that arrive from now on belong to ``leaf``; ``last``: of this rank in this reduction."""
        self.leaf, self._last = leaf, last
        self._counts = [0] * len(self.names)
        self.gradients.came.clear()
        for bucket in self.buckets:
            bucket.ready_ns = 0
            bucket.is_open = True
            bucket.pending = len(bucket.slots)
            self._open(bucket)

    def arrived(self, i: int, *, settles: bool = True) -> None:
        """Autograd has accumulated into the ``.grad`` of parameter i; ``settles``: no hook looks at it."""
        self.local[i] = True
        if self.leaf is None:
            return
        bucket, number = self.place[i], self._counts[i] + 1
        if not self._reordered and number == 1 and i not in self._seen:
            self._seen[i] = None
        if settles and bucket.is_open and self.gradients.is_large[i]:
            self._settle(i)
        self._counts[i] = number
        gradient = self.parameters[i].grad
        if gradient is not None:  # autograd also calls where a function has passed None on
            # In a declared step no hook may edit it from here on.
            self.gradients.came[i] = (gradient, gradient._version) if self._declared else None
        if self._last:
            bucket.ready_ns = time.monotonic_ns()
        if not bucket.is_open:
            raise self._late(i)
        if self._overlaps and number == (self._expected[i] or self._first_guess(i)):
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.is_open = False
                self._close(bucket)

    def close_leaf(self) -> None:
        """The leaf's backward has ended: what has not been whole until now, is."""
        for bucket in self.buckets:
            if bucket.is_open:
                bucket.is_open = False
                self._close(bucket)
        self.leaf = None
        if self._counts != self._expected:
            self._learn()

    def first_unlike(self, gradients: Sequence[tuple[str, Tensor]]) -> int | None:
        """The number of the first of ``gradients``, by name, that not all ranks have alike; None if all do.

        For those that no exchange has seen, because a program has set or reduced them by itself. Collective.

        Raises:
            Desync, PeerLost: other ranks have none to compare.
        """
        mine = [hashlib.sha256(name.encode() + _bytes_of(gradient)).digest() for name, gradient in gradients]
        self.rendezvous(COMPARE, COMPARISON)
        found: list[bytes] = []
        self.lane.run(
            COMPARISON, lambda: found.extend(self.group.all_gather_bytes(b"".join(mine), COMPARISON))
        ).wait()
        unlike = (i for i in range(len(mine)) if len({its[32 * i : 32 * i + 32] for its in found}) > 1)
        return next(unlike, None if len(set(found)) == 1 else 0)

    def rendezvous(self, op: int, operation: str, words: Sequence[int] = ()) -> list[list[int]]:
        """The ``words`` of every rank, once all have reached ``op`` of ``reduce.header.OPERATIONS``.

        For what ranks do together on ``group`` besides reducing. A barrier too. Collective: one message, of
        the length of a header.

        Raises:
            Desync: a rank has come for something else; raised on every rank alike, at once.
            PeerLost: a rank did not come.
        """
        header = Header(
            version=VERSION,
            op=op,
            step=self.steps,
            exchange=self.exchanges,
            declared=0,
            bucket=0,
            num_elements=0,
            num_leaves=0,
            weight=0,
            ready_ns=0,
            launched_ns=time.monotonic_ns(),
            left=0,
        )
        found: list[list[int]] = []
        self.lane.settle()
        self.lane.run(
            operation, lambda: found.extend(self.exchange.rendezvous(header, words, operation))
        ).wait()
        return found

    def steps_now(self) -> None:
        """An optimizer begins to use the gradients."""
        if self._update is not None:  # the last time it raised
            self._update.cancel()
        self._update = self.recorder.span("update", lane="compute").begin()

    def stepped(self) -> None:
        """An optimizer has used the gradients."""
        if self._update is not None:
            self._update.end()
            self._update = None
        self.steps += 1
        self._watch.stepped(self.steps)
        self.exchanges = 0
        if self.ends_steps:
            self.recorder.stepped()

    def go_on_with(self, afterwards: PostReduceExchange, num_running: int) -> None:
        """The gradients of this reduction are followed by statistics of so many buffers."""
        self.afterwards, self.num_running = afterwards, num_running

    def _exchange_afterwards(self) -> None:
        """All gradients have arrived: what is exchanged besides?"""
        afterwards, self.afterwards = self.afterwards, None
        if afterwards is not None and self.group.size > 1:
            with self.recorder.span(BATCH_NORM, lane="host"):
                afterwards.exchange()

    def _leave_afterwards(self) -> None:
        """All gradients have been sent, and this rank gives up: the others may wait for what follows."""
        afterwards, self.afterwards = self.afterwards, None
        if afterwards is not None and self.group.size > 1:
            afterwards.leave()

    def _watch_over(self, held: Callable[[], Sequence[Replica]], alike: Sequence[Sequence[int]]) -> None:
        """In each exchange, ranks compare what they hold; ``exchange`` is there by now."""
        self.watch = ReplicaWatch(self.group, held, alike if self.options.check_replicas else ())

    def _first_guess(self, i: int) -> int | None:
        """How often a gradient comes for parameter i, as long as nothing is known; None waits and counts."""
        return None

    def _header(self, bucket: Bundle, plan: StepPlan, round: int = 0, num_carried: int = 0) -> Header:
        """What this rank says of ``bucket`` as it leaves; its slots note what is frozen by then."""
        for slot in bucket.slots:
            slot.frozen = not self.parameters[slot.position].requires_grad
        return Header(
            version=VERSION,
            declared=int(plan.declared),
            step=self.steps,
            exchange=self.exchanges,
            bucket=bucket.index,
            num_elements=bucket.num_elements,
            num_leaves=plan.num_leaves,
            weight=self.weight,
            ready_ns=bucket.ready_ns,
            launched_ns=time.monotonic_ns(),
            left=0,
            round=round,
            num_carried=num_carried,
            declared_step=plan.step,
            data_position=plan.data_position,
            data_identity=plan.data_identity,
            sampled=self._watch.sampled,
            edited=self._watch.edited,
            num_running=self.num_running,
            buffers=self.buffers,
            input_digest=self.input_digest() if plan.declared else 0,
        )

    def _learn(self) -> None:
        """The closed leaf had other numbers of accumulations than expected."""
        for i, count in enumerate(self._counts):
            expected = self._expected[i]
            if count == 0 or count == expected:
                continue
            if expected is None and i not in self._unsteady:
                self._expected[i] = count
            else:
                self._unsteady.add(i)
                self._expected[i] = None

    def _late(self, i: int) -> Desync:
        self._unsteady.add(i)
        self._expected[i] = None
        number = self._counts[i]
        return Desync(
            f"rank {self.group.global_rank}: parameter {self.names[i]!r} received gradient number {number} "
            f"of this backward after its bucket had left; so far there were {number - 1} per backward. "
            f"If the model uses it a varying number of times, {self.late_fix}"
        )

    def _report_unused(self) -> None:
        """Raise, or warn once of each, where a rank that had gradients had none for some parameters.

        Raises:
            Desync: a rank had none because the parameter is frozen there, and others had one.
            ValueError: unused parameters are forbidden.
        """
        if self.options.unused:
            return
        unused = _find_unused(self.buckets)
        if alone := [x._replace(ranks=x.frozen) for x in unused if x.frozen]:
            raise Desync(
                f"frozen on some ranks alone (requires_grad=False): {self._describe(alone)}; in step "
                f"{self.steps} other ranks had gradients for them, and the mean would lack a share: freeze "
                "on every rank alike, or pass find_unused_parameters=True if this is meant"
            )
        if unused and self.options.unused is False:
            raise ValueError(
                f"no gradient came for {self._describe(unused)} in step {self.steps}, and "
                "find_unused_parameters=False forbids it: pass True or freeze them"
            )
        new = [x for x in unused if x.position not in self._warned_unused]
        self._warned_unused.update(x.position for x in new)
        if new and self.group.rank == 0:
            warnings.warn(
                f"no gradient came for {self._describe(new)} in step {self.steps}: where other ranks had "
                "one, zero was averaged in; where none had, .grad was left alone. Pass "
                "find_unused_parameters=True if this is meant",
                stacklevel=2,
            )

    def _describe(self, unused: Sequence[Unused]) -> str:
        lines = []
        for x in unused[:SHOWN]:
            ranks = ", ".join(str(self.group.ranks[r]) for r in x.ranks)
            lines.append(f"{self.names[x.position]!r} on {f'rank {ranks}' if x.on_some else 'any rank'}")
        more = f"; and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        return "; ".join(lines) + more


def _bytes_of(gradient: Tensor) -> bytes:
    return bytes_of(gradient.to_dense() if gradient.is_sparse else gradient)


class Unused(NamedTuple):
    """A parameter that ``ranks`` of the group had no gradient for, though they had others."""

    position: int
    ranks: list[int]
    on_some: bool  # others had one
    frozen: list[int]  # of ``ranks``, those that could not have one, though others had


def _find_unused(buckets: Sequence[Bundle]) -> list[Unused]:
    """Call it after the exchange.

    A rank that had no gradient at all, because no micro-batch or no weight fell to it, is not counted.
    """
    if not [1 for bucket in buckets if bucket.presence.count(bucket.every) < len(bucket.presence)]:
        return []  # as in most steps
    ranks = range(len(buckets[0].presence))
    busy = [r for r in ranks if any(bucket.presence[r] for bucket in buckets)]
    found = []
    for bucket in buckets:
        if all(bucket.presence[r] == bucket.every for r in busy):
            continue
        for k, slot in enumerate(bucket.slots):
            without = [r for r in busy if not bucket.presence[r] >> k & 1]
            if without:
                on_some = len(without) < len(busy)
                frozen = [r for r in without if on_some and bucket.frozen[r] >> k & 1]
                found.append(Unused(slot.position, without, on_some, frozen))
    return found
