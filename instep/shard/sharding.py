"""The engine of ``fully_shard``: a module's memory, its reducer, and the hooks between them and autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from instep.hook import Hook, weakly
from instep.mesh.mesh import Mesh, UnrankedMesh, registered_mesh
from instep.net.agree import all_or_none, require_same_lines
from instep.net.clocks import measure
from instep.reduce.node_format import NodeFormat
from instep.shard import checks
from instep.shard.gather import Gathers, UnitHooks
from instep.shard.materialise import ALIKE, Init, materialise, prepare
from instep.shard.partition import UnitMembers, partition
from instep.shard.reducer import SliceReducer
from instep.shard.shard_groups import find_shard_ranks
from instep.shard.unit import Unit
from instep.state import homes
from instep.state.alignment import align
from instep.step import optimizer_guard
from instep.step.agreement import agree_on_structure, agree_on_values, broadcast_values, compare_threads
from instep.step.backward import StepSession, is_in_backward
from instep.step.parameter_registry import ParameterRegistry
from instep.verify.subject import GradientPiece, Subject, Value

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


HOW = (
    "call it on every rank inside `with instep.gathered(model):`, take instep.full_state_dict(model), or use "
    "instep.save and instep.load"
)
Checked: TypeAlias = tuple["ShardingOptions", ParameterRegistry, list[UnitMembers]]
"""The options, the parameters, and which of these are gathered and reduced together."""


@dataclass(frozen=True)
class ShardingOptions:
    """What has to be the same on all ranks."""

    stage: int
    compute_dtype: torch.dtype | None
    init_sync: bool | str
    find_unused_parameters: bool | None
    seed: int
    overlap: bool
    nodes: NodeFormat  # of the sum tree

    def __post_init__(self) -> None:
        if self.stage not in (2, 3):
            raise ValueError(
                f"stage={self.stage!r}: expected 2 (gradients in slices) or 3 (weights too); for stage 1, "
                "the optimizer's state alone, use DataParallel and ShardedOptimizer"
            )
        if self.init_sync not in (True, "verify"):
            raise ValueError(f"init_sync={self.init_sync!r}: expected True or 'verify'")
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype: expected one of floating point, got {self.compute_dtype}")


class Sharding:
    """The engine of one sharded module.

    At construction, collective: ranks compare their modules and options, which ``consider()`` returns or
    refuses, and the parameters move into spaces, one per unit and kind. In forward and backward: as for
    ``DataParallel``, with another reducer. ``close`` ends it; ``leave`` too, and ``join`` takes part again.
    Other arguments are as for ``fully_shard``.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Mesh | ProcessGroup | None,
        consider: Callable[[], ShardingOptions],
        *,
        units: Sequence[nn.Module] | None,
        device: torch.device | None,
        timeout_s: float | None,
        broadcast_buffers: bool,
    ) -> None:
        self.kind = type(module)
        self.next_step = 0
        self.units: list[Unit] = []
        self._first_values: tuple[Init | None, int] | None = None  # how to fill what is on the meta device
        self._unfilled: list[Unit] | None = None  # when ranks were left; None: they never were
        self._device, self._timeout_s, self._broadcast_buffers = device, timeout_s, broadcast_buffers

        def check() -> Checked:
            options = consider()
            registry = _checked(module, options)
            return options, registry, partition(module, units)

        self._take_part(module, process_group, check)

    def _take_part(
        self, module: nn.Module, process_group: Mesh | ProcessGroup | None, check: Callable[[], Checked]
    ) -> None:
        """All ranks have the same module, which can be sharded, the same options and units, or all raise."""
        self.process_group = process_group
        self.ranks, self.recorder = find_shard_ranks(process_group, self._timeout_s)
        self.group = self.ranks.whole
        try:
            what = "the preparation of modules to shard"
            checked = all_or_none(self.group, what, check, errors=(ValueError,))
            self.options, registry, self._kinds = checked
            agree_on_structure(module, asdict(self.options), self.group)
            compare_threads(module, self.group)
            lines = [f"unit {kind.name!r} of {', '.join(kind.names)}" for kind in self._kinds]
            require_same_lines(self.group, "units", lines)
            if self.options.init_sync == "verify" and self._unfilled is None:
                agree_on_values(module, self.group)
            self._make_units(module)
            own = {id(p) for unit in self.units for p in unit.parameters}
            align([x for x in (*module.parameters(), *module.buffers()) if id(x) not in own])
            self._reduce(module, registry)
        except BaseException:
            for unit in self.units:
                homes.leave(unit)
            for group in self.ranks.groups:
                group.close()
            raise

    def leave(self) -> None:
        """As ``Wrapped`` says; parameters have no values until ``join`` and a state that is put."""
        self.session.declared.abandon()
        self.close()
        if self._unfilled is None:
            self._unfilled = [unit for unit in self.units if not unit.has_values]
        for unit in self.units:
            unit.leave()

    def join(self, mesh: Mesh) -> None:
        """As ``Wrapped`` says; after ``leave``."""
        before, module = self.backward, self.backward.module
        with before.registry.as_wrapped():
            self._take_part(module, mesh, lambda: (self.options, ParameterRegistry(module), self._kinds))
        self.backward.sync, self.backward.step_mode = before.sync, before.step_mode

    def materialise(self, init: Init | None, seed: int) -> None:
        """As ``FullySharded.materialise``."""
        new = [unit for unit in self.units if not unit.has_values]
        if any(unit.is_vacant for unit in new):
            prepare(self.backward.module, new, init, seed)
            self._first_values = init, seed
        else:
            self._fill(new, init, seed)

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
        self._fill(self._unfilled, *self._first_values)

    def _fill(self, units: Sequence[Unit], init: Init | None, seed: int) -> None:
        made = materialise(self.backward.module, units, init, seed)
        require_same_lines(self.group, "the first values of parameters", made, fix=ALIKE)
        for unit in units:
            unit.loaded()

    def close(self) -> None:
        """Remove the hooks, end the lanes, give back the groups; also happens when it is collected."""
        self.reducer.leave()
        self.session.close()
        optimizer_guard.forget(
            [*self.reducer.optimizer_parameters, *(p for _, p in self.backward.registry.frozen)]
        )
        self.hooks.ended()
        self.reducer.drop_gradients()
        for unit in self.units:
            homes.leave(unit)

    def _make_units(self, module: nn.Module) -> None:
        """Shards of the parameters; in another group than before without values, until these come."""
        options, group = self.options, self.ranks.shard_group
        if self._unfilled is not None:
            for unit in self.units:
                unit.lay_out(group, self.ranks.weights)
        else:
            broadcast_values(module, self.group)
            mesh = registered_mesh() if self.process_group is None else self.process_group
            self.units = [
                Unit(
                    number,
                    kind,
                    module,
                    group,
                    self.ranks.weights,
                    keeps=options.stage == 2,
                    compute_dtype=options.compute_dtype,
                    device=self._device,
                    vacant=isinstance(mesh, UnrankedMesh),
                )
                for number, kind in enumerate(self._kinds)
            ]
        for unit in self.units:
            unit.everyone = self.group
            homes.settle(unit)

    def _reduce(self, module: nn.Module, registry: ParameterRegistry) -> None:
        """Take part in forward and backward: gathers, reducer, keys, hooks."""
        options, offsets_ns = self.options, measure(self.group).offsets_ns
        self.gathers = Gathers(self.ranks.weights, self.units, self.recorder)
        self.hooks = UnitHooks(module, self.units, self.gathers)
        self.reducer = SliceReducer(
            [name for name, _ in registry.trainable],
            [unit for unit in self.units if unit.trainable],
            self.ranks,
            self.recorder,
            self.gathers,
            self.hooks,
            unused=options.find_unused_parameters,
            overlap=options.overlap,
            nodes=options.nodes,
        )
        self.reducer.exchange.offsets_ns = offsets_ns
        self.gathers.reduction = self.reducer.lane
        for unit in self.units:
            unit.when_loaded = weakly(self.reducer.settled)
            for whole, p in zip(unit.whole, unit.parameters, strict=True):
                registry.stand_for(whole, p)
        self.session = StepSession(
            self,
            module,
            self.reducer,
            registry,
            self.units[0].device if self.units else torch.device("cpu"),
            seed=options.seed,
            broadcast=self._broadcast_buffers,
            lanes=[self.gathers.lane],
        )
        self.backward = self.session.backward
        hooks = self.session.hooks  # the list itself: the session removes what is added to it
        hooks += [*self.hooks.hooks, *_state_dict_hooks(module, self.units)]
        hooks += [p.register_hook(partial(_used_outside, name)) for name, p in registry.trainable]
        hooks.append(module.register_forward_pre_hook(Hook(weakly(self._begins)), prepend=True))
        if (dtype := options.compute_dtype) is not None:
            cast = Hook(partial(_cast_inputs, dtype))
            casts = dict.fromkeys([module, *(kind.module for kind in self._kinds)])
            hooks += [m.register_forward_pre_hook(cast, prepend=True, with_kwargs=True) for m in casts]

    def _begins(self, module: nn.Module, args: Any) -> None:
        if not is_in_backward():
            self.backward.look_back()
            if self.reducer.plan is None:
                self.gathers.begin_step()
            else:
                self.gathers.settle()  # or a rank that left would be noticed later
            for unit in self.units:
                unit.require_untouched()
            self.reducer.drop_discarded()


def _state_dict_hooks(module: nn.Module, units: Sequence[Unit]) -> list[Any]:
    """Hooks on ``module`` and all in it, which refuse state dicts while parameters are shards.

    A state dict of shards would be saved by one rank and be taken for the model. ``keep_vars=True`` gives the
    parameters themselves, whose shapes say what they are.
    """
    unit_of = {id(p): unit for unit in units for p in unit.parameters}
    read, load = (Hook(partial(_refuse, unit_of, name)) for name in ("state_dict", "load_state_dict"))
    hooks: list[Any] = []
    for m in module.modules():
        hooks += [m.register_state_dict_post_hook(read), m.register_load_state_dict_pre_hook(load)]
    return hooks


def _refuse(
    unit_of: Mapping[int, Unit], called: str, module: nn.Module, state: Any, prefix: str, *others: Any
) -> None:
    for key, p in module._parameters.items():
        unit = unit_of.get(id(p))
        if unit is not None and not unit.is_made_whole and state.get(prefix + key, p) is not p:
            raise RuntimeError(f"{called}(): parameter {prefix + key!r} is this rank's shard: {HOW}")


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Floating-point inputs of what computes in ``dtype`` have it, as in torch's ``MixedPrecisionPolicy``."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))


def _checked(module: nn.Module, options: ShardingOptions) -> ParameterRegistry:
    """The parameters of ``module``, if they can be sharded."""
    registry = ParameterRegistry(module)
    for name, p in [*registry.trainable, *registry.frozen]:
        checks.require_plain(name, p)
        if p.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient: call zero_grad() before fully_shard")
        if checks.claimant(p) is not None:
            raise ValueError(
                f"parameter {name!r} has a ShardedOptimizer already, which would step memory no longer in "
                "use: call fully_shard first, then make the optimizer from model.parameters()"
            )
        if p.is_meta and options.stage == 2:
            raise ValueError(
                f"parameter {name!r} is on the meta device, and stage 2 has all weights on every rank: "
                "materialise the module first, or use stage=3"
            )
    checks.require_apart(module)
    return registry


def _used_outside(name: str, gradient: Tensor) -> None:
    raise ValueError(
        f"parameter {name!r} was used outside of the forward of the module that it belongs to, where it is "
        "this rank's shard: call that module, or make all that uses the parameter one unit, with "
        "fully_shard(..., units=[...]), or have it in no unit, which is then the root's"
    )


def subject_of(sharding: Sharding) -> Subject:
    """The module of ``sharding`` for ``verify``."""
    reducer, backward = sharding.reducer, sharding.backward
    position = {id(p): i for i, p in enumerate(reducer.optimizer_parameters)}
    held = [x for unit in reducer.units for x in unit.held]
    names = {
        id(p): name for unit in sharding.units for p, name in zip(unit.parameters, unit.names, strict=True)
    }
    return Subject(
        model=backward.module,
        backward=backward,
        strategy=f"fully_shard, stage {sharding.options.stage}",
        seed=sharding.options.seed,
        copy=reducer.ranks.replica,
        pieces=[
            GradientPiece(position[id(x.parameter)], x.part_of, partial(getattr, x.parameter, "grad"))
            for x in held
        ],
        values=[
            *(Value(names[id(x.parameter)], x.first, x.tensor) for unit in sharding.units for x in unit.held),
            *(Value(name, 0, p) for name, p in backward.module.named_parameters() if id(p) not in names),
        ],
        memory=[bucket.reduced for bucket in reducer.buckets],
    )
