"""``fully_shard``: stages 2 and 3, in place. The module stays itself, with its names and its parameters.

    stage 2   every rank has all weights, and a W-th of the gradients and of the optimizer's state
    stage 3   every rank has a W-th of the weights too; a unit's are gathered to compute, and freed after

Bytes per parameter and rank, Adam in float32: 4 + 4/W + 8/W in stage 2, 4/W + 4/W + 8/W in stage 3,
and beside it the largest units on their way. W are the ranks of ``process_group``; those of one host, with
a mesh of ``instep.init(shard=ranks_per_host)``, whose hosts are replicas of each other.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from instep.events import Recorder
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group
from instep.shard.sharding import LocalOptions, Sharding, ShardingOptions
from instep.state.homes import Wrapped, home
from instep.step.micro_batches import DataSource, MicroBatch
from instep.step.nesting import WrappedOnce, require_unwrapped
from instep.verify.gradient_report import Report
from instep.verify.subject import Loss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

M = TypeVar("M", bound=nn.Module)
KEY = "_instep_sharding"


class FullySharded(WrappedOnce):
    """What a sharded module can do beside what it could; its class is made of this one and its own.

    Parameters stay the same objects, with the same names and shapes. What is computed has the bits of
    ``DataParallel`` with the same micro-batches, in every stage and for every number of ranks.

    In backward, as soon as a unit's gradients are whole, each rank gets its slice of all ranks' and adds it
    to what it has; no rank ever has all of the reduced gradient. ``.grad`` then is a placeholder: it says
    that there is a gradient, and code that computes with it, as torch's clipping does, gets an error;
    ``instep.clip_grad_norm_`` and ``GradScaler`` reach what it stands for. ``zero_grad()`` discards it, with
    ``set_to_none=False`` too, a second synchronised backward adds to it, and under ``no_sync`` gradients
    are kept whole until the next synchronised backward.

    Optimizers are torch's own, of the elementwise classes (AdamW, SGD, ...), made before or after: in
    ``step``, which is collective, each rank steps its slices, with the bits that whole parameters would have.
    ``optimizer.state`` and ``optimizer.state_dict()`` have the moments of these slices alone; ``instep.save``
    keeps all, for any number of ranks, and so does ``state_dict()`` of a ``ShardedOptimizer``, which is made
    after. Classes that look at whole parameters (Adafactor, Muon, one's own) are refused by name in ``step``.

    Buffers and frozen parameters are every rank's; in stage 3 frozen parameters are sharded too.

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
        """What keeps it sharded."""
        found: Sharding = self.__dict__[KEY]
        return found

    @property
    def group(self) -> Group:
        """All ranks that share in a step, of all replicas."""
        return self.sharding.group

    @property
    def recorder(self) -> Recorder:
        """What has been recorded of its steps."""
        return self.sharding.recorder

    @property
    def step_mode(self) -> str | None:
        """Whichever the last step was, "declared" or "undeclared"; None before the first."""
        return self.sharding.backward.step_mode

    @property
    def placement(self) -> dict[str, Any]:
        """What a run is told to be: "strategy" and "stage"."""
        return {"strategy": "fully_shard", "stage": self.sharding.options.stage}

    def micro_batches(
        self, num_micro_batches: int | DataSource, *, step: int | None = None
    ) -> Iterator[MicroBatch]:
        """Declare a step of ``num_micro_batches`` micro-batches and yield those that this rank computes.

        As ``DataParallel.micro_batches``, with its one rule: index data by ``micro_batch.index``, never by
        rank. But ranks take turns: rank r computes r, r + W, r + 2W, ... After the last iteration ``.grad``
        says whether there is a gradient, whose pieces optimizers step with.

        Args:
            num_micro_batches: G, the number of micro-batches in the global batch; the bits depend on it. Or
                an ``instep.Loader``, which gives each micro-batch its ``data``.
            step: what the random numbers are keyed by; by default the declared steps so far.

        Yields:
            A ``MicroBatch`` for each that is this rank's.

        Raises:
            ValueError, Desync, ReplicasDiffer, PeerLost: as ``DataParallel.micro_batches``.

        Example:
            >>> for micro_batch in model.micro_batches(8):
            ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
            ...     loss_function(model(x[rows]), y[rows]).backward()
            >>> optimizer.step()
        """
        return self.sharding.micro_batches(num_micro_batches, step)

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
        """As ``torch.nn.Module``: of the shards, also after a backward that raised."""
        self.sharding.hooks.ended()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def sync_gradients(self) -> None:
        """Exchange what was accumulated since the last exchange; a second call does nothing. Collective.

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
        """Give values to parameters from the meta device, one unit after the other; stage 3. Collective.

        In a script under ``instep run`` the ranks have not met yet where models are made: parameters are
        filled where the loop over ``run.steps`` begins, each rank its part, and only if the run has no state
        yet. Until then they have no values, and take no memory.

        Args:
            init: ``init(name, tensor)`` fills one whole parameter in place. By default the module's own
                ``init_parameter`` does, else ``reset_parameters`` of its submodules.
            seed: with the name of a parameter it keys the random numbers of its values.

        Raises:
            ValueError: the stage is 2, or nothing fills a parameter; or ranks fill one differently, on all.
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

    def close(self) -> None:
        """End the sharding; the module has its own class again, and parameters stay this rank's shards.

        Take ``full_state_dict`` before, if the weights are wanted.

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
            nodes=str(sharding.options.node_format),
            leave=sharding.leave,
            join=sharding.join,
            settled=lambda: sharding.reducer.settled(),
            fill=sharding.fill,
            micro_batch=lambda: sharding.reducer.micro_batch,
            reductions={"": sharding.reducer},
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "a fully sharded module cannot be copied, as it holds one rank's part: load "
            "instep.full_state_dict(model) into another module"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a fully sharded module cannot be pickled, as it holds one rank's part: keep "
            "instep.full_state_dict(model)"
        )


class Verifiable(FullySharded):
    """Of a module that has no ``verify``; one that has keeps its own: ``model.sharding.verify`` is this.

    Example:
        >>> model = instep.fully_shard(model)
    """

    def verify(self, batch: Any, loss: Loss | None = None, *, rtol: float | None = None) -> Report:
        """Compare the distributed gradient with that of one process, on this model, stage and batch.

        As ``DataParallel.verify``: each rank makes one synchronised step on its batch, without an update;
        then it computes the gradient of every rank's batch again, without exchanges, and compares its slices
        with their mean. All is as before when it returns or raises. Weights in slices are compared between
        replicas alone: in a shard group there is one copy of them.

        It costs W + 1 forwards and backwards, and memory for a whole gradient and for the slices in float64.
        Collective.

        Args:
            batch, loss, rtol: as for ``DataParallel.verify``; ``loss`` is called with this module everywhere.
                With ``compute_dtype``, ``rtol`` is by default that of this dtype.

        Returns:
            The same report on every rank. ``GradientRow.rank`` is the one whose slice is the worst.

        Raises:
            ValueError, TypeError, InstepError: a rank raised in its part; all do, and name it.
            PeerLost: a rank did not come.

        Example:
            >>> report = model.verify((x, y), lambda model, batch: loss_function(model(batch[0]), batch[1]))
            >>> report.raise_for_error()
        """
        return self.sharding.verify(batch, loss, rtol=rtol)


def fully_shard(
    module: M,
    process_group: Mesh | ProcessGroup | None = None,
    stage: int = 3,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
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

    It becomes a ``FullySharded`` beside what it is; see there for ``.grad`` and for optimizers.

    Args:
        module: whose parameters no other wrapper or sharded optimizer has.
        process_group: as for ``DataParallel``. With a mesh of ``shard`` > 1 each shard group has the module
            in slices, and only their reduced gradients travel between shard groups, once per step.
        stage: 2 or 3.
        compute_dtype: of weights and gradients in forward and backward; floating inputs of the module and its
            units are cast. What the optimizer steps stays float32, in slices, gathered once per backward.
        reshard_after_forward: False keeps gathered weights until their gradients have come. Stage 3.
        units: submodules whose parameters are gathered and reduced together; by default every entry of an
            outermost ``ModuleList`` or ``Sequential``, and all the rest.
        init_sync, find_unused_parameters, broadcast_buffers, seed, nodes, rounding: as for ``DataParallel``.
        overlap: False, where a parameter gets several gradients in one micro-batch, sends them at its end.
        device: where parameters on the meta device shall live; by default the CPU.
        timeout_s: deadline of every wait in seconds, where no mesh brings one.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: on all ranks; an argument is wrong, models differ, or a parameter cannot be sharded.
        PeerLost: a rank did not come.

    Example:
        >>> model = instep.fully_shard(model, stage=2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    """

    def consider() -> ShardingOptions:  # what this rank may refuse before it knows of the others
        require_unwrapped(module)
        _require_plain(module)
        rest = (init_sync, find_unused_parameters, seed, overlap, nodes, rounding)
        return ShardingOptions(stage, compute_dtype, reshard_after_forward, *rest)

    local = LocalOptions(units, device, timeout_s)
    sharding = Sharding(module, process_group, consider, local, broadcast_buffers=broadcast_buffers)
    return _become_sharded(module, sharding)


def shardings(module: nn.Module) -> Iterator[Sharding]:
    """Of ``module`` and of what in it is sharded by itself."""
    return (found for m in module.modules() if (found := m.__dict__.get(KEY)) is not None)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of sharded modules in ``module`` are whole, on every rank. Collective.

    To read them, to save ``module.state_dict()``, or to write to them: what was written is kept when the
    block ends, and every rank has to write the same. Weights are what the optimizer steps: float32 where
    ``compute_dtype`` is less. Each rank needs memory for all of them.

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
    with ExitStack() as stack:
        for sharding in shardings(module):
            stack.enter_context(sharding.gathered())
        yield


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of ``module`` with all values, whole on every rank, in memory of its own. Collective.

    For other programs, for an evaluation in one process, for a copy that stays as it is; what training goes
    on from is ``instep.save``, where no rank needs memory for all of it.

    Args:
        module: sharded by ``fully_shard``, as a whole or some of its parts, in a ``Pipeline``, wrapped, or
            plain.

    Returns:
        As ``module.state_dict()``, by the module's own names: tensors of full shape, on the devices of
        parameters and buffers, which later steps do not change. Weights are what the optimizer steps:
        float32 where ``compute_dtype`` is less.

    Raises:
        Desync, PeerLost: other ranks do something else, or one did not come.

    Example:
        >>> model = instep.fully_shard(model)
        >>> weights = instep.full_state_dict(model)
        >>> weights["0.weight"].shape
        torch.Size([96, 8])
    """
    held = module.state_dict(keep_vars=True)
    fetched: dict[int, Tensor] = {}
    for sharding in shardings(module):
        for unit in sharding.units:
            fetched |= zip(map(id, unit.parameters), sharding.gathers.masters(unit), strict=True)
    for x in held.values():
        there = home(x) if isinstance(x, Tensor) and id(x) not in fetched else None
        if there is not None and (value := there.fetch(x)) is not None:
            fetched[id(x)] = value
    return {name: _own_copy(x, fetched) for name, x in held.items()}


def _own_copy(x: Any, fetched: Mapping[int, Tensor]) -> Any:
    if not isinstance(x, Tensor):
        return x
    return fetched[id(x)].clone() if id(x) in fetched else x.detach().clone()


def _become_sharded(module: M, sharding: Sharding) -> M:
    """Its class is one beside its own. A ``verify`` of its own it keeps, as it would in a wrapper."""
    added = FullySharded if hasattr(module, "verify") else Verifiable
    module.__dict__[KEY] = sharding
    module.__class__ = type(f"FullySharded{sharding.kind.__name__}", (added, sharding.kind), {})
    return module


def _require_plain(module: nn.Module) -> None:
    """Raise ``ValueError`` if ``module`` cannot change its class, or has attributes that would be hidden."""
    if isinstance(module, FullySharded):
        raise ValueError("the module is sharded already: close() it first, or shard a new one")
    if isinstance(module, WrappedOnce):
        raise ValueError(
            f"the module is wrapped in {type(module).__name__} already: shard what is in it, model.module, "
            "and leave the wrapper out"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "the module is compiled by torch.jit and can become no other class: shard a module around it "
            "(stage=2), or use DataParallel"
        )
    added = [name for name in vars(FullySharded) if not name.startswith("_")]
    taken = [name for name in added if hasattr(module, name) and not hasattr(nn.Module, name)]
    if taken:
        raise ValueError(
            f"the module has an attribute {taken[0]!r} of its own, which fully_shard would hide: give it "
            "another name, or shard a module around it"
        )


fully_shard.__module__ = "instep"
full_state_dict.__module__ = "instep"
gathered.__module__ = "instep"
