"""``DataParallel``: the module that a training loop wraps, and the two step modes it can be used in."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from instep.mesh.join import find_ranks, num_ranks
from instep.mesh.mesh import Mesh, registered_mesh
from instep.net.agree import all_or_none, attempt
from instep.net.clocks import measure
from instep.net.device import generators, marks_for
from instep.reduce.buckets import Caps
from instep.reduce.node_format import NodeFormat
from instep.replicate.comm_hook import CommHook, Hook, check
from instep.replicate.ddp_keywords import allowed, consume, require_no_group, second_place, shared_options
from instep.replicate.own_names import OwnNames
from instep.replicate.reducer import Reducer, sparse_positions
from instep.replicate.strategies import find
from instep.rng.keys import LeafKeys
from instep.state.alignment import align
from instep.state.homes import Wrapped
from instep.step import optimizer_guard
from instep.step.agreement import agree_on_structure, agree_on_values, broadcast_values, compare_threads
from instep.step.backward import Backward, release
from instep.step.micro_batches import DataSource, DeclaredStep, MicroBatch
from instep.step.nesting import WrappedOnce, require_unwrapped
from instep.step.parameter_registry import ParameterRegistry, require_read_only
from instep.step.reduction import ReductionOptions
from instep.verify.gradient_report import Report
from instep.verify.subject import GradientPiece, Loss, Subject, Value
from instep.verify.trial import verify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


UNBOUND = (
    "this model was loaded from a pickle, and has not been used through its DataParallel since, so that its "
    "gradients are this rank's alone: call the wrapper, on every rank, and not its module"
)
# What a wrapper has by taking part in a group. A pickle leaves it out; it is made when it is first asked for.
OF_ITS_GROUP = frozenset({"group", "recorder", "_reducer", "_declared", "_backward", "_unbind"})


class DataParallel(WrappedOnce, OwnNames):
    """Trains ``module`` on every rank of a group with gradients that all ranks share.

    In an ordinary loop it does what torch's ``DistributedDataParallel`` does: when ``loss.backward()``
    returns, every ``.grad`` is the mean over the ranks. Inside ``for micro_batch in model.micro_batches(G)``
    the step is *declared*: every ``.grad`` is the sum over G micro-batches divided by their weights, with the
    same bits on any number of ranks.

    At construction: the ranks compare their models and take rank 0's values; weights and buffers that are not
    aligned or have gaps get other memory, see ``state/alignment.py``. In forward: nothing but a hook on the
    output. In backward: gradients land in buckets, which the strategy sends; the call returns
    when they are reduced, or raises ``ReplicasDiffer`` where a rank has other weights than the others. Before
    an optimizer step: a gradient that was never exchanged raises. After a backward that raised, the next
    forward gives the step up: every ``.grad`` is None again.

    Defaults that differ from torch's: ``find_unused_parameters`` is None (a parameter that a rank does not
    use counts as zero there, with one warning; False raises, True is quiet), gradients are views of their
    buckets, ``state_dict`` and ``named_parameters`` have the module's own names.

    Args:
        module: on the device where it shall train.
        process_group: a mesh (its ``dp`` and ``shard`` axes), ``mesh[axis]``, a torch process group, or a
            ``DeviceMesh`` (its one dim, or the one with a name such as "dp"), which ``device_mesh=`` takes
            too; by default the registered mesh, else torch's default group, else this process alone. A mesh
            may be the second argument, too.
        strategy: "naive", "flat", "overlap" or "bucketed"; the same bits, at another speed.
        bucket_cap_mb: bucket size in MiB; a number, one per bucket, or a callable on the parameters' sizes.
        ordered: sum in the fixed order of the sum tree. False is the backend's plain all-reduce.
        nodes: format of every sum in the tree: "float32", "bfloat16" or "int8" travel as 4, 2 or 1 byte per
            element. The gradients change, and not with the number of ranks; see docs/strategies.md.
        rounding: of smaller nodes: "nearest", or "stochastic", which is right on average, keyed by ``seed``.
        check_replicas: in each exchange ranks compare a sample of their weights, and which were changed by
            something else than an optimizer's step, at no message; see ``step/replica_watch.py``.
        init_sync: True takes rank 0's parameters and buffers, "verify" raises if values differ, False does
            neither. Structure is always compared.
        find_unused_parameters: see above.
        broadcast_buffers, forward_sync_buffers: False in one of them keeps each rank's own buffers; else all
            have rank 0's, once per synchronised undeclared step.
        seed: keys the random numbers of declared steps.
        timeout_s: deadline of every wait in seconds, where no mesh brings one; 300 by default.
        device_mesh, bucket_cap_mb_list: torch's words for ``process_group`` and ``bucket_cap_mb``.
        device_ids, output_device, dim: of no effect, with a warning: nothing is moved or scattered.
        others: every other keyword of torch's ``DistributedDataParallel``, up to 2.15, is known; one
            without effect warns, and what is not offered is refused with the reason.

    Raises:
        ValueError: on all ranks; they hold different models, an embedding rescales its weight in forward
            (``max_norm``), or torch's DDP or FSDP has a part of the module. Wrapping this one in DDP or FSDP
            raises it too.
        RuntimeError: no parameter requires a gradient.
        TypeError: an argument before ``process_group`` is a mesh or a group, given without its name; or a
            keyword is known neither to torch nor to instep (on other ranks a ValueError names this one).
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
    _comm_hook: CommHook | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool | str = True,
        process_group: Mesh | DeviceMesh | ProcessGroup | None = None,
        bucket_cap_mb: Caps | None = None,
        find_unused_parameters: bool | None = None,
        *,
        strategy: str = "bucketed",
        ordered: bool = True,
        nodes: str = "float32",
        rounding: str = "nearest",
        check_replicas: bool = True,
        seed: int = 0,
        timeout_s: float | None = None,
        device_mesh: DeviceMesh | None = None,
        bucket_cap_mb_list: Any = None,
        forward_sync_buffers: bool | None = None,
        **others: Any,
    ) -> None:
        super().__init__(module)
        device_ids, process_group = second_place(device_ids, process_group, device_mesh)
        before_group = {"device_ids": device_ids, "output_device": output_device, "dim": dim}
        require_no_group(**before_group, broadcast_buffers=broadcast_buffers, init_sync=init_sync)
        caps = next((caps for caps in (bucket_cap_mb_list, bucket_cap_mb) if caps is not None), 25)
        self._arguments: dict[str, Any] = {
            "process_group": process_group,
            "device_mesh": device_mesh,
            "init_sync": init_sync,
            "strategy": strategy,
            "bucket_cap_mb": caps,
            "ordered": ordered,
            "nodes": nodes,
            "rounding": rounding,
            "check_replicas": check_replicas,
            "find_unused_parameters": allowed(find_unused_parameters, others),
            "broadcast_buffers": broadcast_buffers,
            "forward_sync_buffers": forward_sync_buffers,
            "seed": seed,
            "timeout_s": timeout_s,
        }
        self._seed, self.next_step = seed, 0
        considered = attempt(lambda: self._consider(others | before_group))
        self._broadcast_buffers = False not in (broadcast_buffers, forward_sync_buffers)
        self._bind(self._process_group, timeout_s, considered)
        if (warning := considered()) and self.group.rank == 0:
            warnings.warn(warning, stacklevel=2)
        try:
            if init_sync == "verify":
                agree_on_values(module, self.group)
            elif init_sync:
                broadcast_values(module, self.group)
                self._reducer.watch.settled()
        except BaseException:
            self.close()
            raise

    def _bind(
        self,
        process_group: Mesh | DeviceMesh | ProcessGroup | None,
        timeout_s: float | None,
        considered: Callable[[], object] = lambda: None,
    ) -> None:
        """Take part in ``process_group``: hooks, reducer, keys; if ``considered`` raises, only to tell it."""
        self.group, self.recorder = find_ranks(process_group, timeout_s, by_host=True)
        try:
            registry, self._reducer = self._compare(considered)
        except BaseException:
            self.group.close()
            raise
        parameters = self._reducer.parameters
        optimizer_guard.accept(self.module.parameters())
        device = parameters[0].device if parameters else torch.device("cpu")
        self.recorder.marks = self.recorder.marks or marks_for(device)
        keys = LeafKeys(self.module, self._seed, generators(device))
        if self._comm_hook is not None:
            self._reducer.reduce_by(self._comm_hook)
        self._declared = DeclaredStep(self.module, self._reducer, keys, registry)
        # A scripted module takes no hooks; its forward is then watched where the wrapper is called.
        called = self if isinstance(self.module, torch.jit.RecursiveScriptModule) else self.module
        self._backward = Backward(self._declared, broadcast=self._broadcast_buffers, called=called)
        self._unbind = weakref.finalize(self, release, self._backward.hooks, self._reducer.lane, self.group)
        optimizer_guard.watch(self._reducer, registry.frozen, self._unbind)
        self._is_bound = True

    def _consider(self, others: Mapping[str, Any]) -> str:
        """Take the arguments over, if this rank can; the warning that is due for ``others``."""
        given = self._arguments
        if given["init_sync"] not in (True, False, "verify"):
            raise ValueError(f"init_sync={given['init_sync']!r}: expected True, False or 'verify'")
        nodes = NodeFormat(given["nodes"], given["rounding"], self._seed)
        unused, checks = given["find_unused_parameters"], given["check_replicas"]
        self._options = ReductionOptions(
            find(given["strategy"]), given["bucket_cap_mb"], given["ordered"], unused, checks, nodes
        )
        return consume(others)

    def _compare(self, considered: Callable[[], object]) -> tuple[ParameterRegistry, Reducer]:
        """All ranks have the same module, which can be wrapped in the same way, or all raise."""
        prepared = all_or_none(
            self.group, "the preparation of models", lambda: self._prepare(considered), errors=(ValueError,)
        )
        agree_on_structure(self.module, shared_options(self._arguments), self.group)
        if not prepared[0].trainable:
            raise RuntimeError(
                "no parameter of the module requires a gradient, so that there is nothing to exchange: use "
                "the module as it is, or unfreeze what shall be trained, then wrap"
            )
        compare_threads(self.module, self.group)
        prepared[1].exchange.offsets_ns = measure(self.group).offsets_ns
        return prepared

    def _prepare(self, considered: Callable[[], object]) -> tuple[ParameterRegistry, Reducer]:
        """What this rank may refuse; nothing is changed yet but where weights lie."""
        considered()
        require_unwrapped(self.module)
        registry = ParameterRegistry(self.module)
        if self.group.size > 1:
            require_read_only(self.module)
        names, parameters = [name for name, _ in registry.trainable], [p for _, p in registry.trainable]
        optimizer_guard.require_unowned(parameters)
        align([*self.module.parameters(), *self.module.buffers()])
        sparse = sparse_positions(self.module, parameters)
        return registry, Reducer(names, parameters, self.group, self.recorder, self._options, sparse)

    def rebind(
        self, process_group: Mesh | DeviceMesh | ProcessGroup | None, timeout_s: float | None = None
    ) -> None:
        """Go on over another group, between two steps; for survivors of a lost rank. Collective over it.

        Args:
            process_group, timeout_s: as when the model was wrapped.

        Raises:
            ValueError, PeerLost: as when the model was wrapped.

        Example:
            >>> model.close()  # the old group
            >>> model.rebind(instep.init())
        """
        self._unbind()
        self._arguments |= {"process_group": process_group, "device_mesh": None, "timeout_s": timeout_s}
        self._bind(process_group, timeout_s)

    @property
    def step_mode(self) -> str | None:
        """ "declared" or "undeclared", whichever the last step was; None before the first."""
        return self._backward.step_mode

    @property
    def placement(self) -> dict[str, Any]:
        """How gradients travel: "strategy", "bucket_mb" if it is one number, "ordered" if they are not."""
        caps = self._options.caps
        size = {"bucket_mb": float(caps)} if isinstance(caps, int | float) else {}
        order = {} if self._options.ordered else {"ordered": False}
        return {"strategy": self._arguments["strategy"], **size, **order}

    @property
    def _process_group(self) -> Mesh | DeviceMesh | ProcessGroup | None:
        device_mesh = self._arguments["device_mesh"]
        found: Mesh | DeviceMesh | ProcessGroup | None = (
            self._arguments["process_group"] if device_mesh is None else device_mesh
        )
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_bound and torch.is_grad_enabled():
            self._bind(None, self._arguments["timeout_s"])
        return self.module(*args, **kwargs)

    def micro_batches(
        self, num_micro_batches: int | DataSource, *, step: int | None = None
    ) -> Iterator[MicroBatch]:
        """Declare a step of ``num_micro_batches`` micro-batches and yield those that this rank computes.

        The one rule: the data of a micro-batch is a function of ``step`` and ``micro_batch.index``, never of
        the rank. No ``DistributedSampler`` then: all ranks have the same order of samples, and each indexes
        it by the micro-batches that it is given, 3, 3 and 2 of 8 on three ranks. So the step is the same, to
        the bit, on any number of ranks.

        In the loop: one forward and one backward per micro-batch, of a loss that is divided by nothing (see
        ``MicroBatch`` for weights). After it: ``.grad`` is the mean over all G, on all ranks. All run it to
        its end; leaving early discards this rank's part and makes the others raise ``Desync``. In ``zip``,
        ``micro_batches`` comes first: an iterator before it that ends leaves the loop in its last iteration.

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
        self._check_open()
        if self._comm_hook is not None:
            raise ValueError(
                "micro_batches() with a communication hook: a declared step has the same bits on any number "
                "of ranks, and the hook would replace the sum that gives them. Use the plain loop, or no hook"
            )
        self._backward.step_mode = "declared"
        step = self.next_step if step is None else step
        if (yield from self._declared.run(num_micro_batches, step)):
            self.next_step = step + 1
            optimizer_guard.reduced(self._reducer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them. Forward *and* backward belong inside, as in DDP.

        Example:
            >>> with model.no_sync():
            ...     loss_function(model(x[:4]), y[:4]).backward()
            >>> loss_function(model(x[4:8]), y[4:8]).backward()  # exchanges the sum of both
        """
        before, self.do_sync = self.do_sync, False
        try:
            yield
        finally:
            self.do_sync = before

    @property
    def do_sync(self) -> bool:
        """Whether the backwards of forwards from now on exchange gradients: the switch behind ``no_sync``.

        A loop may set it instead of entering a block, before each forward; torch's DDP calls it
        ``require_backward_grad_sync``, which is the same here.
        """
        return self._backward.sync

    @do_sync.setter
    def do_sync(self, on: bool) -> None:
        self._backward.sync = bool(on)

    require_backward_grad_sync = do_sync

    def enable_grad_sync(self) -> None:
        """Exchange gradients in the backwards of forwards from now on, as after wrapping."""
        self.do_sync = True

    def disable_grad_sync(self) -> None:
        """Only accumulate in the backwards of forwards from now on: ``no_sync`` without a block."""
        self.do_sync = False

    def sync_gradients(self) -> None:
        """Exchange what was accumulated since the last exchange; a second call does nothing. Collective.

        Raises:
            ValueError: called inside of the loop over ``micro_batches``, which exchanges at its end.
            RuntimeError: the wrapper is closed.
            Desync, ReplicasDiffer, PeerLost: as ``micro_batches``.

        Example:
            >>> model.disable_grad_sync()
            >>> model.do_sync, model.require_backward_grad_sync
            (False, False)
            >>> loss_function(model(x), y).backward()
            >>> model.enable_grad_sync()
            >>> model.sync_gradients()  # .grad is the mean over the ranks
        """
        self._check_open()
        self._backward.synchronise()

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Does nothing, and warns so, on rank 0: uneven inputs are what ``micro_batches`` is for."""
        if self.group.rank == 0:
            warnings.warn(
                "join() has no effect: use model.micro_batches(G), where a rank may have fewer micro-batches "
                "than another, or none",
                stacklevel=3,
            )
        yield

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """From now on ``hook(state, bucket)`` reduces each bucket of gradients, as in torch's DDP.

        It is given a ``GradBucket`` with this rank's gradients and returns a future of what they become. The
        hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` can be used. It replaces the ordered sum: its
        rounding counts, and what the ranks then hold is not compared (``check_replicas``). A declared step,
        which promises the same bits on any number of ranks, is refused. Call it on every rank, before the
        first backward. Copies and pickles of the wrapper have no hook.

        Args:
            state: handed to the hook as it is; for torch's, the process group or None.
            hook: ``hook(state, bucket)`` returns a ``torch.futures.Future`` of a tensor of the size of
                ``bucket.buffer()``, flat, which is the gradient to go on with: the mean, not the sum.

        Raises:
            TypeError, ValueError: it is no such hook, or ``nodes`` are rounded, and a hook adds by itself.
            RuntimeError: there is one already, or the wrapper is closed.

        Example:
            >>> def halved(state, bucket):  # a mean over two ranks would be all-reduced here
            ...     future = torch.futures.Future()
            ...     future.set_result(bucket.buffer() / 2)
            ...     return future
            >>> model.register_comm_hook(None, halved)
            >>> loss_function(model(x), y).backward()
        """
        check(hook)
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook can only be called once: this model has a hook already")
        self._check_open()
        self._comm_hook = self._reducer.reduce_by(CommHook(state, hook))

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``, which it has to come as early as; torch's DDP has it, too."""
        if self._backward.step_mode is not None:
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts: pass static_graph=True "
                "when the model is wrapped"
            )
        if self._arguments["find_unused_parameters"] is False:
            self._arguments["find_unused_parameters"] = True
            self._options = self._reducer.options = replace(self._options, unused=True)

    def verify(self, batch: Any, loss: Loss | None = None, *, rtol: float | None = None) -> Report:
        """Compare the distributed gradient with that of one process, on this model, strategy and batch.

        Each rank makes one synchronised step on its batch, without an update; then it computes the gradient
        of every rank's batch again, without exchanges, and compares what it has with their mean. Weights,
        buffers, gradients, torch's random generators, training mode and the wrapper's own state are as before
        when it returns or raises. W + 1 forwards and backwards, and memory for some 5 copies of the model.
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
            backward=self._backward,
            strategy=self._arguments["strategy"],
            seed=self._seed,
            copy=self.group.rank,
            pieces=[GradientPiece.whole(i, p) for i, p in enumerate(parameters)],
            values=[Value(name, 0, p) for name, p in self.module.named_parameters()],
        )
        return verify(subject, self._process_group, batch, loss, rtol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A wrapper of a copy of the module, over the same ranks. Collective."""
        return DataParallel(copy.deepcopy(self.module, memo), **{**self._arguments, "init_sync": False})

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to the group, which has to be one that is found without a name."""
        group = self._process_group
        if group is not None and group is not registered_mesh() and group is not dist.group.WORLD:
            raise RuntimeError(
                "a DataParallel can be pickled if it works over the registered mesh or torch's default "
                "group, which is found again on loading: pickle model.module instead"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in OF_ITS_GROUP}
        arguments = {**self._arguments, "process_group": None, "device_mesh": None}
        return {**state, "_arguments": arguments, "_comm_hook": None, "_is_bound": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """No rank is waited for: what belongs to the group is made when it is first used, by all ranks."""
        super().__setstate__(state)
        if num_ranks() > 1:
            optimizer_guard.hold_back(self.module.parameters(), UNBOUND)

    def __getattr__(self, name: str) -> Any:
        if name in OF_ITS_GROUP and self.__dict__.get("_is_bound") is False:
            self._bind(None, self._arguments["timeout_s"])
            return self.__dict__[name]
        return super().__getattr__(name)

    def close(self) -> None:
        """Remove the hooks, end the lane, give back the private group. Also happens when it is collected."""
        self._unbind()

    def __instep_state__(self) -> Wrapped:
        reducer = self._reducer
        return Wrapped(
            module=self.module,
            group=self.group,
            gradients=lambda: [bucket.home for bucket in reducer.buckets],
            scratch=lambda: [
                *(x for bucket in reducer.buckets for x in bucket.spares),
                *reducer.exchange.scratch,
            ],
            counter=self,
            nodes=str(self._options.nodes),
            leave=self._leave,
            join=self._join,
            settled=lambda: reducer.watch.settled(),
            micro_batch=lambda: reducer.micro_batch,
            reductions={"": reducer},
        )

    def _leave(self) -> None:
        if self._is_bound:
            self._declared.abandon()
            self._unbind()

    def _join(self, mesh: Mesh) -> None:
        before = self._backward
        with before.registry.as_wrapped():
            self.rebind(mesh, self._arguments["timeout_s"])
        self._backward.sync, self._backward.step_mode = before.sync, before.step_mode

    def _check_open(self) -> None:
        if not self._unbind.alive:
            raise RuntimeError("this DataParallel is closed: wrap the module again, or rebind() this one")
