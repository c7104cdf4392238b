"""Whole weights just in time: units are gathered shortly before they compute, and freed after.

    compute         |= unit 1 =|= unit 2 =|= unit 3 =
    communication   |~ 2 ~|     |~ 3 ~|    |~ 4 ~|         "parameter gather"

A gather is an all-gather of S bytes over W ranks: each rank receives S (W-1)/W bytes. It is collective, so
all ranks have to gather the same units in the same order. Nothing in a backend would notice if they did not:
two units of one size would be paired, and a rank that left the step would be waited for until the deadline.
So the ranks announce to each other, 8 bytes each, what they are about to gather:

    a unit    all ranks announce the same one, or all raise
    IDLE      this rank has nothing to gather any more in this micro-batch, or has none, and takes part in
              whatever the others gather, until all are idle
    LEFT      this rank has left the step: all others raise, and name it

Which unit is next is known from the last time: the recorded order of forward, and of backward.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instep.errors import Desync, PeerLost
from instep.events import PARAMETER_GATHER, Recorder
from instep.hook import Hook, weakly
from instep.net.device import Stream
from instep.net.lane import Lane, Work
from instep.net.process_group import Group
from instep.shard.transfer import all_gather
from instep.shard.unit import Unit
from instep.step.backward import is_in_backward, require_eager_autograd

IDLE, LEFT = -1, -2
SAME_ORDER = (
    "all ranks of a shard group must run the same units in the same order, also in an evaluation: let "
    "every rank call the module equally often, and make what runs under a condition a part of one unit "
    "(units=[...])"
)
OF_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?)\b")
USED_OUTSIDE = (
    "if this module uses a weight of another one: there it is this rank's shard, of another shape. Make both "
    "one unit, fully_shard(..., units=[...]), or have neither in a unit, so that both are the root's"
)
_functorch: Any = torch._C._functorch
VMAP = _functorch.TransformType.Vmap


class Gathers:
    """Gathers units over ``group`` in the order in which they are asked for, on a lane of its own."""

    def __init__(self, group: Group, units: Sequence[Unit], recorder: Recorder) -> None:
        self.lane = Lane(f"instep gathers, rank {group.rank}", inline=group.size == 1, profiled_as="exchange")
        self._group, self._units, self._recorder = group, units, recorder
        device = units[0].device if units else torch.device("cpu")
        self._stream = Stream(device, inline=self.lane.inline)
        self._has_left = False  # this rank has announced that it left the step, or all know of one that did
        self._following: Work | None = None
        self.reduction: Lane | None = None  # of the gradients

    def begin(self, units: Sequence[Unit]) -> None:
        """Gather those of ``units`` that are not here, and go on meanwhile."""
        self.settle()  # what was gathered meanwhile may be here
        for unit in units:
            if unit.work is None and not unit.is_current:
                if is_inside_transform():
                    raise RuntimeError(
                        f"weights of unit {unit.name!r} ({', '.join(unit.names)}) were needed inside of a "
                        "transform of torch.func (grad, vjp, jacrev, jvp), where they cannot be gathered: "
                        "use DataParallel and ShardedOptimizer for this module"
                    )
                unit.allocate()
                gather = partial(self._gather, unit, self._stream.computed())
                unit.work = self.lane.submit(unit.gathering, gather)

    def need(self, units: Sequence[Unit]) -> None:
        """Gather those of ``units`` that are not here, wait, and show them.

        Raises:
            Desync: the ranks gather different units, or one has left the step; on all ranks.
            PeerLost: a rank did not come.
        """
        self.begin(units)
        works = [(unit, unit.work) for unit in units if unit.work is not None]
        if not all(work.done() for _, work in works):
            with self._recorder.span(PARAMETER_GATHER, lane="host"):
                for _, work in works:
                    work.arrive()
        for unit, work in works:
            if work.error is not None:
                for failed, _ in works:
                    failed.free()
                first = None if self.reduction is None else self.reduction.failed
                if isinstance(work.error, PeerLost) and isinstance(first, Desync):
                    raise first from work.error  # the reason why the other ranks have left
                work.wait()
            unit.filled()
        for unit in units:
            unit.show()

    def masters(self, unit: Unit) -> list[Tensor]:
        """All parameters of ``unit``, as the optimizer steps them, in new memory. Collective."""
        with torch.inference_mode(False):
            flat = torch.zeros(unit.layout.num_elements, dtype=unit.dtype, device=unit.device)
        unit.own_part(flat).copy_(unit.slice)

        def gather() -> None:
            self._announce(unit.number, unit.gathering)
            all_gather(self._group, flat, unit.gathering)

        self.lane.run(unit.gathering, gather).wait()
        return unit.views_in(flat)

    def follow(self) -> None:
        """Take part in what other ranks gather, until no rank gathers any more. Not awaited here."""
        self._following = self.lane.submit("what other ranks gather", self._follow)

    def settle(self) -> None:
        """Wait until this rank need not follow any more."""
        following, self._following = self._following, None
        if following is not None:
            following.wait()

    def leave(self, *, followed: bool = False) -> None:
        """The step is given up: whoever waits for this rank's part of a unit, or ``followed``, is told."""
        if not followed and all(x.keeps and (x.is_current or x.work is not None) for x in self._units):
            return
        if self._group.size > 1 and not self._has_left and not isinstance(self.lane.failed, PeerLost):
            self.recover()
            name = "leaving a step"
            self.lane.submit(name, partial(self._announce, LEFT, name), awaited=False)
        self._has_left = True

    def begin_step(self) -> None:
        """A forward or a reduction begins; what was given up before is over."""
        if self._has_left:
            self.lane.drain()
            self.recover()
            self._has_left, self._following = False, None

    def recover(self) -> None:
        """Go on after a gather that failed, unless a rank was lost."""
        if self.lane.failed is not None and not isinstance(self.lane.failed, PeerLost):
            self.lane.reset()

    def _gather(self, unit: Unit, computed: Any) -> None:
        with self._stream.after(computed):
            self._announce(unit.number, unit.gathering)
            self._fill(unit, unit.gathering)

    def _fill(self, unit: Unit, name: str) -> None:
        size = unit.flat.numel() * unit.flat.itemsize
        with (
            self._recorder.span(PARAMETER_GATHER, lane="communication", num_bytes=size, bucket=unit.number),
            torch.no_grad(),
        ):
            all_gather(self._group, unit.flat, name, unit.cast(unit.flat))

    def _follow(self) -> None:
        name = "what other ranks gather"
        while (number := self._announce(IDLE, name)) != IDLE:
            unit = self._units[number]
            if unit.keeps:
                self._fill(unit, name)
                unit.filled()
            else:
                flat = torch.empty_like(unit.flat, memory_format=torch.contiguous_format)
                all_gather(self._group, flat, name, unit.cast(flat))

    def _announce(self, mine: int, name: str) -> int:
        group = self._group
        if group.size == 1:
            return mine
        rows = group.all_gather_bytes(mine.to_bytes(8, "little", signed=True), name, lengths=[8] * group.size)
        said = [int.from_bytes(row, "little", signed=True) for row in rows]
        if LEFT in said:
            self._has_left = True
            if mine == LEFT:
                return LEFT
            who = [str(rank) for rank, x in zip(group.ranks, said, strict=True) if x == LEFT]
            raise Desync(
                f"rank {', '.join(who)} left the step before its gradients were complete, "
                f"and rank {group.global_rank} was in {name}"
            )
        others = {x for x in said if x != IDLE}
        if len(others) > 1:
            self._has_left = True
            names = ["nothing" if x == IDLE else f"unit {self._units[x].name!r}" for x in said]
            lines = [f"rank {rank} gathers {x}" for rank, x in zip(group.ranks, names, strict=True)]
            raise Desync(f"{'; '.join(lines)}: {SAME_ORDER}")
        return others.pop() if others else IDLE


class UnitHooks:
    """Brings units where forward and backward need them, by hooks on the modules of the units.

    forward     a module of a unit begins: gather, show; the unit before is freed; prefetch the next one
    backward    the gradient of a module's output comes: the same, in the order of backward
    the end     of a forward without gradients, or of backward: everything is freed

    Units of the whole module, the root, stay from forward to the end of backward, and so does the last unit
    of forward, which backward needs first. A unit is not freed in backward before all its gradients have come
    (``closed``). What a backward with ``create_graph`` has gathered stays until the next backward has ended,
    whose graph needs it.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], gathers: Gathers) -> None:
        self.module, self._gathers = module, gathers
        self._units: dict[nn.Module, list[Unit]] = {module: []}
        for unit in units:
            self._units.setdefault(unit.module, []).append(unit)
        self._next: tuple[dict[Any, nn.Module], dict[Any, nn.Module]] = {}, {}  # in forward, in backward
        self._last: nn.Module | None = None  # which came last, in this forward or backward
        self._running: Counter[nn.Module] = Counter()  # calls that have not returned
        self._here: dict[nn.Module, None] = {}  # whose units are gathered, or are on their way
        self.closed: set[int] = set()  # units whose gradients of the open micro-batch have come, by number
        self._in_backward = False
        self._stays = False  # a graph needs what this backward has gathered
        self._pinned: set[nn.Module] = set()  # whose weights such a graph needs
        self._on_gradient = weakly(self._reached)
        enter, leave = weakly(self._enter), weakly(self._leave)
        self.hooks: list[Any] = []
        for m in self._units:
            self.hooks.append(m.register_forward_pre_hook(Hook(enter), prepend=True))
            self.hooks.append(m.register_forward_hook(Hook(leave), always_call=True))

    def ended(self) -> None:
        """Backward has ended, or will not: no weights are needed any more."""
        if not (self._in_backward or self._running):
            return
        self._in_backward, self._last = False, None
        self.closed.clear()
        self._running.clear()
        self._pinned = {*self._here} if self._stays else set()
        self._stays = False
        for m in list(self._here):
            self._free(m)

    def _enter(self, m: nn.Module, args: Any) -> None:
        """The forward of ``m`` begins."""
        backward = is_in_backward()
        if m is self.module and not backward:
            if self._in_backward or self._running:  # it raised
                self.ended()
            self._gathers.recover()
            self._last = None
        self._use(m, backward=backward)
        self._running[m] += 1

    def _leave(self, m: nn.Module, args: Any, output: Any) -> None:
        """The forward of ``m`` has ended, or was left by an exception."""
        if output is None and m is self.module and (error := sys.exc_info()[1]) is not None:
            if isinstance(error, RuntimeError) and OF_SHAPES.search(str(error)):
                error.add_note(USED_OUTSIDE)
            self._gathers.leave()
            for order in self._next:  # of a forward that failed, which another rank may have run otherwise
                order.clear()
        if self._running[m]:
            self._running[m] -= 1
        watched = False
        if torch.is_grad_enabled() and not is_inside_transform():
            for x in tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf:
                    x.register_hook(partial(self._on_gradient, m))
                    watched = True
        if is_in_backward() or self._running[m]:
            return
        for unit in self._units[m]:
            if (name := unit.hide()) is not None:
                unit.free()
                raise RuntimeError(
                    f"parameter {name!r} was written to in forward, which is lost when its gathered "
                    "weights go: keep what forward changes in a buffer, or write between steps, inside "
                    "instep.gathered(module)"
                )
        if m is self.module:
            stay = {m, self._last} if watched else set()
            for other in [other for other in self._here if other not in stay]:
                self._free(other)

    def _reached(self, m: nn.Module, gradient: Tensor) -> None:
        """Backward has come to an output of ``m``."""
        if not self._in_backward:
            self._in_backward, self._last = True, None
            self.closed.clear()
            self._gathers.recover()
            require_eager_autograd()
            torch.autograd.Variable._execution_engine.queue_callback(weakly(self.ended))
        self._stays = torch.is_grad_enabled()  # with create_graph
        self._use(m, backward=True)

    def _use(self, m: nn.Module, *, backward: bool) -> None:
        """The weights of ``m`` have to be here."""
        following = self._next[backward]
        if m is not self._last:
            if self._last is not None:
                following[self._last] = m
            self._last = m
            stay = {m, following.get(m), self.module}
            for other in list(self._here):
                if other in stay or self._running[other]:
                    continue
                if backward and m is self.module:  # whose output may be that of a frozen unit
                    continue
                awaits = (unit.trainable and unit.number not in self.closed for unit in self._units[other])
                if not (backward and any(awaits)):
                    self._free(other)
        self._here[m] = None
        for unit in self._units[m]:
            if not unit.has_values:
                raise ValueError(
                    f"parameter {unit.names[0]!r} was on the meta device and has no values yet: call "
                    "materialise() on every rank, or load a checkpoint; under `instep run` it gets them "
                    "where the loop over run.steps begins"
                )
        self._gathers.need(self._units[m])
        if (after := following.get(m)) is not None and after not in self._here:
            self._here[after] = None
            self._gathers.begin(self._units[after])

    def _free(self, m: nn.Module) -> None:
        for unit in self._units[m]:
            unit.hide()
            if m not in self._pinned:
                unit.free()
        if m not in self._pinned:
            self._here.pop(m, None)


def is_inside_transform() -> bool:
    """Whether a transform of torch.func runs this code that would wrap new tensors; in some 100 ns."""
    levels = _functorch.get_interpreter_stack()
    return levels is not None and any(level.key() != VMAP for level in levels)
