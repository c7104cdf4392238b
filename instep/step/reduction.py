"""From gradients that appear one by one to complete leaves of the sum tree: what all reducers share.

A leaf is the gradient of one micro-batch, or of all that a rank has accumulated where the loop declares none.

Autograd reports each accumulation into a gradient, but not when the gradient is complete: a parameter that
is used in two checkpointed segments, or in two backwards of one micro-batch, is accumulated twice. Sending
it after the first accumulation would lose the rest without an error. So the very first leaf is reduced at
the end of backward, and its accumulations are counted; from then on a gradient is complete after as many. A
gradient with fewer accumulations is reduced at the end of backward; one with more, after it was sent, is an
error, never a wrong sum.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.errors import Desync, PeerLost, warn
from instep.events import BATCH_NORM, Recorder, Span
from instep.hook import weakly
from instep.memory import bytes_of, tensor_of
from instep.net.device import Stream
from instep.net.lane import Lane
from instep.net.process_group import Group
from instep.reduce.buckets import Bundle, Caps
from instep.reduce.exchange import OrderedAllReduce
from instep.reduce.header import COMPARE, NORM, STATISTICS, Header
from instep.reduce.node_format import IN_FLOAT32, NodeFormat
from instep.reduce.norm import GRADIENT_NORM, NORM_BYTES
from instep.reduce.owners import GradientPeers, entry
from instep.reduce.tree import host_major, rotated
from instep.step.gradients import Gradients
from instep.step.input_digest import HasDigest, InputDigest
from instep.step.replica_watch import Replica, ReplicaWatch
from instep.step.running_statistics import RunningStatistics

_is_full = attrgetter("is_full")
SHOWN = 8  # parameters in a message
COMPARISON = "the comparison of gradients that no exchange has seen"


@dataclass(frozen=True)
class ReductionOptions:
    """How to reduce: what a user chose once for the wrapper."""

    strategy: type[Any]  # ``replicate.naive.Naive``, or a class with its methods
    caps: Caps | str = 25  # "auto": see ``replicate/auto_cap.py``
    ordered: bool = True
    unused: bool | None = None  # parameters without a gradient: True allows, None warns, False raises
    check_replicas: bool = True  # whether ranks compare their replicated weights
    nodes: NodeFormat = IN_FLOAT32

    def __post_init__(self) -> None:
        if isinstance(self.caps, str) and self.caps != "auto":
            raise ValueError(f"bucket_cap_mb={self.caps!r}: expected a size in MiB, or 'auto'")
        if self.nodes.rounds and not self.ordered:
            raise ValueError(
                f"nodes={self.nodes.nodes!r} with ordered=False, where the backend adds, and no tree: leave "
                "one of them out"
            )


@dataclass(frozen=True)
class StepPlan:
    """Who contributes which leaves to one reduction. ``leaves[r]`` belong to rank r; G in all.

    ``step`` is what the random numbers of a declared step are keyed by; the rest is of its ``DataSource``.
    """

    declared: bool
    num_leaves: int
    leaves: tuple[Sequence[int], ...]
    step: int = -1
    data_position: int = -1
    data_identity: int = 0
    data: HasDigest | None = None


@dataclass(frozen=True)
class GradientGroups:
    """Which ranks of a step add up which gradients; by default all of them all.

    ``of`` has, by the position of a parameter, another group than that of the step: some of its ranks, or
    ``alone``, where a gradient is reduced nowhere. On every rank a position has a group of the same size.
    ``data_ranks`` by rank: those with the same number share micro-batches, of which each contributes a leaf.
    The ranks of each of ``alike`` have the same weights.
    """

    of: Mapping[int, Group] = field(default_factory=dict)
    data_ranks: Sequence[int] = ()
    alike: Sequence[Sequence[int]] = ()


ONE_GROUP = GradientGroups()


class GroupPeers(GradientPeers):
    """Of gradients that the ranks of ``group`` add up, where other ranks of the step have others."""

    def __init__(self, reduction: Reduction, group: Group) -> None:
        self._all_square_sums, self._group = weakly(reduction.all_square_sums), group

    def square_sums(self, own: Sequence[float]) -> list[float]:
        found: list[float] = self._all_square_sums(own if self._group.rank == 0 else ())
        return found


class Reduction(ABC):
    """Collects the gradients of ``parameters``, leaf by leaf; subclasses reduce the complete ones.

    A step in time order: ``begin``; for each leaf ``open_leaf``, ``arrived`` from the parameters' hooks,
    ``close_leaf``; then ``finish``, after which every gradient is reduced. ``leave`` instead of ``finish``
    tells the other ranks that this one gives the step up, and drops its gradients.

    ``local[i]``: ``.grad`` of parameter i holds something that no exchange has seen. ``place[i]`` is the
    bundle that parameter i travels in. ``changes`` names what a step changes here, beside gradients.
    """

    sharded = False  # every rank gets all of every gradient
    compares = True  # in the first step, the gradients of ranks that share layers
    late_fix = "pass strategy='flat', which sends nothing before backward has ended"
    lost_fix = "close() the model and wrap model.module again, over the ranks that are left"
    changes: ClassVar[tuple[str, ...]] = (
        "steps",
        "exchanges",
        "num_reductions",
        "given_up",
        "observer",
        "local",
        "_reordered",
        "_seen",
        "_expected",
        "_unsteady",
        "_unused",
        "watch",
        "compares",
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
        groups: GradientGroups = ONE_GROUP,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.optimizer_parameters = self.parameters  # which an optimizer steps
        self.group = group
        self.bundling = groups
        self.data_ranks = self.bundling.data_ranks or range(group.size)
        self.groups = [*dict.fromkeys([group, *groups.of.values()])]  # all that are in use
        self._peers = {its: GroupPeers(self, its) for its in groups.of.values()}
        for i, its in groups.of.items():
            entry(self.parameters[i]).peers = weakref.ref(self._peers[its])
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
        self.statistics: RunningStatistics | None = None  # to be exchanged after the gradients
        self.buffers = 0  # a checksum of the module's, once the last leaf is closed
        self.inputs = InputDigest()
        # Called with each complete leaf of a bucket, and its memory.
        self.observer: Callable[[int, Any, Tensor], None] | None = None
        self.is_nested: Callable[[], bool] = bool  # whether a backward inside another one runs now
        self._overlaps = options.strategy.overlaps
        self._rounds_nodes = options.nodes.rounds
        self._reordered = not (options.strategy.overlaps and names) or group.size == 1
        self._seen: dict[int, None] = {}  # parameters in the order of their first gradient
        self._expected: list[int | None] = [None] * len(self.names)  # None: only at the end of backward
        self._unsteady: set[int] = set()
        self.gradients = Gradients(self.names, self.parameters)
        self._unused = UnusedParameters(self.names, group.ranks, warns=group.rank == 0)

    @property
    def watch(self) -> ReplicaWatch:
        """Compares replicated weights in each exchange."""
        return self._watch

    @watch.setter
    def watch(self, watch: ReplicaWatch) -> None:
        self._watch, self.exchange.compare = watch, watch.compare

    @abstractmethod
    def finish(self) -> None:
        """All leaves of this rank are closed: wait until the gradients are reduced."""

    def _succeeded(self) -> None:
        """All gradients are reduced, and set."""
        self.local = [False] * len(self.names)
        self.exchanges += 1
        self.num_reductions += 1
        self.given_up = False
        self.plan = None

    def leave(self) -> None:
        """Give the reduction up, if one is under way: let the other ranks know, and drop every ``.grad``.

        Some of the gradients may be reduced by now, some complete and some not: a sum for no rank.
        """
        if self.plan is None:
            return
        plan, self.plan, self.leaf = self.plan, None, None
        statistics, self.statistics = self.statistics, None
        header = self._next_header(plan) or (self._header_of(STATISTICS) if statistics else None)
        if header is not None and self.group.size > 1:
            name, exchange = "leaving a step", self.exchange
            self.lane.submit(name, partial(exchange.announce_leave, header, name), awaited=False)
        self.exchanges += 1
        self.given_up = True
        self.gradients.drop()
        self.local = [False] * len(self.names)
        self._reset()

    @abstractmethod
    def _next_header(self, plan: StepPlan) -> Header | None:
        """That of the next exchange of a bundle; None if all have begun."""

    @abstractmethod
    def _reset(self) -> None:
        """Forget what this reduction has collected."""

    def abandon(self) -> None:
        """End here, for good: no rank is told, and memory is free for what goes on in this one's place."""
        self.plan = self.leaf = None
        self.gradients.drop()
        self.place = {}

    def _settle(self, i: int) -> None:  # noqa: B027 - it may wait for the others of its bundle
        """A gradient of parameter i has arrived in the open leaf; it may be the first of several."""

    @abstractmethod
    def _close(self, bucket: Bundle) -> None:
        """The gradients of ``bucket`` are complete in the open leaf."""

    def assign(self, num_leaves: int) -> StepPlan:
        """Who computes what in a declared step of ``num_leaves``."""
        num_ranks = len(set(self.data_ranks))
        num_hosts = self.group.num_hosts if num_ranks == self.group.size else 1
        leaves = rotated(host_major(num_leaves, num_hosts, num_ranks // num_hosts), self.shift)
        return StepPlan(True, num_leaves, tuple(map(leaves.__getitem__, self.data_ranks)))

    @property
    def micro_batch(self) -> int | None:
        """The one of a declared step whose gradients arrive now."""
        return self.leaf if self.plan is not None and self.plan.declared else None

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Why ``optimizer`` cannot use these gradients, or None."""
        return None

    def interrupted(self) -> None:  # noqa: B027 - most have nothing to do
        """A forward or backward has raised; other ranks may wait for what this one would have gathered."""

    def backward_ended(self) -> None:  # noqa: B027 - most have nothing to do
        """Backward has ended, or (it raised) will not."""

    def disable_reporting(self) -> None:
        """From now on: no observer of leaves, no warning of unused parameters, no comparison of replicas."""
        self.observer = None
        self.watch = ReplicaWatch(self.group, list, ())
        self._unused = UnusedParameters(self.names, self.group.ranks, warns=False)

    def begin(self, plan: StepPlan) -> None:
        """A reduction begins; ``weight`` becomes this rank's sum of weights before its buckets leave.

        Raises:
            PeerLost: the group has lost a rank before; its unfinished messages would pair with new ones.
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
        self.statistics, self.buffers = None, 0
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
            bucket.open(leaf, whole=self.observer is not None)

    def arrived(self, i: int, *, settles: bool = True) -> None:
        """Autograd has accumulated into the ``.grad`` of parameter i; ``settles``: no hook looks at it."""
        self.local[i] = True
        parameter = self.parameters[i]
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(
                f"parameter {self.names[i]!r} has a sparse gradient: make its layer with sparse=False, and "
                "use an optimizer for dense gradients"
            )
        if self.leaf is None:
            return
        bucket, number = self.place[i], self._counts[i] + 1
        if not self._reordered and number == 1 and i not in self._seen:
            self._seen[i] = None
        if settles and bucket.is_open and self.gradients.is_large[i]:
            self._settle(i)
        self._counts[i] = number
        gradient = parameter.grad
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
        """The leaf's backward has ended: every gradient is complete."""
        for bucket in self.buckets:
            if bucket.is_open:
                bucket.is_open = False
                self._close(bucket)
        self.leaf = None
        if self._counts != self._expected:
            self._learn()

    def first_unlike(self, gradients: Sequence[tuple[str, Tensor]]) -> int | None:
        """The number of the first of ``gradients``, by name, that differs among ranks; None if none does.

        For gradients that a program has set or reduced by itself. Collective.

        Raises:
            Desync, PeerLost: other ranks have none to compare.
        """
        mine = [hashlib.sha256(name.encode() + bytes_of(gradient)).digest() for name, gradient in gradients]
        found = self.exchange_bytes(COMPARE, COMPARISON, b"".join(mine))
        unlike = (i for i in range(len(mine)) if len({its[32 * i : 32 * i + 32] for its in found}) > 1)
        return next(unlike, None if len(set(found)) == 1 else 0)

    def rendezvous(self, op: int, operation: str, words: Sequence[int] = ()) -> list[list[int]]:
        """The ``words`` of every rank, once all have reached ``op`` of ``reduce.header.OPERATIONS``.

        Precedes every operation on ``group`` besides reducing; a barrier, too. Collective: one message of the
        length of a header.

        Raises:
            Desync: a rank has reached another operation; raised on every rank at once.
            PeerLost: a rank did not arrive.
        """
        found: list[list[int]] = []
        self.lane.settle()
        header = self._header_of(op)
        run = partial(self.exchange.rendezvous, header, words, operation)
        self.lane.run(operation, lambda: found.extend(run())).wait()
        return found

    def exchange_bytes(self, op: int, operation: str, data: bytes, limit: int = 1 << 24) -> list[bytes]:
        """The ``data`` of every rank, once all have reached ``op``. Collective; raises as ``rendezvous``."""
        lengths = [words[0] for words in self.rendezvous(op, operation, [len(data)])]
        found: list[bytes] = []
        gather = partial(self.group.all_gather_bytes, data, operation, limit=limit, lengths=lengths)
        self.lane.run(operation, lambda: found.extend(gather())).wait()
        return found

    def all_square_sums(self, own: Sequence[float]) -> list[float]:
        """``own`` of all ranks: sums of squares of blocks of gradients, 8 bytes each. Collective.

        Raises:
            Desync, PeerLost: as ``rendezvous``.
        """
        data = bytes_of(torch.tensor(own, dtype=torch.float64, device="cpu"))
        found = self.exchange_bytes(NORM, GRADIENT_NORM, data, NORM_BYTES)
        return [x for row in found for x in tensor_of(row, torch.float64).tolist()]

    def steps_now(self, optimizer: Optimizer) -> None:
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

    def _exchange_statistics(self) -> None:
        """All gradients have arrived, and none is set yet: exchange what norms have measured."""
        statistics, self.statistics = self.statistics, None
        if statistics is not None and self.group.size > 1:
            with self.recorder.span(BATCH_NORM, lane="host"):
                statistics.exchange(self)

    def _watch_over(self, held: Callable[[], Sequence[Replica]], alike: Sequence[Sequence[int]]) -> None:
        """In each exchange, ranks compare what they hold. Call it when ``exchange`` is set."""
        self.watch = ReplicaWatch(self.group, held, alike if self.options.check_replicas else ())

    def _first_guess(self, i: int) -> int | None:
        """The accumulations of parameter i as long as none are counted; None waits for the end."""
        return None

    def _header_of(self, op: int) -> Header:
        return Header(op=op, step=self.steps, exchange=self.exchanges, launched_ns=time.monotonic_ns())

    def _header(self, bucket: Bundle, plan: StepPlan, round: int = 0) -> Header:
        """This rank's header for ``bucket`` at launch; the slots note which parameters are frozen by then."""
        for slot in bucket.slots:
            slot.frozen = not self.parameters[slot.position].requires_grad
        return Header(
            declared=int(plan.declared),
            step=self.steps,
            exchange=self.exchanges,
            bucket=bucket.index,
            num_elements=bucket.num_elements,
            num_leaves=plan.num_leaves,
            weight=self.weight,
            ready_ns=bucket.ready_ns,
            launched_ns=time.monotonic_ns(),
            round=round,
            declared_step=plan.step,
            data_position=plan.data_position,
            data_identity=plan.data_identity,
            sampled=self._watch.sampled,
            edited=self._watch.edited,
            num_running=0 if self.statistics is None else len(self.statistics.norms),
            buffers=self.buffers,
            input_digest=self.inputs.word if self.inputs.looks or plan.data_position >= 0 else 0,
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
        """All gradients have arrived: which parameters got none? Raises as ``UnusedParameters.report``."""
        if not self.options.unused and not all(map(_is_full, self.buckets)):
            self._unused.report(self.buckets, self.steps, forbidden=self.options.unused is False)


class Unused(NamedTuple):
    """A parameter that ``ranks`` of the group had no gradient for, though they had others."""

    position: int
    ranks: list[int]
    on_some: bool  # others had one
    frozen: list[int]  # of ``ranks``, those where it requires no gradient, though others had one


class UnusedParameters:
    """Reports by ``names`` and ``ranks`` parameters that got no gradient; if it ``warns``, once each.

    A rank that does not use a parameter counts as zero. That is right where the data decide which branch of a
    model is used, and wrong where one rank has frozen what the others train: the mean would lack a share.
    """

    def __init__(self, names: Sequence[str], ranks: Sequence[int], *, warns: bool) -> None:
        self._names, self._ranks, self._warns = names, ranks, warns
        self._reported: frozenset[int] = frozenset()

    def report(self, buckets: Sequence[Bundle], step: int, *, forbidden: bool) -> None:
        """Call it after the exchange of ``buckets``.

        Raises:
            Desync: a rank had none because the parameter is frozen there, and others had one.
            ValueError: unused parameters are ``forbidden``.
        """
        if not (unused := find_unused(buckets)):
            return
        if alone := [x._replace(ranks=x.frozen) for x in unused if x.frozen]:
            raise Desync(
                f"frozen on some ranks alone (requires_grad=False): {self._describe(alone)}; in step {step} "
                "other ranks had gradients for them, and the mean would lack a share: freeze on every rank, "
                "or pass find_unused_parameters=True if this is meant"
            )
        if unused and forbidden:
            raise ValueError(
                f"no gradient came for {self._describe(unused)} in step {step}, and "
                "find_unused_parameters=False forbids it: pass True or freeze them"
            )
        new = [x for x in unused if x.position not in self._reported]
        self._reported |= {x.position for x in new}
        if new and self._warns:
            warn(
                f"no gradient came for {self._describe(new)} in step {step}: where other ranks had one, zero "
                "was averaged in; where none had, .grad was left alone. Pass find_unused_parameters=True if "
                "this is meant",
            )

    def _describe(self, unused: Sequence[Unused]) -> str:
        lines = []
        for x in unused[:SHOWN]:
            ranks = ", ".join(str(self._ranks[r]) for r in x.ranks)
            lines.append(f"{self._names[x.position]!r} on {f'rank {ranks}' if x.on_some else 'any rank'}")
        more = f"; and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        return "; ".join(lines) + more


def find_unused(buckets: Sequence[Bundle]) -> list[Unused]:
    """A rank that had no gradient at all, because it had no micro-batch or no weight, is not counted."""
    ranks = range(len(buckets[0].presence))
    busy = [r for r in ranks if any(bucket.presence[r] for bucket in buckets)]
    found = []
    for bucket in buckets:
        for k, slot in enumerate(bucket.slots):
            its = busy if bucket.places is None else [r for r in busy if r in bucket.places]
            without = [r for r in its if not bucket.presence[r] >> k & 1]
            if without:
                on_some = len(without) < len(its)
                frozen = [r for r in without if on_some and bucket.frozen[r] >> k & 1]
                found.append(Unused(slot.position, without, on_some, frozen))
    return found
