"""``DataParallel``: the module that a training loop wraps, and the two step modes it can be used in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instep.mesh.join import find_ranks
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none
from instep.net.clocks import measure
from instep.reduce.buckets import Caps
from instep.reduce.node_format import NodeFormat
from instep.replicate.comm_hook import CommHook, Hook
from instep.replicate.module_proxy import ModuleProxy
from instep.replicate.reducer import Reducer
from instep.replicate.strategies import find
from instep.state.alignment import align
from instep.state.boxes import BoxHome
from instep.state.homes import Wrapped, home, homes
from instep.step import optimizer_guard
from instep.step.agreement import agree_on_structure, agree_on_values, broadcast_values, compare_threads
from instep.step.backward import StepSession
from instep.step.micro_batches import DataSource, MicroBatch
from instep.step.nesting import WrappedOnce, require_supported
from instep.step.parameter_registry import ParameterRegistry, require_read_only
from instep.step.reduction import ReductionOptions
from instep.verify.gradient_report import Report
from instep.verify.subject import GradientPiece, Loss, Subject, Value
from instep.verify.trial import verify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Keywords and methods of torch's ``DistributedDataParallel`` (up to 2.15) that are not here, and what to do
# instead.
REFUSED = {
    "device_ids": "move the module to its device before wrapping it, and inputs in the training loop",
    "output_device": "outputs stay on the device of the module: move them in the training loop",
    "dim": "inputs are not scattered: give each rank a batch of its own",
    "device_mesh": "pass it as process_group",
    "bucket_cap_mb_list": "pass the list as bucket_cap_mb",
    "forward_sync_buffers": "pass broadcast_buffers",
    "check_reduction": "leave it out: every reduction is checked",
    "skip_all_reduce_unused_params": "leave it out: an unused parameter is a zero in a bucket",
    "batched_grad_copy": "leave it out: gradients are copied as they appear",
    "lazy_bucket_allocation": "leave it out: gradients are views of buckets that live as long as the wrapper",
    "delay_all_reduce_named_params": "wrap these parameters in a DataParallel of their own",
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params",
    "mixed_precision": "use torch.autocast in the training loop: gradients are reduced in float32",
}
METHODS = {
    "join": "ranks need not have as many batches: declare steps, for micro_batch in model.micro_batches(G)",
    "_set_static_graph": "pass static_graph=True",
    "_get_ddp_logging_data": "a run records its steps, and instep.trace(model) those of any loop",
}


class DataParallel(WrappedOnce, ModuleProxy):
    """Trains ``module`` on every rank of a group with gradients that all ranks share.

    In an ordinary loop it does what torch's ``DistributedDataParallel`` does: when ``loss.backward()``
    returns, every ``.grad`` is the mean over the ranks. Inside ``for micro_batch in model.micro_batches(G)``
    the step is *declared*: every ``.grad`` is the sum over G micro-batches divided by their weights, with the
    same bits on any number of ranks.

    At construction the ranks compare their models and take rank 0's values; weights and buffers that are not
    aligned or have gaps get other memory, see ``state/alignment.py``. In backward gradients land in buckets,
    which the strategy sends; the call returns when they are reduced, or raises ``ReplicasDiffer`` where ranks
    have different weights. An optimizer step with a gradient that was never exchanged raises. After a
    backward that raised, the next forward gives the step up: every ``.grad`` is None again.

    The wrapper is a ``ModuleProxy``: ``state_dict``, ``named_parameters`` and every attribute that the
    wrapper does not define are the module's.

    Args:
        module: on the device where it is to be trained.
        process_group: a mesh (its ``dp`` and ``shard`` axes), ``mesh[axis]``, a torch process group, or a
            ``DeviceMesh`` (its one dim, or the one with a name such as "dp"); by default the registered mesh,
            else torch's default group, else this process alone.
        strategy: "naive", "flat", "overlap" or "bucketed"; the same bits at another speed.
        bucket_cap_mb: bucket size in MiB; a number, one per bucket, or a callable on the parameters' sizes.
            "auto" measures the first reductions, then all ranks take the size that rank 0 computes; see
            ``replicate/auto_cap.py``.
        ordered: sum in the fixed order of the sum tree. False is the backend's plain all-reduce.
        init_sync: True takes rank 0's parameters and buffers, "verify" raises if values differ, False does
            neither. Structure is always compared.
        nodes: format of every sum in the tree: "float32", "bfloat16" or "int8" travel as 4, 2 or 1 byte per
            element. The gradients change, and not with the number of ranks; see docs/strategies.md.
        rounding: of smaller nodes: "nearest", or "stochastic", which is right on average, keyed by ``seed``.
        check_replicas: in each exchange ranks compare a sample of their weights, and which were written to by
            something other than an optimizer's step, without a message; see ``step/replica_watch.py``.
        find_unused_parameters: a parameter that a rank does not use counts as zero there; None warns once,
            False raises, True is quiet.
        static_graph: as ``find_unused_parameters=True``, where that is False.
        gradient_as_bucket_view: of no effect: gradients are views of their buckets.
        broadcast_buffers: rank 0's buffers for all, once per synchronised undeclared step.
        seed: keys the random numbers of declared steps.
        timeout_s: deadline of every wait in seconds, where no mesh brings one; 300 by default.
        of_ddp: other keywords of torch's ``DistributedDataParallel`` are refused with what to do instead.

    Raises:
        ValueError: on all ranks; they hold different models, or a module that cannot be wrapped: sparse
            gradients, TorchScript, an embedding with ``max_norm``, another wrapper in it or around it.
        RuntimeError: no parameter requires a gradient.
        TypeError: an unknown keyword (on other ranks a ValueError names this one); or the wrapper is copied
            or pickled.
        PeerLost: a rank did not come.

    Example:
        >>> mesh = instep.init()
        >>> model = instep.DataParallel(model)
        >>> loss_function(model(x), y).backward()  # each rank with its own x and y
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> model.step_mode, model.placement
        ('undeclared', {'strategy': 'bucketed', 'bucket_mb': 25.0})
    """

    __module__ = "instep"

    def __init__(
        self,
        module: nn.Module,
        process_group: Mesh | DeviceMesh | ProcessGroup | None = None,
        strategy: str = "bucketed",
        bucket_cap_mb: Caps | str = 25,
        *,
        ordered: bool = True,
        init_sync: bool | str = True,
        nodes: str = "float32",
        rounding: str = "nearest",
        check_replicas: bool = True,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        seed: int = 0,
        timeout_s: float | None = None,
        **of_ddp: Any,
    ) -> None:
        super().__init__(module)
        require_group(process_group)
        if static_graph and find_unused_parameters is False:
            find_unused_parameters = True

        def options() -> ReductionOptions:
            require_supported_keywords(of_ddp)
            if init_sync not in (True, False, "verify"):
                raise ValueError(f"init_sync={init_sync!r}: expected True, False or 'verify'")
            kind, format = find(strategy), NodeFormat(nodes, rounding, seed)
            unused = find_unused_parameters
            return ReductionOptions(kind, bucket_cap_mb, ordered, unused, check_replicas, format)

        self._same_on_all_ranks = {
            "init_sync": init_sync,
            "strategy": strategy,
            "bucket_cap_mb": "a function" if callable(bucket_cap_mb) else bucket_cap_mb,
            "ordered": ordered,
            "nodes": nodes,
            "rounding": rounding,
            "check_replicas": check_replicas,
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
            "seed": seed,
        }
        self._strategy, self._seed, self.next_step = strategy, seed, 0
        self._broadcast_buffers = broadcast_buffers
        self._comm_hook: CommHook | None = None
        self._process_group, self._timeout_s = process_group, timeout_s
        self._bind(options)
        self._constructed()
        try:
            if init_sync == "verify":
                agree_on_values(module, self.group)
            elif init_sync:
                broadcast_values(module, self.group)
                self._reducer.watch.settled()
        except BaseException:
            self.close()
            raise

    def _bind(self, options: Callable[[], ReductionOptions]) -> None:
        """Take part in the process group: hooks, reducer, keys. Collective; all raise, or none."""
        self.group, self.recorder = find_ranks(self._process_group, self._timeout_s, by_host=True)
        try:
            registry, self._reducer = all_or_none(
                self.group,
                "the preparation of models",
                lambda: self._prepare(options()),
                errors=(ValueError,),
            )
            self._require_agreement()
        except BaseException:
            self.group.close()
            raise
        self._options = self._reducer.options
        if self._comm_hook is not None:
            self._reducer.reduce_by(self._comm_hook)
        self._session = StepSession(
            self,
            self.module,
            self._reducer,
            registry,
            self._reducer.parameters[0].device,
            seed=self._seed,
            broadcast=self._broadcast_buffers,
        )

    def _prepare(self, options: ReductionOptions) -> tuple[ParameterRegistry, Reducer]:
        """What this rank may refuse; nothing is changed yet but where weights lie."""
        require_supported(self.module)
        registry = ParameterRegistry(self.module)
        if self.group.size > 1:
            require_read_only(self.module)
        names, parameters = [name for name, _ in registry.trainable], [p for _, p in registry.trainable]
        optimizer_guard.require_unowned(parameters)
        align([*self.module.parameters(), *self.module.buffers()])
        return registry, Reducer(names, parameters, self.group, self.recorder, options)

    def _require_agreement(self) -> None:
        """Raise on all ranks if their models differ, or if there is nothing to train. Collective."""
        agree_on_structure(self.module, self._same_on_all_ranks, self.group)
        if not self._reducer.parameters:
            raise RuntimeError(
                "no parameter of the module requires a gradient, so there is nothing to exchange: use the "
                "module as it is, or unfreeze the parameters to train, then wrap"
            )
        compare_threads(self.module, self.group)
        self._reducer.exchange.offsets_ns = measure(self.group).offsets_ns

    @property
    def step_mode(self) -> str | None:
        """ "declared" or "undeclared", whichever the last step was; None before the first."""
        return self._session.backward.step_mode

    @property
    def placement(self) -> dict[str, Any]:
        """How gradients travel: "strategy", "bucket_mb" if it is one number, or has been chosen, "ordered" if
        they are not."""
        caps = self._reducer.caps
        size = {"bucket_mb": float(caps)} if isinstance(caps, int | float) else {}
        order = {} if self._options.ordered else {"ordered": False}
        return {"strategy": self._strategy, **size, **order}

    def micro_batches(
        self, num_micro_batches: int | DataSource, *, step: int | None = None
    ) -> Iterator[MicroBatch]:
        """Declare a step of ``num_micro_batches`` micro-batches and yield those that this rank computes.

        The one rule: the data of a micro-batch is a function of ``step`` and ``micro_batch.index``, never of
        the rank. So no ``DistributedSampler``: all ranks have the same order of samples, and each indexes it
        by its own micro-batches, 3, 3 and 2 of 8 on three ranks.

        In the loop: one forward and one backward per micro-batch, of a loss without division (see
        ``MicroBatch`` for weights). After it: ``.grad`` is the mean over all G, on all ranks. Leaving early
        discards this rank's part and makes the others raise ``Desync``. In ``zip``, ``micro_batches`` comes
        first: an iterator before it that ends leaves the loop in its last iteration.

        Args:
            num_micro_batches: G, the number of micro-batches in the global batch; the bits depend on it. Or
                an ``instep.Loader``, which gives each micro-batch its ``data``.
            step: what the random numbers are keyed by; by default the declared steps so far.

        Yields:
            A ``MicroBatch`` for each that is this rank's; none where there are more ranks than micro-batches.

        Raises:
            ValueError: a rule of declared steps is broken (a buffer changed in forward by something else
                than a norm, a micro-batch without backward, a gradient left over from before), or there is a
                communication hook.
            Desync: another rank left the loop, or declared another step; on all ranks.
            ReplicasDiffer: the ranks have different weights; on all ranks.
            PeerLost: a rank did not come.

        Example:
            >>> for step in range(2):
            ...     for micro_batch in model.micro_batches(8, step=step):  # of 4 samples each
            ...         first = step * 32 + micro_batch.index * 4
            ...         rows = order[first : first + 4]
            ...         loss_function(model(x[rows]), y[rows]).backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        yield from self._declaring().micro_batches(self, num_micro_batches, step)

    def _declaring(self) -> StepSession:
        """The session, for a declared step."""
        self._check_open()
        if self._comm_hook is not None:
            raise ValueError(
                "a declared step with a communication hook: it has the same bits on any number of ranks, and "
                "the hook would replace the sum that gives them. Use the plain loop, or no hook"
            )
        return self._session

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them. Forward *and* backward belong inside, as in DDP.

        Example:
            >>> with model.no_sync():
            ...     loss_function(model(x[:4]), y[:4]).backward()
            >>> loss_function(model(x[4:8]), y[4:8]).backward()  # exchanges the sum of both
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backwards of forwards from now on exchange gradients: the switch behind ``no_sync``.

        As in torch's DDP, a loop may set it before each forward instead of entering a block.

        Example:
            >>> model.require_backward_grad_sync = False
            >>> loss_function(model(x), y).backward()  # accumulates
            >>> model.require_backward_grad_sync = True
        """
        return self._session.backward.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._session.backward.sync = bool(on)

    def sync_gradients(self) -> None:
        """Exchange what was accumulated since the last exchange; a second call does nothing. Collective.

        Raises:
            ValueError: called inside of the loop over ``micro_batches``, which exchanges at its end.
            RuntimeError: the wrapper is closed.
            Desync, ReplicasDiffer, PeerLost: as ``micro_batches``.

        Example:
            >>> with model.no_sync():
            ...     loss_function(model(x), y).backward()
            >>> model.sync_gradients()  # .grad is the mean over the ranks
        """
        self._check_open()
        self._session.backward.synchronise()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """From now on ``hook(state, bucket)`` reduces each bucket of gradients, as in torch's DDP.

        It is given a ``GradBucket`` with this rank's gradients and returns a future of what they become. The
        hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` can be used. It replaces the ordered sum:
        declared steps are refused, and weights are not compared. Call it on every rank, before the first
        backward.

        Args:
            state: handed to the hook as it is; for torch's, the process group or None.
            hook: ``hook(state, bucket)`` returns a ``torch.futures.Future`` of a tensor of the size of
                ``bucket.buffer()``, flat, which is the gradient to go on with: the mean, not the sum.

        Raises:
            TypeError: it is not callable.
            ValueError: ``nodes`` are rounded, and a hook adds by itself.
            RuntimeError: there is one already, or the wrapper is closed.

        Example:
            >>> def halved(state, bucket):  # a mean over two ranks would be all-reduced here
            ...     future = torch.futures.Future()
            ...     future.set_result(bucket.buffer() / 2)
            ...     return future
            >>> model.register_comm_hook(None, halved)
            >>> loss_function(model(x), y).backward()
        """
        if not callable(hook):
            raise TypeError(f"communication hook must be callable, got {type(hook).__name__}")
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook can only be called once: this model has a hook already")
        self._check_open()
        self._comm_hook = self._reducer.reduce_by(CommHook(state, hook))

    def verify(self, batch: Any, loss: Loss | None = None, *, rtol: float | None = None) -> Report:
        """Compare the distributed gradient with that of one process, on this model, strategy and batch.

        Each rank makes one synchronised step on its batch, without an update; then it computes the gradient
        of every rank's batch again, without exchanges, and compares its own with their mean. Weights,
        buffers, gradients, torch's random generators, training mode and the wrapper are left as they were.
        W + 1 forwards and backwards, and memory for some 5 copies of the model.
        Random numbers have to come from torch's default generators. Collective.

        Args:
            batch: what this rank would train on, of any size: a tensor, or tensors in dicts (with strings for
                keys), lists and tuples, beside numbers, strings and None.
            loss: ``loss(model, batch)`` returns the scalar mean over the batch; ``model`` is this wrapper,
                and later the bare module. Without it the model is called with the items of a list or
                tuple, the keywords of a dict, or the tensor; the loss is its output, ``output.loss`` or
                ``output["loss"]``.
            rtol: allowed error, relative to the norm of each gradient; by default 1e-5, 1e-8 for float64,
                2e-3 for float16 and 1.6e-2 for bfloat16.

        Returns:
            The same report on every rank.

        Raises:
            ValueError, TypeError, InstepError: a rank raised in its part; all do, and name it.
            PeerLost: a rank did not come.

        Example:
            >>> report = model.verify((x, y), lambda model, batch: loss_function(model(batch[0]), batch[1]))
            >>> report.raise_for_error()
        """
        self._check_open()
        parameters = self._reducer.parameters
        subject = Subject(
            model=self,
            backward=self._session.backward,
            strategy=self._strategy,
            seed=self._seed,
            copy=self.group.rank,
            pieces=[self._piece(i, p) for i, p in enumerate(parameters)],
            values=[Value(name, 0, p) for name, p in self.module.named_parameters()],
            alone=self._as_one_rank,
        )
        return verify(subject, self._process_group, batch, loss, rtol)

    def close(self) -> None:
        """Remove the hooks, end the lane, release the private group. Also happens when it is collected.

        Example:
            >>> model.close()
        """
        self._session.close()

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            raise AttributeError(f"DataParallel has no {name}(), as torch's wrapper has: {METHODS[name]}")
        return super().__getattr__(name)

    def __instep_state__(self) -> Wrapped:
        reducer = self._reducer
        return Wrapped(
            module=self.module,
            group=max([self.group, *(x.everyone for x in self._boxes)], key=lambda group: group.size),
            gradients=lambda: [bucket.home for bucket in reducer.buckets],
            scratch=lambda: [
                *(x for bucket in reducer.buckets for x in bucket.counter.spares),
                *reducer.exchange.scratch,
            ],
            counter=self,
            nodes=str(self._options.nodes),
            leave=lambda: self._session.abandon(),
            join=self._join,
            settled=lambda: reducer.watch.settled(),
            micro_batch=lambda: reducer.micro_batch,
            reductions={"": reducer},
        )

    def _join(self, mesh: Mesh) -> None:
        before = self._session.backward
        self._process_group = mesh
        for boxes in self._boxes:
            boxes.join(mesh)
        with before.registry.as_wrapped():
            self._bind(lambda: self._options)
        now = self._session.backward
        now.sync, now.step_mode = before.sync, before.step_mode

    @contextmanager
    def _as_one_rank(self) -> Iterator[list[Tensor]]:
        """Layers that are cut are whole inside."""
        registry, whole = self._session.backward.registry, dict[int, nn.Parameter]()
        with ExitStack() as stack:
            stack.callback(registry.stand_down)
            for boxes in self._boxes:
                whole |= stack.enter_context(boxes.as_one_rank(self.module))
            for _, p in registry.trainable:
                if id(p) in whole:
                    registry.stand_for(whole[id(p)], p)
            yield [whole.get(id(p), p) for p in self._reducer.parameters]

    @staticmethod
    def _piece(position: int, p: Tensor) -> GradientPiece:
        there = home(p)
        if not isinstance(there, BoxHome):
            return GradientPiece.whole(position, p)
        return GradientPiece(position, partial(there.part_of, p), lambda: p.grad)

    @property
    def _boxes(self) -> list[BoxHome]:
        """Of layers that are cut."""
        return [x for x in homes(self.module.parameters()) if isinstance(x, BoxHome)]

    def _check_open(self) -> None:
        if not self._session.close.alive:
            raise RuntimeError("this DataParallel is closed: wrap model.module again")


def require_supported_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise for the first of ``keywords`` that asks for something; None, False and 0 ask for nothing.

    Raises:
        TypeError: a keyword that neither torch nor instep knows.
        ValueError: a keyword of torch's that has no meaning here.
    """
    for name, value in keywords.items():
        if name not in REFUSED:
            raise TypeError(f"DataParallel got an unknown keyword {name!r}")
        if value:
            raise ValueError(f"{name} has no meaning here: {REFUSED[name]}")


def require_group(process_group: Any) -> None:
    """Raise ``TypeError`` for devices as the second argument, which they are in torch's signature."""
    if isinstance(process_group, list | tuple | Integral | str | torch.device):
        raise TypeError(
            f"process_group: expected a mesh or a process group, got {process_group!r}: devices have no "
            f"meaning here: {REFUSED['device_ids']}"
        )
