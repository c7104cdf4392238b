"""The engine of ``fully_shard``: a module's memory, its reducer, and the hooks between them and autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from instep.errors import PeerLost
from instep.hook import Hook, weakly
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none, require_same_lines
from instep.net.clocks import measure
from instep.net.device import generators, marks_for
from instep.net.process_group import Group
from instep.reduce.header import BARRIER
from instep.reduce.node_format import NodeFormat
from instep.rng.keys import LeafKeys
from instep.shard import checks
from instep.shard.flat_parameters import FlatParameters, Stage2Parameters
from instep.shard.layout import cut
from instep.shard.materialise import Init, prepare
from instep.shard.partition import UnitMembers, by_kind, partition
from instep.shard.reducer import SliceReducer
from instep.shard.shard_groups import awaits_rank, find_shard_ranks
from instep.shard.stage3 import Stage3
from instep.shard.unit import Divided, Unit
from instep.state import homes
from instep.state.alignment import align
from instep.step import optimizer_guard
from instep.step.agreement import agree_on_structure, agree_on_values, broadcast_values, compare_threads
from instep.step.backward import Backward, release
from instep.step.micro_batches import DataSource, DeclaredStep, MicroBatch
from instep.step.parameter_registry import ParameterRegistry
from instep.verify.gradient_report import Report
from instep.verify.subject import GradientPiece, Loss, Subject, Value
from instep.verify.trial import verify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


WHAT = "sharding a module"
Considered: TypeAlias = tuple["ShardingOptions", ParameterRegistry, list[UnitMembers]]
"""The options, the parameters, and which of these are gathered and reduced together."""


@dataclass(frozen=True)
class ShardingOptions:
    """What has to be the same on all ranks."""

    stage: int
    compute_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    one_copy: bool = False
    init_sync: bool | str = True
    find_unused_parameters: bool | None = None
    seed: int = 0
    overlap: bool = True
    nodes: str = "float32"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        _ = self.node_format  # which refuses what there is not
        if self.stage not in (2, 3):
            raise ValueError(
                f"stage={self.stage!r}: expected 2 (gradients in slices) or 3 (weights too); for stage 1, "
                "the optimizer's state alone, use DataParallel and ShardedOptimizer"
            )
        if self.init_sync not in (True, "verify"):
            raise ValueError(f"init_sync={self.init_sync!r}: expected True or 'verify'")
        if self.in_slices and self.one_copy:
            raise ValueError(
                "one_copy=True is for stage 2 without compute_dtype: with these options each rank has a "
                "slice of the weights, and there is no copy to share"
            )
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype: expected one of floating point, got {self.compute_dtype}")

    @property
    def node_format(self) -> NodeFormat:
        """Of the sum tree."""
        return NodeFormat(self.nodes, self.rounding, self.seed)

    @property
    def in_slices(self) -> bool:
        """Whether the weights that are stepped are in slices, and gathered for the computation."""
        return self.stage == 3 or self.compute_dtype is not None


@dataclass(frozen=True)
class LocalOptions:
    """Options that no bits depend on: which parameters are one unit, where those from the meta device shall
    live, and how long to wait."""

    units: Sequence[nn.Module] | None = None
    device: torch.device | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class FirstValues:
    """How ``materialise`` is to fill what comes from the meta device."""

    init: Init | None
    seed: int


class Sharding:
    """The engine of one sharded module.

    At construction, collective: ranks compare their modules and options, which ``consider()`` returns or
    refuses, and the parameters move into spaces, one per unit and kind. In forward and backward: as for
    ``DataParallel``, with another reducer. ``close`` ends it; ``leave`` too, and ``join`` takes part again.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Mesh | ProcessGroup | None,
        consider: Callable[[], ShardingOptions],
        local: LocalOptions,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.kind = type(module)
        self.next_step = 0
        self.stage3: Stage3 | None = None
        self.spaces: list[FlatParameters] = []
        self._first_values: FirstValues | None = None
        self._unfilled: list[Unit] | None = None  # units that had no values when ranks met; None: not yet
        self._local, self._broadcast_buffers = local, broadcast_buffers

        def check() -> Considered:
            options = consider()
            registry = _checked(module, options, self.ranks.weights)
            kinds = [kind for unit in partition(module, local.units) for kind in by_kind(unit)]
            return options, registry, kinds

        self._take_part(module, process_group, check, again=False)

    def _take_part(
        self,
        module: nn.Module,
        process_group: Mesh | ProcessGroup | None,
        check: Callable[[], Considered],
        *,
        again: bool,
    ) -> None:
        self._process_group = process_group
        self.ranks, self.recorder = find_shard_ranks(process_group, self._local.timeout_s, what=WHAT)
        self.group = self.ranks.whole
        try:
            self.options, registry, self._kinds = self._compare(module, check, again=again)
            spaces = self._make_spaces(module, again=again)
            align([*module.parameters(), *module.buffers()])  # what is not in them
            self._reduce(module, registry, spaces)
        except BaseException:
            self._let_spaces_go(wait=False)
            self.ranks.close()
            raise

    def leave(self) -> None:
        """As ``Wrapped`` says; parameters show nothing in stage 3, until ``join`` and a state that is put."""
        self._declared.abandon()
        self.close(wait=False)
        if self.stage3 is not None:
            if self._unfilled is None:
                self._unfilled = [unit for unit in self.stage3.units if unit.is_vacant]
            for unit in self.stage3.units:
                unit.vacate()

    def join(self, mesh: Mesh) -> None:
        """As ``Wrapped`` says; after ``leave``."""
        before, module = self.backward, self.backward.module

        def check() -> Considered:
            registry = ParameterRegistry(module)
            if self.options.one_copy:
                checks.require_one_copy([p for _, p in registry.trainable], self.ranks.weights)
            return self.options, registry, self._kinds

        with before.registry.as_wrapped():
            self._take_part(module, mesh, check, again=True)
        self.backward.sync, self.backward.step_mode = before.sync, before.step_mode

    def micro_batches(self, num_leaves: int | DataSource, step: int | None) -> Iterator[MicroBatch]:
        """As ``FullySharded.micro_batches``."""
        self.backward.step_mode = "declared"
        step = self.next_step if step is None else step
        if not self._unbind.alive:
            raise RuntimeError("this sharded module has left its group: join another one first")
        if (yield from self._declared.run(num_leaves, step)):
            self.next_step = step + 1
            optimizer_guard.reduced(self.reducer)

    def materialise(self, init: Init | None, seed: int) -> None:
        """As ``FullySharded.materialise``: the values are those of the first rank of all."""
        if self.stage3 is None:
            raise ValueError("materialise() is for stage=3: in stage 2 there is nothing on the meta device")
        new = [unit for unit in self.stage3.units if not unit.materialised]
        if any(unit.is_vacant for unit in new):
            prepare(self.stage3.module, new, init, seed)
            self._first_values = FirstValues(init, seed)
        else:
            self._fill(new, FirstValues(init, seed))

    def fill(self) -> None:
        """As ``Wrapped`` says: as ``materialise`` was told to.

        Raises:
            ValueError: it was not called.
        """
        if not self._unfilled:
            return
        if self._first_values is None:
            raise ValueError(
                f"parameter {self._unfilled[0].names[0]!r} was on the meta device, and no saved state has "
                "values for it: call materialise() after fully_shard"
            )
        self._fill(self._unfilled, self._first_values)

    def _fill(self, units: Sequence[Unit], values: FirstValues) -> None:
        assert self.stage3 is not None
        self.stage3.materialise(values.init, seed=values.seed, units=units)
        replicas = self.ranks.replicate_group
        if replicas is not None:
            for unit in units:
                replicas.broadcast(unit.slice.view(torch.uint8), f"the first values of unit {unit.name!r}")
            self.barrier("the first values of the parameters")

    def verify(self, batch: Any, loss: Loss | None = None, *, rtol: float | None = None) -> Report:
        """As ``Verifiable.verify``."""
        options = self.options
        strategy = f"fully_shard, stage {options.stage}"
        subject = _subject_of(self.backward, self.reducer, self.stage3, strategy=strategy, seed=options.seed)
        return verify(subject, self._process_group, batch, loss, rtol)

    def barrier(self, operation: str) -> None:
        """No rank returns before all have come; between two steps."""
        self.reducer.rendezvous(BARRIER, operation)

    def close(self, *, wait: bool = True) -> None:
        """Remove the hooks, end the lane, give back the groups; also happens when it is collected.

        ``wait``: until no other rank gathers any more, unless one of them is lost.
        """
        wait = wait and not isinstance(self.reducer.lane.failed, PeerLost)
        self.reducer.leave()
        self._unbind()
        optimizer_guard.forget([*self.reducer.parameters, *(p for _, p in self._declared.registry.frozen)])
        self.reducer.gradients.drop()
        self._let_spaces_go(wait=wait)

    def _let_spaces_go(self, *, wait: bool) -> None:
        for space in self.spaces:
            homes.leave(space)
            space.release()
        if self.stage3 is not None:
            self.stage3.close(wait=wait)

    def _compare(self, module: nn.Module, check: Callable[[], Considered], *, again: bool) -> Considered:
        """All ranks have the same module, which can be sharded, the same options and units, or all raise."""
        checked = all_or_none(self.group, "the preparation of modules to shard", check, errors=(ValueError,))
        options, _, kinds = checked
        agree_on_structure(module, asdict(options), self.group)
        compare_threads(module, self.group)
        lines = [f"unit {kind.name!r} of {', '.join(kind.names)}" for kind in kinds]
        require_same_lines(self.group, "units", lines)
        if options.init_sync == "verify" and not again:
            agree_on_values(module, self.group)
        return checked

    def _make_spaces(self, module: nn.Module, *, again: bool) -> list[Divided]:
        """Memory for the parameters, which move there; ``again``: with whatever values, until others come."""
        options, kinds, self.spaces = self.options, self._kinds, []
        trainable = [kind for kind in kinds if kind.parameters[0].requires_grad]
        if not again:
            divided = {id(p) for kind in (kinds if options.in_slices else trainable) for p in kind.parameters}
            # Within a shard group, units take the values of its first rank; shard groups share nothing else.
            alone = self.ranks.replicate_group is None
            broadcast_values(module, self.group, but=divided if alone else ())
        spaces: list[Divided]
        if not options.in_slices:
            same: dict[str, Any] = {"one_copy": options.one_copy, "aligned": not again}
            with torch.no_grad():
                spaces = [
                    Stage2Parameters(kind.parameters, cut, self.ranks.weights, kind.names, **same)
                    for kind in trainable
                ]
            self.spaces += spaces
        else:
            self.stage3 = Stage3(
                module,
                self.ranks.shard_group,
                self.ranks.weights,
                self.recorder,
                compute_dtype=options.compute_dtype,
                reshard_after_forward=options.stage == 3 and options.reshard_after_forward,
                units=self._local.units,
                device=self._local.device,
                vacant=awaits_rank(self._process_group),
                before=self.stage3,
            )
            spaces = [unit for unit in self.stage3.units if unit.trainable]
            self.spaces += self.stage3.units
        for space in self.spaces:
            space.everyone = self.group
            homes.settle(space)
        return spaces

    def _reduce(self, module: nn.Module, registry: ParameterRegistry, spaces: Sequence[Divided]) -> None:
        """Take part in forward and backward: reducer, keys, hooks."""
        offsets_ns = measure(self.group).offsets_ns
        names, parameters = [name for name, _ in registry.trainable], [p for _, p in registry.trainable]
        self.reducer = SliceReducer(
            names,
            parameters,
            spaces,
            self.ranks,
            self.recorder,
            unused=self.options.find_unused_parameters,
            overlap=self.options.overlap,
            nodes=self.options.node_format,
        )
        self.reducer.exchange.offsets_ns = offsets_ns
        if self.stage3 is not None:
            self.reducer.closed = weakly(self.stage3.closed)
            self.reducer.ended = weakly(self.stage3.ended)
            self.stage3.meet = weakly(self.barrier)
            self.reducer.problem = weakly(self.stage3.problem)
        on = parameters[0].device if parameters else torch.device("cpu")
        self.recorder.marks = self.recorder.marks or marks_for(on)
        keys = LeafKeys(module, self.options.seed, generators(on))
        self._declared = DeclaredStep(module, self.reducer, keys, registry)
        self.backward = Backward(self._declared, broadcast=self._broadcast_buffers)
        hooks = [*self.backward.hooks, *self.reducer.hooks]
        if (dtype := self.options.compute_dtype) is not None:
            cast = Hook(partial(_cast_inputs, dtype))
            casts = dict.fromkeys([module, *(kind.module for kind in self._kinds)])
            hooks += [m.register_forward_pre_hook(cast, prepend=True, with_kwargs=True) for m in casts]
        # The group for the weights is stage 3's to close: other ranks may still gather.
        groups = [g for g in self.ranks.groups if self.stage3 is None or g is not self.ranks.weights]
        self._unbind = weakref.finalize(self, release, hooks, self.reducer.lane, *groups)
        optimizer_guard.watch(self.reducer, registry.frozen, self._unbind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("the sharding of a module holds process groups and cannot be copied")


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Floating-point inputs of what computes in ``dtype`` have it, as in torch's ``MixedPrecisionPolicy``."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(Tensor, cast, (args, kwargs))


def _checked(module: nn.Module, options: ShardingOptions, group: Group) -> ParameterRegistry:
    """The parameters of ``module``, if they can be sharded."""
    registry = ParameterRegistry(module)
    checks.require_no_pipeline(module)
    optimizer_guard.require_unowned([p for _, p in [*registry.trainable, *registry.frozen]])
    for name, p in registry.trainable:
        if checks.claimed(p):
            raise ValueError(
                f"parameter {name!r} has a ShardedOptimizer already, which would step memory no longer in "
                "use: call fully_shard first, then make the optimizer from model.parameters()"
            )
        if p.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient: call zero_grad() before fully_shard")
        if options.node_format.minds_order and not homes.in_order(p.shape, homes.dense_strides(p)):
            raise ValueError(
                f"parameter {name!r} lies in another order of memory (channels_last, transposed), and with "
                f"nodes={options.nodes!r}, rounding={options.rounding!r} its gradient is rounded in order "
                "of its elements: make it contiguous, or use bfloat16 and nearest, or DataParallel"
            )
        if p.is_meta and not options.in_slices:
            raise ValueError(
                f"parameter {name!r} is on the meta device, and stage 2 has all weights on every rank: "
                "materialise the module first, or use stage=3"
            )
    for name, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse:
            raise ValueError(f"{name!r} has sparse gradients, which cannot be cut: make it with sparse=False")
        if options.in_slices and isinstance(m, torch.jit.ScriptModule) and any(True for _ in m.parameters()):
            raise ValueError(
                f"{name!r} is compiled by torch.jit, and its forward takes no hook that could gather its "
                "weights: use stage=2 without compute_dtype, or DataParallel, or leave it uncompiled"
            )
    checks.require_apart(module, frozen_too=options.in_slices)
    if not options.in_slices:
        checks.require_new([p for _, p in registry.trainable])
    if options.one_copy:
        checks.require_one_copy([p for _, p in registry.trainable], group)
    return registry


def _subject_of(
    backward: Backward, reducer: SliceReducer, stage3: Stage3 | None, *, strategy: str, seed: int
) -> Subject:
    """The module of ``backward``, whose weights are in slices too if there is a ``stage3``."""
    position = {id(p): i for i, p in enumerate(reducer.parameters)}
    held = [x for space in reducer.spaces for x in space.held]
    return Subject(
        model=backward.module,
        backward=backward,
        strategy=strategy,
        seed=seed,
        copy=reducer.ranks.replica,
        pieces=[
            GradientPiece(position[id(x.parameter)], x.part_of, partial(reducer.gradient_of, x)) for x in held
        ],
        values=_values(backward, stage3),
        memory=[bucket.reduced for bucket in reducer.buckets],
        isolated=nullcontext if stage3 is None else stage3.apart,
    )


def _values(backward: Backward, stage3: Stage3 | None) -> list[Value]:
    """Masters of what is in slices, which parameters do not show; all of the others."""
    units = [] if stage3 is None else stage3.units
    names = {id(p): name for unit in units for p, name in zip(unit.parameters, unit.names, strict=True)}
    return [
        *(Value(names[id(x.parameter)], x.first, x.tensor) for unit in units for x in unit.held),
        *(Value(name, 0, p) for name, p in backward.module.named_parameters() if id(p) not in names),
    ]
