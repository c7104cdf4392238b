"""``fully_shard``: stages 2 and 3, in place. Parameters stay the same objects, and become this rank's shards.

    stage 3   weights, gradients and optimizer state are sharded; a unit's weights are gathered to compute,
              and freed after
    stage 2   the same, but gathered weights are kept until the shards change

Bytes per parameter and rank, Adam in float32: 16/W in stage 3, and the gathered units; 4 + 12/W in stage 2.
W is the number of ranks of ``process_group``; or, with a mesh of ``instep.init(shard=ranks_per_host)``, of
one host, and hosts are replicas of each other.

    model = instep.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for micro_batch in model.micro_batches(G):
        loss_of(model, micro_batch).backward()
    instep.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, sections 5.2 and 5.3; in place, by a class of its own, as in torch's ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from instep.events import Recorder
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group
from instep.reduce.node_format import NodeFormat
from instep.shard import checks
from instep.shard.sharding import Sharding, ShardingOptions, subject_of
from instep.state.homes import Wrapped, home
from instep.step import optimizer_guard
from instep.step.micro_batches import DataSource, MicroBatch
from instep.step.nesting import WrappedOnce, require_reducible
from instep.verify.gradient_report import Report
from instep.verify.subject import Loss
from instep.verify.trial import verify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

M = TypeVar("M", bound=nn.Module)
KEY = "_instep_sharding"


class FullySharded(WrappedOnce):
    """What ``fully_shard`` adds to a module, whose class is derived from this one and its own.

    Between steps each parameter, trained or frozen, is this rank's shard: the same ``nn.Parameter`` object,
    of shape (n, 1, ...) with as many dims as the whole parameter; whole if this rank has all of it, and
    (0, 1, ...) if it has none. Buffers are replicated. A declared step has the bits of ``DataParallel`` with
    the same micro-batches, in either stage and for every number of ranks.

    In forward: the modules of a unit get whole parameters, and shards again when it has computed. Gathers
    are collective: every rank of a shard group runs the same units in the same order, also in an evaluation.
    A mismatch, or an exception on one rank, raises ``Desync`` on the others.

    In backward: as soon as a unit's gradients are complete, each rank gets its slice of every rank's and adds
    them. ``.grad`` is then the shard of the reduced gradient: element-wise edits, ``instep.clip_grad_norm_``,
    ``GradScaler`` and ``zero_grad()`` in both forms work on it; torch's clipping is refused. A second
    synchronised backward is added to it after the reduction. Under ``no_sync`` gradients are kept whole until
    the next synchronised backward.

    In ``step``: torch's own optimizers of the element-wise classes (AdamW, SGD, ...), made before or after
    ``fully_shard``, step the shards without communication, with the bits that whole parameters would have.
    Other classes (Muon, Adafactor, your own) are refused by name, and step whole parameters as an
    ``instep.ShardedOptimizer``. ``optimizer.state_dict()`` is refused after the first step, because it would
    have this rank's part alone: ``instep.save`` has all of it, for any number of ranks, and so has
    ``state_dict()`` of a ``ShardedOptimizer`` over the shards.

    ``state_dict()`` and ``load_state_dict()`` of the module work inside ``instep.gathered(model)``.

    Example:
        >>> model = instep.fully_shard(model, stage=3)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> loss_function(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> model.step_mode, model.placement
        ('undeclared', {'strategy': 'fully_shard', 'stage': 3})
        >>> model.group.size, model.recorder.rank, model.sharding.options.stage
        (1, 0, 3)
    """

    @property
    def sharding(self) -> Sharding:
        """The engine: units, gathers, reducer."""
        return cast(Sharding, self.__dict__[KEY])

    @property
    def group(self) -> Group:
        """All ranks that take part in a step, of all shard groups."""
        return self.sharding.group

    @property
    def recorder(self) -> Recorder:
        """The recorded events of its steps."""
        return self.sharding.recorder

    @property
    def step_mode(self) -> str | None:
        """The mode of the last step, "declared" or "undeclared"; None before the first."""
        return self.sharding.backward.step_mode

    @property
    def placement(self) -> dict[str, Any]:
        """What a run records of it: "strategy" and "stage"."""
        return {"strategy": "fully_shard", "stage": self.sharding.options.stage}

    def micro_batches(
        self, num_micro_batches: int | DataSource, *, step: int | None = None
    ) -> Iterator[MicroBatch]:
        """Declare a step of ``num_micro_batches`` micro-batches and yield those that this rank computes.

        As ``DataParallel.micro_batches``, with its one rule: index data by ``micro_batch.index``, never by
        rank. But ranks take turns: rank r computes r, r + W, r + 2W, ... After the last iteration ``.grad``
        is this rank's shard of the gradient of the step.

        Args:
            num_micro_batches: G, the number of micro-batches in the global batch; the bits depend on it. Or
                an ``instep.Loader``, which gives each micro-batch its ``data``.
            step: what the random numbers are keyed by; by default the declared steps so far.

        Yields:
            A ``MicroBatch`` for each that is this rank's.

        Raises:
            ValueError, Desync, ReplicasDiffer, PeerLost: as ``DataParallel.micro_batches``.
            RuntimeError: the module has left its group.

        Example:
            >>> for micro_batch in model.micro_batches(8):
            ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
            ...     loss_function(model(x[rows]), y[rows]).backward()
            >>> optimizer.step()
        """
        sharding = self.sharding
        if not sharding.session.close.alive:
            raise RuntimeError("this sharded module has left its group: join another one first")
        yield from sharding.session.micro_batches(sharding, num_micro_batches, step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank, without exchanging them, as in DDP.

        Example:
            >>> with model.no_sync():
            ...     loss_function(model(x[:4]), y[:4]).backward()
            >>> loss_function(model(x[4:8]), y[4:8]).backward()  # exchanges the sum of both
        """
        backward = self.sharding.backward
        before, backward.sync = backward.sync, False
        try:
            yield
        finally:
            backward.sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.nn.Module``, for the shards; also after a backward that raised.

        Args:
            set_to_none: False fills the gradients with zeros instead of dropping them.
        """
        self.sharding.hooks.ended()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def sync_gradients(self) -> None:
        """Reduce what was accumulated since the last reduction; a second call does nothing. Collective.

        Raises:
            ValueError: called inside of the loop over ``micro_batches``, which exchanges at its end.
            Desync, ReplicasDiffer, PeerLost: as ``micro_batches``.

        Example:
            >>> with model.no_sync():
            ...     loss_function(model(x), y).backward()
            >>> model.sync_gradients()
        """
        self.sharding.backward.synchronise()

    def materialise(self, init: Callable[[str, Tensor], None] | None = None, *, seed: int = 0) -> None:
        """Give values to parameters from the meta device, unit by unit; stage 3. Collective.

        In a script under ``instep run`` there is no group of ranks yet where models are made: each rank
        fills its part where the loop over ``run.steps`` begins, and only if the run has no state yet. Until
        then the parameters have no values, and take no memory.

        Args:
            init: ``init(name, tensor)`` fills one whole parameter in place. By default the module's own
                ``init_parameter`` does, else ``reset_parameters`` of its submodules.
            seed: with the name of a parameter it keys the random numbers of its values.

        Raises:
            ValueError: nothing fills a parameter, or ranks fill one differently; on all ranks.
            PeerLost: a rank did not come.

        Example:
            >>> with torch.device("meta"):
            ...     large = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
            >>> large = instep.fully_shard(large)
            >>> large.materialise()
            >>> large(x).shape
            torch.Size([64, 1])
        """
        self.sharding.materialise(init, seed)

    def verify(self, batch: Any, loss: Loss | None = None, *, rtol: float | None = None) -> Report:
        """Compare the distributed gradient with that of one process, on this model, stage and batch.

        As ``DataParallel.verify``: each rank makes one synchronised step on its batch, without an update;
        then it computes the gradient of every rank's batch again, without exchanges, and compares its shards
        with their mean. It restores everything when it returns or raises. Shards of weights are compared
        between shard groups: within one there is a single copy of them.

        It costs W + 1 forwards and backwards, and memory for a whole gradient and for the shards in float64.
        Collective.

        Args:
            batch, loss, rtol: as for ``DataParallel.verify``; ``loss`` is called with this module everywhere.
                With ``compute_dtype``, ``rtol`` is by default that of this dtype.

        Returns:
            The same report on every rank. ``GradientRow.rank`` is the one whose slice is the worst.

        Raises:
            ValueError, TypeError, InstepError: a rank raised in its part; all ranks raise, and name it.
            PeerLost: a rank did not come.

        Example:
            >>> report = model.verify((x, y), lambda model, batch: loss_function(model(batch[0]), batch[1]))
            >>> report.raise_for_error()
        """
        return verify(subject_of(self.sharding), self.sharding.process_group, batch, loss, rtol)

    def close(self) -> None:
        """Remove the hooks and give back the groups. The module has its own class again.

        Its parameters stay this rank's shards: call ``full_state_dict`` before, if you want the weights.

        Example:
            >>> weights = instep.full_state_dict(model)
            >>> model.close()
        """
        sharding = self.sharding
        sharding.close()
        del self.__dict__[KEY]
        self.__class__ = sharding.kind  # type: ignore[assignment]

    def __instep_state__(self) -> Wrapped:
        sharding, module = self.sharding, cast(nn.Module, self)
        return Wrapped(
            module=module,
            group=sharding.group,
            gradients=lambda: [bucket.reduced for bucket in sharding.reducer.buckets],
            scratch=lambda: sharding.reducer.scratch,
            counter=sharding,
            nodes=str(sharding.options.nodes),
            leave=sharding.leave,
            join=sharding.join,
            settled=lambda: sharding.reducer.settled(),
            fill=sharding.fill,
            micro_batch=lambda: sharding.reducer.micro_batch,
            reductions={"": sharding.reducer},
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()  # where a module's own copies without

    def __reduce__(self) -> Any:
        raise TypeError(
            "a fully sharded module cannot be copied or pickled, as it holds one rank's part: keep "
            "instep.full_state_dict(model), or load that into another module"
        )


def fully_shard(
    module: M,
    process_group: Mesh | ProcessGroup | None = None,
    stage: int = 3,
    compute_dtype: torch.dtype | None = None,
    *,
    units: Sequence[nn.Module] | None = None,
    init_sync: bool | str = True,
    find_unused_parameters: bool | None = None,
    broadcast_buffers: bool = True,
    seed: int = 0,
    overlap: bool = True,
    nodes: str = "float32",
    rounding: str = "nearest",
    device: torch.device | None = None,
    timeout_s: float | None = None,
) -> M:
    """Shard ``module`` over the ranks of a group, in place, and return it. Collective.

    Its class becomes a ``FullySharded`` too; see there for parameters, ``.grad`` and optimizers.

    Args:
        module: a module with contiguous parameters, without hooks on them, which no other wrapper or sharded
            optimizer has.
        process_group: as for ``DataParallel``. With a mesh of ``shard`` > 1 each shard group has all shards,
            and only reduced shards of gradients travel between shard groups, once per step.
        stage: 2 or 3.
        compute_dtype: of weights and gradients in forward and backward; floating inputs of the module and its
            units are cast. The shards that the optimizer steps are float32.
        units: submodules whose parameters are gathered, freed and reduced together; by default every entry of
            an outermost ``ModuleList`` or ``Sequential``. All other parameters, and those of several units,
            belong to the root, which stays gathered from forward to the end of backward.
        init_sync, find_unused_parameters, broadcast_buffers, seed, nodes, rounding: as for ``DataParallel``.
        overlap: False reduces at the end of each micro-batch, for parameters that get several gradients in
            one.
        device: where parameters from the meta device shall live; by default the CPU.
        timeout_s: deadline of every wait in seconds, where no mesh brings one.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: on all ranks; an argument is wrong, models differ, or a parameter cannot be sharded (not
            contiguous, a subclass, with a hook).
        PeerLost: a rank did not come.

    Example:
        >>> model = instep.fully_shard(model, stage=2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    """

    def consider() -> ShardingOptions:  # what this rank may refuse before it knows of the others
        require_reducible(module)
        checks.require_whole_layers(module)
        optimizer_guard.require_unowned([*module.parameters()])
        added = [name for name in vars(FullySharded) if not name.startswith("_")]
        taken = [name for name in added if hasattr(module, name) and not hasattr(nn.Module, name)]
        if taken:
            raise ValueError(
                f"the module has an attribute {taken[0]!r} of its own, which fully_shard would hide: give it "
                "another name, or shard a module around it"
            )
        rest = (init_sync, find_unused_parameters, seed, overlap)
        return ShardingOptions(stage, compute_dtype, *rest, NodeFormat(nodes, rounding, seed))

    sharding = Sharding(
        module,
        process_group,
        consider,
        units=units,
        device=device,
        timeout_s=timeout_s,
        broadcast_buffers=broadcast_buffers,
    )
    module.__dict__[KEY] = sharding
    module.__class__ = type(f"FullySharded{sharding.kind.__name__}", (FullySharded, sharding.kind), {})
    return module


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of sharded modules in ``module`` are whole on every rank. Collective.

    For reading, ``module.state_dict()``, ``save_pretrained``, and for writing, ``load_state_dict``: writes
    are kept, and every rank must write the same. Values are those that the optimizer steps: float32 with a
    smaller ``compute_dtype``. Each rank needs memory for all of them.

    Args:
        module: sharded by ``fully_shard``, as a whole or some of its parts.

    Raises:
        ValueError: inside a loop over ``micro_batches``.
        Desync, PeerLost: other ranks do something else, or one did not come.

    Example:
        >>> model = instep.fully_shard(model)
        >>> with instep.gathered(model):
        ...     shape = model[0].weight.shape
        >>> shape
        torch.Size([96, 8])
    """
    with ExitStack() as stack, torch.no_grad():
        for sharding in [m.__dict__[KEY] for m in module.modules() if KEY in m.__dict__]:
            optimizer_guard.require_between_steps(sharding.reducer.optimizer_parameters, "instep.gathered()")
            for unit in sharding.units:
                if not unit.is_made_whole:
                    stack.enter_context(unit.made_whole(sharding.gathers.masters(unit)))
        with torch.enable_grad():
            yield


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of ``module`` with whole tensors on every rank, in memory of its own. Collective.

    For other programs, and for an evaluation in one process. To resume training use ``instep.save``, for
    which no rank needs memory for all weights.

    Args:
        module: sharded by ``fully_shard``, as a whole or some of its parts, in a ``Pipeline``, wrapped, or
            plain.

    Returns:
        As ``module.state_dict()``, by the module's own names: tensors of full shape, on the devices of
        parameters and buffers, which later steps do not change. Values are those that the optimizer steps:
        float32 with a smaller ``compute_dtype``.

    Raises:
        ValueError: inside a loop over ``micro_batches``.
        Desync, PeerLost: other ranks do something else, or one did not come.

    Example:
        >>> model = instep.fully_shard(model)
        >>> weights = instep.full_state_dict(model)
        >>> weights["0.weight"].shape
        torch.Size([96, 8])
    """
    found = {}
    with gathered(module):
        for name, x in module.state_dict(keep_vars=True).items():
            if isinstance(x, Tensor):
                there = home(x)
                value = None if there is None else there.fetch(x)
                x = x.detach().clone() if value is None else value
            found[name] = x
    return found


fully_shard.__module__ = "instep"
full_state_dict.__module__ = "instep"
gathered.__module__ = "instep"
