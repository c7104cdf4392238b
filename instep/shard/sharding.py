"""What keeps a module sharded: its memory, its reducer, and the hooks between them and autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from instep.errors import PeerLost
from instep.mesh.clocks import measure
from instep.mesh.device import generators, marks_for
from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.ordered.keys import LeafKeys
from instep.shard import checks, claims
from instep.shard.layout import cut
from instep.shard.materialise import Init
from instep.shard.ranks import find
from instep.shard.slices import Slices
from instep.shard.space import Space
from instep.shard.stage3 import Stage3
from instep.shard.staging import Divided, Sliced
from instep.shard.subject import subject_of
from instep.shard.unit import Unit
from instep.shard.units import Members, by_kind, partition
from instep.step import guard
from instep.step.agree import agree, attempt
from instep.step.backward import Backward
from instep.step.leaves import DeclaredStep, Leaf
from instep.step.manifest import agree_on_structure, agree_on_values, broadcast_values
from instep.step.roster import Roster
from instep.verify.loss import Loss
from instep.verify.report import Report
from instep.verify.trial import verify
from instep.work import Lane

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WHAT = "sharding a module"


@dataclass(frozen=True)
class Options:
    """What has to be the same on all ranks."""

    stage: int
    compute_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    one_copy: bool = False
    init_sync: bool | str = True
    find_unused_parameters: bool | None = None
    seed: int = 0
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (2, 3):
            raise ValueError(
                f"stage={self.stage!r}: expected 2 (gradients in slices) or 3 (weights too); for stage 1, "
                "the optimizer's state alone, use DataParallel and ShardedOptimizer"
            )
        if self.init_sync not in (True, "verify"):
            raise ValueError(f"init_sync={self.init_sync!r}: expected True or 'verify'")
        if self.in_slices and self.one_copy:
            raise ValueError(
                "one_copy=True is of stage 2 without compute_dtype: else each rank has a slice of the weights"
            )
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype: expected one of floating point, got {self.compute_dtype}")

    @property
    def in_slices(self) -> bool:
        """Whether the weights that are stepped are in slices, and gathered for the computation."""
        return self.stage == 3 or self.compute_dtype is not None


@dataclass(frozen=True)
class Where:
    """What no bits depend on: which parameters are one unit, where those of the meta device shall live, and
    how long to wait."""

    units: Sequence[nn.Module] | None = None
    device: torch.device | None = None
    timeout_s: float | None = None


class Sharding:
    """The engine of one sharded module.

    At construction, collective: ranks compare their modules and options, which ``consider()`` returns or
    refuses, and the parameters move into spaces, one per unit and kind. In forward and backward: as for
    ``DataParallel``, with another reducer. ``close`` ends it.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Mesh | ProcessGroup | None,
        consider: Callable[[], Options],
        where: Where,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.kind = type(module)
        self.next_step = 0
        self.stage3: Stage3 | None = None
        self._process_group = process_group
        self.ranks, self.recorder = find(process_group, where.timeout_s, what=WHAT)
        self.group = self.ranks.whole
        try:
            self.options, roster, kinds = self._compare(module, consider, where.units)
            spaces = self._make_spaces(module, where, kinds)
            self._reduce(module, roster, spaces, broadcast_buffers)
        except BaseException:
            if self.stage3 is not None:
                self.stage3.close(wait=False)
            self.ranks.close()
            raise

    def micro_batches(self, num_leaves: int, step: int | None) -> Iterator[Leaf]:
        """As ``FullySharded.micro_batches``."""
        if num_leaves < 1:
            raise ValueError(f"micro_batches({num_leaves}): expected at least one micro-batch")
        self.backward.contract = "declared"
        step = self.next_step if step is None else step
        yield from self._declared.run(num_leaves, step)
        self.next_step = step + 1
        guard.reduced(self.reducer)

    def materialise(self, init: Init | None, seed: int) -> None:
        """As ``FullySharded.materialise``: the values are those of the first rank of all."""
        if self.stage3 is None:
            raise ValueError("materialise() is for stage=3: in stage 2 there is nothing on the meta device")
        new = [unit for unit in self.stage3.units if not unit.materialised]
        self.stage3.materialise(init, seed=seed)
        column = self.ranks.column
        if column is not None:
            for unit in new:
                column.broadcast(unit.slice.view(torch.uint8), f"the first values of unit {unit.name!r}")
            self.barrier("the first values of the parameters")

    def verify(self, batch: Any, loss: Loss | None = None, *, rtol: float | None = None) -> Report:
        """As ``Verifiable.verify``."""
        options = self.options
        strategy = f"fully_shard, stage {options.stage}"
        subject = subject_of(self.backward, self.reducer, self.stage3, strategy=strategy, seed=options.seed)
        return verify(subject, self._process_group, batch, loss, rtol)

    def barrier(self, operation: str) -> None:
        """Nobody returns before all have come; between two steps."""
        self.reducer.lane.run(operation, lambda: self.group.barrier(operation)).wait()

    def close(self, *, wait: bool = True) -> None:
        """Remove the hooks, end the lane, give back the groups; also happens when it is collected.

        ``wait``: until no other rank gathers any more, unless one of them is lost.
        """
        wait = wait and not isinstance(self.reducer.lane.failed, PeerLost)
        self.reducer.leave()
        self._unbind()
        guard.forget([*self.reducer.parameters, *(p for _, p in self._declared.roster.frozen)])
        for parameter in self.reducer.parameters:
            parameter.grad = None
        for space in self.spaces:
            claims.leave(space)
            space.let_go()
        if self.stage3 is not None:
            self.stage3.close(wait=wait)

    def _compare(
        self, module: nn.Module, consider: Callable[[], Options], units: Sequence[nn.Module] | None
    ) -> tuple[Options, Roster, list[Members]]:
        """All ranks have the same module, which can be sharded, the same options and units, or all raise."""

        def check() -> tuple[Options, Roster, list[Members]]:
            options = consider()
            roster = _checked(module, options, self.ranks.weights)
            return options, roster, [kind for unit in partition(module, units) for kind in by_kind(unit)]

        checked, problem = attempt(check)
        agree(problem, [], self.group, "the comparison of modules to shard")
        assert checked is not None
        options, _, kinds = checked
        agree_on_structure(module, asdict(options), self.group)
        lines = [f"unit {kind.name!r} of {', '.join(kind.names)}" for kind in kinds]
        agree(None, lines, self.group, "the comparison of units")
        if options.init_sync == "verify":
            agree_on_values(module, self.group)
        return checked

    def _make_spaces(self, module: nn.Module, where: Where, kinds: Sequence[Members]) -> list[Divided]:
        options = self.options
        trainable = [kind for kind in kinds if kind.parameters[0].requires_grad]
        divided = {id(p) for kind in (kinds if options.in_slices else trainable) for p in kind.parameters}
        # Within a row, units take the values of its first rank; rows have nothing else in common.
        broadcast_values(module, self.group, but=divided if self.ranks.column is None else ())
        self.spaces: list[Space] = []
        spaces: list[Divided]
        if not options.in_slices:
            with torch.no_grad():
                spaces = [
                    Sliced(kind.parameters, cut, self.ranks.weights, kind.names, one_copy=options.one_copy)
                    for kind in trainable
                ]
            self.spaces += spaces
        else:
            self.stage3 = Stage3(
                module,
                self.ranks.row,
                self.ranks.weights,
                self.recorder,
                compute_dtype=options.compute_dtype,
                reshard_after_forward=options.stage == 3 and options.reshard_after_forward,
                units=where.units,
                device=where.device,
            )
            spaces = [unit for unit in self.stage3.units if unit.trainable]
            self.spaces += self.stage3.units
        for space in self.spaces:
            claims.settle(space)
        return spaces

    def _reduce(
        self, module: nn.Module, roster: Roster, spaces: Sequence[Divided], broadcast_buffers: bool
    ) -> None:
        """Take part in forward and backward: reducer, keys, hooks."""
        names, parameters = [name for name, _ in roster.trainable], [p for _, p in roster.trainable]
        self.reducer = Slices(
            names,
            parameters,
            spaces,
            self.ranks,
            self.recorder,
            unused=self.options.find_unused_parameters,
            overlap=self.options.overlap,
        )
        self.reducer.exchange.offsets_ns = measure(self.group).offsets_ns
        if self.stage3 is not None:
            stage3 = self.stage3
            self.reducer.closed = lambda space: stage3.closed(cast(Unit, space))
            self.reducer.ended = stage3.ended
            self.reducer.problem = stage3.problem
        on = parameters[0].device if parameters else torch.device("cpu")
        self.recorder.marks = self.recorder.marks or marks_for(on)
        keys = LeafKeys(module, self.options.seed, generators(on))
        self._declared = DeclaredStep(module, self.reducer, keys, roster)
        self.backward = Backward(self._declared, broadcast=broadcast_buffers)
        hooks = [*self.backward.hooks, *self.reducer.hooks]
        # The group for the weights is stage 3's to close: other ranks may still gather.
        groups = [g for g in self.ranks.groups if self.stage3 is None or g is not self.ranks.weights]
        self._unbind = weakref.finalize(self, _release, hooks, self.reducer.lane, groups)
        guard.watch(self.reducer, roster.frozen, self._unbind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("what keeps a module sharded holds process groups: it cannot be copied")


def _checked(module: nn.Module, options: Options, group: Group) -> Roster:
    """The parameters of ``module``, if they can be sharded."""
    roster = Roster(module)
    guard.require_unwatched([p for _, p in [*roster.trainable, *roster.frozen]])
    for name, p in roster.trainable:
        if claims.claimed(p):
            raise ValueError(
                f"parameter {name!r} has a ShardedOptimizer already, whose memory would be another one: call "
                "fully_shard first, then make the optimizer from model.parameters()"
            )
        if p.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient: call zero_grad() before fully_shard")
        if p.is_meta and not options.in_slices:
            raise ValueError(
                f"parameter {name!r} is on the meta device, and stage 2 has all weights on every rank: "
                "materialise the module first, or use stage=3"
            )
    for name, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse:
            raise ValueError(f"{name!r} has sparse gradients, which cannot be cut: make it with sparse=False")
    if not options.in_slices:
        checks.require_new([p for _, p in roster.trainable])
    if options.one_copy:
        checks.require_one_copy([p for _, p in roster.trainable], group)
    return roster


def _release(hooks: list[Any], lane: Lane, groups: Sequence[Group]) -> None:
    for hook in hooks:
        hook.remove()
    for group in groups:
        group.peers.given_up = True  # a program that ends after an error must not wait for its peers
    lane.close()
    for group in groups:
        group.close()
