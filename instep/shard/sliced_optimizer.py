"""Plain torch optimizers over parameters in slices: each rank steps its slices, and has the state of these.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)      before or after fully_shard
    optimizer.step()                              its step calls a closure first, and this is the closure:
        this rank's slices are stepped            by ``_local``, of the same class, over the slices
        then it finds no parameters               all is done
    optimizer.state[p]["exp_avg"]                 of this rank's slice; nothing where it has none of p

There is one state: ``optimizer.state``, by parameter. ``_local`` sees it by slice (``_SliceStates``), and the
protocol of state sees ``_local``. What has been loaded into it by ``optimizer.load_state_dict`` is looked at
when it is used: whole moments, as of an optimizer that nothing divides, are cut, and the slices of another
rank are refused. To tell these apart, a state dict says whose slices it has (``SLICES_OF``).
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from instep.events import Recorder
from instep.net.lane import Lane
from instep.net.process_group import Group
from instep.shard import checks
from instep.shard.checks import group_options
from instep.shard.flat_parameters import ShardedParameters
from instep.shard.optimizer_state import adopt_groups, format_sharded, local_state, part_of
from instep.shard.optimizer_status import OptimizerStatus
from instep.shard.update import ShardedUpdate
from instep.state import homes
from instep.state.homes import DividedOptimizer, Home, ParameterShard
from instep.step.parameter_registry import requiring

KEY = "_instep_slices"
SLICES_OF = "slices_of"  # an option of each group in a state dict
SCALING = ("grad_scale", "found_inf")  # what a GradScaler leaves with an optimizer that scales by itself


@dataclass(frozen=True)
class SteppingRanks:
    """The ranks of ``group``, one of ``num_replicas``, step together, and use it on ``lane``."""

    group: Group
    num_replicas: int
    lane: Lane
    recorder: Recorder


def sliced_optimizer(optimizer: Optimizer, ranks: SteppingRanks) -> SlicedOptimizer:
    """What steps ``optimizer``, whose parameters, or some of them, are in slices over ``ranks``.

    Raises:
        ValueError: it is of a class that cannot step slices, or other parameters are divided in another way.
    """
    found = optimizer.__dict__.get(KEY)
    if found is None:
        found = optimizer.__dict__[KEY] = SlicedOptimizer(optimizer)
    found.update_parameters(ranks)
    return found


class SlicedOptimizer:
    """The slices of ``optimizer``, their state, and its steps.

    Made before its first step, or when its state is asked for; from then on its step is this one, and its
    state dict says whose slices it has. ``update_parameters`` before each use takes over what has changed.
    """

    shards: ShardedParameters
    _ranks: SteppingRanks

    def __init__(self, optimizer: Optimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self._ids: list[list[int]] = []
        self._homes: list[Home] = []
        self._undivided: list[tuple[Tensor, bool]] = []
        self._hidden: list[dict[str, Any]] | None = None
        self._left: list[Tensor] | None = None  # what was stepped, after ``leave``
        self.state_seen: Any = None  # the optimizer's, as it was last looked at
        optimizer.register_step_pre_hook(_require_open)
        self._shown_again = optimizer.register_step_post_hook(_show)
        optimizer.register_state_dict_post_hook(_say_whose)

    @property
    def optimizer(self) -> Optimizer:
        """Which this is for, and which has this."""
        found = self._reference()
        assert found is not None
        return found

    @property
    def is_open(self) -> bool:
        """Whether the slices are still those of its parameters."""
        return all(homes.home(space.parameters[0]) is space for space in self._homes)

    def update_parameters(self, ranks: SteppingRanks) -> None:
        """The optimizer's parameters may be others now than they were, or live elsewhere."""
        groups = self.optimizer.param_groups
        ids = [list(map(id, group["params"])) for group in groups]
        if self._left is None and ids == self._ids and self._is_up_to_date(ranks):
            return
        kind, parameters = type(self.optimizer), [p for group in groups for p in group["params"]]
        if (problem := checks.why_not_in_slices(kind, self.optimizer.defaults)) is not None:
            raise ValueError(problem)
        _require_one_division(parameters, ranks.group, kind)
        if not self._ids or self._ranks.group is not ranks.group:
            self._status = OptimizerStatus(ranks.group, name=kind.__name__, lane=ranks.lane)
        self._ranks = ranks
        self.shards = ShardedParameters(ranks.group, None, barrier=self._status.barrier)
        trained = [p for p in parameters if p.requires_grad] if self._left is None else self._left
        known, self._left = set(map(id, trained)), None
        with requiring(trained, [p for p in parameters if id(p) not in known]):
            slices = self.shards.take(groups, 0)
        self._homes = homes.homes(self.shards.owned)
        self._undivided = [(p, p.requires_grad) for p in parameters if homes.home(p) is None]
        self._local = _over(slices, self.optimizer)
        self._states = _SliceStates(self, self._local.state)
        self._local.state = self._states  # type: ignore[assignment]
        self._update = ShardedUpdate(self.shards, self._status, ranks.recorder)
        self._ids = ids

    def leave(self) -> None:
        """As ``DividedOptimizer`` says. The next use, over another group, takes the slices that are there
        then of what was stepped until now."""
        self.show()
        self.optimizer.state.clear()
        self._left = self.shards.owned

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """A step of this rank's slices, as the optimizer makes it; returns what ``closure()`` has returned.

        Collective. Raises as ``ShardedOptimizer.step``; ``ValueError`` too if a state was loaded that is not
        of these slices.
        """
        optimizer = self.optimizer
        if optimizer.state is not self.state_seen:
            self._status.broken = ""  # a state was loaded
        for name in SCALING:
            setattr(self._local, name, getattr(optimizer, name, None))
        loss = self._update.make(optimizer, self._local, closure, self._states.settle)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._shown_again.id, last=False)
        self._hidden, optimizer.param_groups = optimizer.param_groups, []
        return loss

    def describe(self) -> DividedOptimizer:
        """What a plain optimizer cannot say of itself."""
        return DividedOptimizer(
            group=self._ranks.group,
            locals=(self._local,),
            held=self.shards.held,
            homes=self._homes,
            num_replicas=self._ranks.num_replicas,
            load=self._load,
            leave=self.leave,
        )

    def show(self) -> None:
        """The optimizer has its parameters again, after its step and before hooks of the user's own."""
        if self._hidden is not None:
            self.optimizer.param_groups, self._hidden = self._hidden, None

    def whose(self) -> str | None:
        """Whose slices a state dict has; None where they are all that there is."""
        group = self._ranks.group
        return None if group.size == 1 else f"rank {group.rank} of {group.size}"

    def _is_up_to_date(self, ranks: SteppingRanks) -> bool:
        """Whether the slices are those of these ranks, and parameters without a home have none, and are
        trained or frozen as they were."""
        undivided = all(homes.home(p) is None and p.requires_grad == on for p, on in self._undivided)
        return self._ranks.group is ranks.group and self.is_open and undivided

    def _load(self, states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        optimizer, held = self.optimizer, self.shards.held
        now = format_sharded(held, self._local, optimizer.param_groups, self._ranks.group)
        pieces = [{**piece, "state": states[piece["parameter"]]} for piece in now["pieces"]]
        saved = {**now, "pieces": pieces, "param_groups": groups}
        self._local.load_state_dict(
            local_state(saved, held, optimizer.param_groups, self._ranks.group, cut=True)
        )
        self._states.take(self._local.state)
        self._local.state = self._states  # type: ignore[assignment]
        adopt_groups(optimizer.param_groups, self._local.param_groups, groups)
        self._status.broken = ""


class _SliceStates(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state``, by this rank's slice of a parameter in the place of the parameter.

    ``first`` is what the class keeps of a slice before any step; most keep nothing.
    """

    def __init__(self, sliced: SlicedOptimizer, first: Mapping[Tensor, dict[str, Any]]) -> None:
        self._sliced = weakref.proxy(sliced)
        self._held = {x.tensor: x for x in sliced.shards.held.values()}
        self._first = dict(first)
        self._settled: Any = None

    def settle(self) -> None:
        """The optimizer's state is that of this rank's slices, or made so.

        Raises:
            ValueError: it cannot be.
        """
        optimizer = self._sliced.optimizer
        if optimizer.state is self._settled:
            return
        self._require_own(optimizer.param_groups)
        owned = set(map(id, self._sliced.shards.owned))
        others = {key: value for key, value in optimizer.state.items() if id(key) not in owned}
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict, others)
        for slice_, held in self._held.items():
            found = optimizer.state.get(held.parameter, {})
            if slice_ in self._first and not _was_stepped(found):
                found = self._first[slice_]
            if found:
                state[held.parameter] = {k: _sliced(v, k, held) for k, v in found.items()}
        self._put(state)

    def take(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """The optimizer has these, by slice, from now on."""
        self._put(defaultdict(dict, {self._held[x].parameter: state for x, state in states.items()}))

    def _put(self, state: defaultdict[Any, dict[str, Any]]) -> None:
        optimizer = self._sliced.optimizer
        optimizer.state = self._settled = self._sliced.state_seen = state
        self._first.clear()

    def _require_own(self, groups: list[dict[str, Any]]) -> None:
        """The groups forget whose slices were loaded with them, if these are this rank's."""
        own = self._sliced.whose() or "rank 0 of 1"
        for group in groups:
            if group.get(SLICES_OF, own) != own:
                raise ValueError(
                    f"optimizer.load_state_dict() was given the slices of {group[SLICES_OF]}, on {own}: of "
                    "sharded parameters optimizer.state_dict() has this rank's slices, and each rank loads "
                    "its own; instep.save and instep.load are for any number of ranks"
                )
        for group in groups:
            group.pop(SLICES_OF, None)

    def __getitem__(self, x: Tensor) -> dict[str, Any]:
        self.settle()
        found: dict[str, Any] = self._settled[self._held[x].parameter]
        return found

    def __setitem__(self, x: Tensor, state: dict[str, Any]) -> None:
        self.settle()
        self._settled[self._held[x].parameter] = state

    def __delitem__(self, x: Tensor) -> None:
        self.settle()
        del self._settled[self._held[x].parameter]

    def __contains__(self, x: object) -> bool:
        self.settle()
        return isinstance(x, Tensor) and x in self._held and self._held[x].parameter in self._settled

    def get(self, x: Tensor, default: Any = None) -> Any:
        return super().get(x, default) if x in self else default

    def __iter__(self) -> Iterator[Tensor]:
        return (x for x in self._held if x in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _over(slices: list[list[Tensor]], optimizer: Optimizer) -> Optimizer:
    """An optimizer like ``optimizer``, over ``slices`` in the place of its parameters."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    groups = []
    for group, own in zip(optimizer.param_groups, slices, strict=True):
        options = {key: value for key, value in group_options(group).items() if key != SLICES_OF}
        groups.append({**options, "params": own})
    return kind(groups, **{key: value for key, value in optimizer.defaults.items() if key in known})


def _was_stepped(state: Mapping[str, Any]) -> bool:
    return bool(state) and float(state.get("step", 1)) > 0


def _sliced(value: Any, key: str, held: ParameterShard) -> Any:
    """``value``, which was loaded for the parameter or for this rank's slice of it, as that of the slice.

    Raises:
        ValueError: it is neither, or was rounded when it was loaded.
    """
    name = f"{key} of a parameter of shape {tuple(held.parameter.shape)}"
    if not isinstance(value, Tensor):
        return value
    if value.shape != held.tensor.shape or held.is_whole:
        value = part_of(value, name, held, cut=True)
    shown, own = held.parameter.dtype, held.tensor.dtype
    if value.shape == held.tensor.shape and value.dtype == shown != own:
        raise ValueError(
            f"{name}: expected {own}, as its weights are that the optimizer steps, got {shown}: "
            "optimizer.load_state_dict() rounds to what the module computes in; use instep.save and "
            "instep.load, which keep what there was"
        )
    return value


def _require_one_division(parameters: list[Tensor], group: Group, kind: type[Optimizer]) -> None:
    for there in homes.homes(parameters):
        if there.group.ranks != group.ranks:
            raise ValueError(
                f"some parameters are divided among ranks {list(group.ranks)}, and others among "
                f"{list(there.group.ranks)}: make one {kind.__name__} for each"
            )


def _require_open(optimizer: Optimizer, *_: Any) -> None:
    found = optimizer.__dict__.get(KEY)
    if found is not None and not found.is_open:
        raise RuntimeError(
            f"optimizer.step(): this {type(optimizer).__name__} has the state of slices of a sharded module, "
            "which was closed: make another optimizer"
        )


def _show(optimizer: Optimizer, *_: Any) -> None:
    found = optimizer.__dict__.get(KEY)
    if found is not None:
        found.show()


def _say_whose(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    found = optimizer.__dict__.get(KEY)
    if found is not None and (whose := found.whose()) is not None:
        for group in state_dict["param_groups"]:
            group[SLICES_OF] = whose
