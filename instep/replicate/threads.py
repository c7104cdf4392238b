"""Threads: one process whose replicas share one set of weights, each with a part of the batch.

The oldest form of data parallelism in torch, which calls it ``DataParallel``. Nothing has to be sent, and
there is one optimizer:

    caller      |split|.................|cat, loss|...................|sum|= update
    replica 0         |== forward 0:2 ==|         |==== backward =====|
    replica 1         |== forward 2:4 ==|         |==== backward =====|

What it costs: operators run outside of Python's lock, but Python does not, so the replicas wait for each
other between operators, and small models gain nothing; the caller's part runs alone; there is one random
generator for all; and it ends at the border of the host.

Two threads cannot share one module's ``.grad``: who accumulates first would depend on timing. So each has a
replica, a shallow copy of the module tree, in which every parameter is an alias, another leaf of autograd
over the same memory. A batch that is split over them is one node of the caller's graph:

    caller's graph   x --split--> x0, x1 ---.                 .--> y0, y1 --cat--> y --> loss
                     parameters ------------ InThreads.forward
    replica 0's                   x0' --.   (detached)      .--> y0'
                                  aliases --- module -------'
    replica 1's                   x1', aliases, y1' in the same way

Each replica has a graph of its own, so that its backward can run in a thread of its own. The caller's engine
comes to ``InThreads.backward`` with the gradients of all outputs, and leaves with the sums.

R: replicas. G: micro-batches in a declared step.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from instep.events import Recorder
from instep.mesh.join import require_one_rank
from instep.net.device import generators
from instep.net.process_group import alone as group_of_one
from instep.reduce.add_up import add_up
from instep.reduce.buckets import make_buckets
from instep.reduce.node_format import NodeFormat
from instep.reduce.tree import rank_major, sum_of
from instep.replicate.flat import Flat
from instep.replicate.own_names import OwnNames
from instep.replicate.replica import Replica, handed_to_replicas, received_micro_batch
from instep.replicate.thread_pool import ThreadPool, ThreadSettings
from instep.rng.generators import generators_of, global_generators, same_state, state_of
from instep.state.alignment import align
from instep.state.homes import Wrapped
from instep.step.gradients import Gradients
from instep.step.micro_batches import (
    DataSource,
    MicroBatch,
    changed_buffer,
    count_and_source,
    require_no_gradients,
)
from instep.step.parameter_registry import ParameterRegistry, require_read_only
from instep.step.running_statistics import Measured, Measurement, apply, tracking_norms
from instep.step.unregistered import UnregisteredWeights

T = TypeVar("T")
Body = Callable[[nn.Module, MicroBatch], T]
"""What stands in the loop over micro-batches: forward and backward of one with the given model."""


class ThreadedReplicas(OwnNames):
    """Computes with ``module`` in ``num_replicas`` threads at once.

    In forward: every tensor among the arguments is split along dim 0, each replica computes its part in a
    thread with the caller's grad mode and autocast, and the outputs are concatenated along dim 0 (scalars
    are stacked). In backward: each replica's backward runs in its thread; then their gradients are added, in
    the order of the sum tree over the replicas, and accumulate in the ``.grad`` of the one module. The bits
    are the same in every run; another number of replicas may give others.

    ``micro_batches`` is the declared form, whose bits are those of ``DataParallel.micro_batches`` on any
    number of ranks. (But under autocast weights are cast anew for each use, so one that a forward uses
    several times may get a gradient that is rounded otherwise.) Hooks of a parameter run there once per
    micro-batch, as in ``DataParallel``.

    What the forward of a batch that is split writes into buffers in place (running statistics, say) is kept
    from replica 0 and lost from the others, as in torch. Forward hooks see the replicas. Gradients of
    gradients are not offered.

    Args:
        module: on the device where it shall train; all replicas compute there.
        num_replicas: R, the number of threads; a batch with fewer rows uses fewer.
        recorder: receives "forward" and "backward" on the lanes "replica 0" and so on; on the caller's own,
            "replicas" while they compute, and "aggregate".
        alone: whether it is meant that this process trains by itself where it is one of several ranks, with
            which it exchanges nothing.
        nodes, rounding: as in ``DataParallel``, of declared steps; for the same bits: nothing travels here.
        seed: keys what is rounded at random.

    Raises:
        ValueError: at once, if ``num_replicas`` is no positive int, if this process is one of several ranks
            and not ``alone``, or, with R > 1, if an embedding rescales its weight in forward (``max_norm``);
            in forward, if a replica draws random numbers (dropout in training mode): the threads share one
            generator, so that the numbers would depend on timing.

    Example:
        >>> replicas = instep.ThreadedReplicas(model, 2)
        >>> loss_function(replicas(x), y).backward()  # the batch is split along dim 0
        >>> optimizer.step()
        >>> replicas.placement
        {'strategy': 'threads'}
        >>> replicas.close()
    """

    __module__ = "instep"

    def __init__(
        self,
        module: nn.Module,
        num_replicas: int,
        *,
        recorder: Recorder | None = None,
        alone: bool = False,
        nodes: str = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        if not alone:
            require_one_rank("ThreadedReplicas")
        super().__init__(module)
        if type(num_replicas) is not int or num_replicas < 1:
            raise ValueError(f"num_replicas: expected an int of at least 1, got {num_replicas!r}")
        if num_replicas > 1:
            require_read_only(module)
        align([*module.parameters(), *module.buffers()])
        self.num_replicas = num_replicas
        self.next_step = 0
        self._nodes = NodeFormat(nodes, rounding, seed)
        self.step_mode: str | None = None
        self.recorder = recorder or Recorder()
        self._pool = ThreadPool(num_replicas, self.recorder)
        self.threaded_step: ThreadedStep | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.step_mode = "undeclared"
        if self.num_replicas == 1:
            return self.module(*args, **kwargs)
        batch = SplitBatch(self.module, (args, kwargs), self._pool, self._device)
        with without_random_numbers(self.module, self._device):
            return batch.forward()

    def micro_batches(
        self, num_micro_batches: int | DataSource, body: Body[T], *, step: int | None = None
    ) -> list[T]:
        """Declare a step of ``num_micro_batches`` micro-batches, and make it: R of them at a time.

        Afterwards every ``.grad`` is the sum over the micro-batches divided by the sum of their weights.

        Args:
            num_micro_batches: G, the number of micro-batches in the step; the bits depend on it. Or an
                ``instep.Loader``: ``micro_batch.data`` of all is read beforehand.
            body: ``body(model, micro_batch)`` is what stands in the loop over ``DataParallel.micro_batches``,
                called in the thread of the replica that has the micro-batch, with that one as ``model``.
            step: what random numbers are keyed by; by default the declared steps so far.

        Returns:
            What ``body`` has returned, by micro-batch.

        Raises:
            ValueError: a rule of declared steps is broken: a gradient left over from before, a micro-batch
                without backward, a buffer that forward changed (but a norm's), random numbers (also with
                R = 1), a parameter with a post-accumulate hook, a backward in a thread that ``body`` has
                started.

        Example:
            >>> def body(model, micro_batch):
            ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
            ...     loss_function(model(x[rows]), y[rows]).backward()
            ...     return len(rows)
            >>> optimizer.zero_grad()
            >>> replicas.micro_batches(8, body)
            [4, 4, 4, 4, 4, 4, 4, 4]
            >>> optimizer.step()
        """
        count, source = count_and_source(num_micro_batches)
        self.step_mode = "declared"
        if self.threaded_step is None:
            self.threaded_step = ThreadedStep(self.module, self.num_replicas, self._nodes)
        step, threaded = self.next_step if step is None else step, self.threaded_step
        data = repeat((None, 1), count) if source is None else source.read(range(count))
        threaded.begin([MicroBatch(i, count, weight, x) for i, (x, weight) in enumerate(data)], step)
        functions = [partial(threaded.compute, r, body) for r in range(self.num_replicas)]
        handed = handed_to_replicas(threaded.parameters, threaded.strays)
        try:
            with without_random_numbers(self.module, self._device), handed:
                results = self._pool.run("micro-batches", functions, ThreadSettings(self._device))
        finally:
            threaded.micro_batches = ()  # and their data
        with self._pool.recorder.span("aggregate", lane="compute"):
            threaded.reduce()
        self.next_step = step + 1
        if source is not None:
            source.advance()
        found = {index: value for part in results for index, value in part.items()}
        return [found[index] for index in range(count)]

    def close(self) -> None:
        """End the threads. Also happens when it is collected."""
        self._pool.close()

    def __instep_state__(self) -> Wrapped:
        first, *others = [[]] if self.threaded_step is None else self.threaded_step.buckets
        return Wrapped(
            module=self.module,
            group=group_of_one(),
            gradients=lambda: [bucket.home for bucket in first],
            scratch=lambda: [
                *(x for bucket in first for x in bucket.spares),
                *(x for own in others for bucket in own for x in (bucket.home, *bucket.spares)),
            ],
            counter=self,
            nodes=str(self._nodes),
            leave=self.module.zero_grad,
            join=lambda mesh: None,  # no mesh is of use to replicas in one process
            micro_batch=received_micro_batch,
        )

    @property
    def placement(self) -> dict[str, str]:
        """How gradients travel."""
        return {"strategy": "threads"}

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadedReplicas:
        nodes, rounding, seed = astuple(self._nodes)
        module = copy.deepcopy(self.module, memo)
        return ThreadedReplicas(module, self.num_replicas, nodes=nodes, rounding=rounding, seed=seed)

    def __reduce__(self) -> Any:
        raise TypeError(
            "ThreadedReplicas holds threads and cannot be pickled: pickle replicas.module instead"
        )


class ThreadedStep:
    """The parts that ``num_replicas`` replicas of ``module`` have in a declared step.

    At construction: a set of buckets per replica, kept from step to step. A step: ``begin``, then ``compute``
    in each replica's thread, then ``reduce``, which sets every ``.grad``.
    """

    def __init__(self, module: nn.Module, num_replicas: int, nodes: NodeFormat) -> None:
        self.module = module
        align([*module.parameters(), *module.buffers()])  # they may be others than when it was wrapped
        self.registry = ParameterRegistry(module)
        self.unregistered = UnregisteredWeights(module)
        self.names = [name for name, _ in self.registry.trainable]
        self.parameters: list[Tensor] = [parameter for _, parameter in self.registry.trainable]
        groups = Flat.group(self.parameters, range(len(self.parameters)), 25)
        self.buckets = [
            make_buckets(self.parameters, groups, 1, ordered=True, nodes=nodes) for _ in range(num_replicas)
        ]

    def begin(self, micro_batches: Sequence[MicroBatch], step: int) -> None:
        """A step of ``micro_batches`` begins, whose random numbers are keyed by ``step``.

        Raises:
            ValueError: a gradient is left from before, or a parameter is new or has a hook that cannot run.
        """
        self.registry.check()
        require_no_gradients(self.names, self.parameters)
        self.unregistered.begin()
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter {name!r} has a post-accumulate hook, of another wrapper or your own, which "
                    "would not run in replicas: close() the other wrapper, or use parameter.register_hook"
                )
        self.micro_batches: Sequence[MicroBatch] = micro_batches
        self.num_micro_batches = len(micro_batches)
        self.indices = rank_major(
            self.num_micro_batches, len(self.buckets)
        )  # of each replica's micro-batches
        self.weights = [0] * len(self.buckets)
        self.sparse: set[int] = set()  # parameters with sparse gradients
        self.strays: set[int] = set()  # parameters with a gradient that no replica has received
        self.hooks = [OrderedDict(x._backward_hooks or ()) for x in self.parameters]  # the user's
        self.norms = tracking_norms(self.module.modules())
        self.measured: dict[int, list[Measured]] = {}  # for running statistics, by micro-batch
        for buckets in self.buckets:
            for bucket in buckets:
                bucket.begin(self.num_micro_batches, lambda _: 0)
                bucket.begin_nodes(1, step, 0)

    def compute(self, r: int, body: Body[T]) -> dict[int, T]:
        """Forward and backward of the micro-batches of replica ``r``; what ``body`` returns for each."""
        replica = Replica(self.module, owns_buffers=False)
        for alias, hooks in zip(replica.parameters, self.hooks, strict=True):
            if hooks:
                alias._backward_hooks = hooks
        gradients = Gradients(self.names, replica.parameters, ())
        norms = [replica.modules[id(norm)] for norm in self.norms]
        for norm in norms:  # a replica shares them with the module
            for key in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
                setattr(norm, key, getattr(norm, key).copy())
        measurement = Measurement(norms)
        found = {}
        for index in self.indices[r]:
            micro_batch = self.micro_batches[index]
            with replica.receives(index), measurement.open() as self.measured[index]:
                found[index] = body(replica.module, micro_batch)
            self._check(r, micro_batch, replica)
            for bucket in self.buckets[r]:
                bucket.open(index)
                assert bucket.leaf is not None
                gradients.land(bucket, bucket.leaf, adds=bucket.adds)
                bucket.close(index)
                gradients.take(bucket)
        return found

    def reduce(self) -> None:
        """Add the roots of all replicas down the tree, set ``.grad``, and apply running statistics.

        Raises:
            ValueError: no micro-batch counts, or a gradient came past all replicas.
        """
        self.unregistered.end()
        if self.strays:
            raise ValueError(
                f"parameter {self.names[min(self.strays)]!r} has a gradient that no replica's backward made: "
                "it belongs to no micro-batch: call backward() in the thread in which the function is called"
            )
        weight = sum(self.weights)
        if weight == 0:
            raise ValueError(
                "the weights of all micro-batches of the step sum to 0: there is nothing to average"
            )
        gradients = Gradients(self.names, self.parameters, self.sparse)
        for same in zip(*self.buckets, strict=True):
            nodes, values = zip(*[root for bucket in same for root in bucket.counter.roots], strict=True)
            plan = sum_of(nodes, [len(bucket.counter.roots) for bucket in same], self.num_micro_batches)
            home = same[0]  # of replica 0, which has leaf 0
            add_up(values, plan, 1.0 / weight, [home.home], home.nodes)
            for k, (slot, view) in enumerate(zip(home.slots, home.views(home.home), strict=True)):
                if any(bucket.slots[k].present for bucket in same):
                    gradients.attach(slot, view, whole=True)
        apply(self.norms, self.measured)

    def _check(self, r: int, micro_batch: MicroBatch, replica: Replica) -> None:
        weight = micro_batch.checked_weight()
        came = {i: p.grad for i, p in enumerate(replica.parameters) if p.grad is not None}
        if came:
            self.weights[r] += weight
        elif weight != 0:
            raise ValueError(
                f"micro-batch {micro_batch.index} ended without a gradient: call backward() in the function, "
                "on a loss of the model that it is given (not of the wrapped one), or set "
                "micro_batch.weight = 0"
            )
        self.sparse.update(i for i, gradient in came.items() if gradient.is_sparse)
        changed = replica.changed_buffer(self.module)
        if changed is not None:
            raise changed_buffer(changed)


class SplitBatch:
    """One forward of ``module``, and its backward, by the threads of ``pool``.

    At construction: the arguments are split. ``forward``: the replicas compute; ``graphs`` keeps theirs.
    ``backward``: they compute again, and are gone unless the caller retains the graph.
    """

    def __init__(self, module: nn.Module, arguments: Any, pool: ThreadPool, device: torch.device) -> None:
        self.module = module
        self.pool = pool
        self.device = device
        self.settings = ThreadSettings(device)  # here, because inside of InThreads there is no grad mode
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        leaves, self.spec = tree_flatten(arguments)
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.parts = _split(leaves, self.at, pool.size)
        self.graphs: list[_Graph] | None = None
        self._outputs: list[list[Any]] = []

    def forward(self) -> Any:
        """What ``module`` returns for the whole batch."""
        inputs = [part[i] for part in self.parts for i in self.at]
        tensors = iter(InThreads.apply(self, *inputs, *self.parameters))
        rows = [[next(tensors) if isinstance(x, Tensor) else x for x in leaves] for leaves in self._outputs]
        self._outputs, self.parts = [], []
        return tree_unflatten([_join(column) for column in zip(*rows, strict=True)], self._out_spec)

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of all replicas on ``inputs`` (those of all, one after the other)."""
        width = len(self.at)
        by_replica = [inputs[r * width : (r + 1) * width] for r in range(len(self.parts))]
        functions = [partial(self._forward, r, x) for r, x in enumerate(by_replica)]
        results = self.pool.run("forward", functions, self.settings)
        self.graphs = [graph for graph, _, _ in results]
        self._outputs = [leaves for _, leaves, _ in results]
        self._out_spec: TreeSpec = results[0][2]
        for _, _, spec in results:
            if spec != self._out_spec:
                raise ValueError(
                    f"the replicas returned outputs of different structure, {self._out_spec} and {spec}: a "
                    "split batch needs the same one from every part"
                )
        return [x for graph in self.graphs for x in graph.outputs]

    def backward(self, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Gradients of all replicas' inputs, then those of the parameters, summed over the replicas."""
        if self.graphs is None:
            raise RuntimeError(
                "a second backward through the same replicas, whose graphs are gone: pass retain_graph=True "
                "to the first one"
            )
        functions, begin = [], 0
        for graph in self.graphs:
            given = gradients[begin : begin + len(graph.outputs)]
            functions.append(partial(graph.backward, given, keep=keep))
            begin += len(graph.outputs)
        if not keep:
            self.graphs = None
        if self.device.type == "cpu":
            results = self.pool.run("backward", functions, ThreadSettings(self.device))
        else:  # autograd has one thread for a device, and is in it now: others would wait for it in vain
            results = [function() for function in functions]
        of_inputs = [x for found, _ in results for x in found]
        with self.pool.recorder.span("aggregate", lane="compute"):
            sums = [tree_sum(column) for column in zip(*[found for _, found in results], strict=True)]
        return of_inputs + sums

    def _forward(self, r: int, inputs: Sequence[Tensor]) -> tuple[_Graph, list[Any], TreeSpec]:
        replica = Replica(self.module, owns_buffers=r == 0)
        own = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        leaves = list(self.parts[r])
        for i, x in zip(self.at, own, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self.spec)
        outputs, spec = tree_flatten(replica.module(*args, **kwargs))
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        return _Graph(own, replica.parameters, tensors), outputs, spec


class _Graph:
    """What one replica computed: ``outputs`` from ``inputs`` and ``parameters``, all of them its own."""

    def __init__(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self.inputs, self.parameters, self.outputs = inputs, parameters, outputs

    def backward(
        self, gradients: Sequence[Tensor | None], *, keep: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of inputs and parameters, None where there is none."""
        pairs = [(x, g) for x, g in zip(self.outputs, gradients, strict=True) if g is not None]
        if pairs:
            tensors, given = zip(*pairs, strict=True)
            # Not autograd.grad, which reentrant checkpoints refuse.
            torch.autograd.backward(tensors, given, retain_graph=keep)
        found = [x.grad for x in self.inputs], [p.grad for p in self.parameters]
        for x in (*self.inputs, *self.parameters):
            x.grad = None
        return found


class InThreads(torch.autograd.Function):
    """(batch, inputs of all replicas, parameters) -> outputs of all replicas."""

    @staticmethod
    def forward(ctx: Any, batch: SplitBatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = batch.compute(tensors[: len(tensors) - len(batch.parameters)])
        detached = [x.detach() for x in outputs]
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[x for x, own in zip(detached, outputs, strict=True) if not own.requires_grad]
        )
        return tuple(detached)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, *ctx.batch.backward(gradients, keep=keep)


def tree_sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum in the order of the tree over ``len(parts)`` leaves; None is a leaf without a value."""
    values = list(parts)
    for left, right in sum_of([(i, i + 1) for i in range(len(parts))], (), len(parts)).adds:
        a, b = values[left], values[right]
        values[left] = b if a is None else a if b is None else a + b
    return values[0]


def _split(leaves: Sequence[Any], at: Sequence[int], num_replicas: int) -> list[list[Any]]:
    """The arguments of each replica: tensors cut along dim 0 into nearly equal parts, the rest as it is.

    At most as many parts as rows. Tensors without dimensions go to every replica.
    """
    rows = {leaves[i].shape[0] for i in at if leaves[i].dim()}
    if len(rows) > 1:
        raise ValueError(
            f"expected tensors of one length along dim 0, the batch, got {sorted(rows)}: give the others to "
            "the module in another way"
        )
    num_parts = min([num_replicas, *rows]) if rows and min(rows) else 1
    cut = {i: leaves[i].tensor_split(num_parts) for i in at if leaves[i].dim()}
    return [[cut[i][r] if i in cut else leaf for i, leaf in enumerate(leaves)] for r in range(num_parts)]


def _join(column: Sequence[Any]) -> Any:
    """One leaf of the output, out of that of each replica."""
    first = column[0]
    if not isinstance(first, Tensor):
        if any(leaf != first for leaf in column):
            raise ValueError(f"the replicas returned {first!r} and others: only tensors can be put together")
        return first
    if any(x.shape[1:] != first.shape[1:] for x in column):
        shapes = ", ".join(str(tuple(x.shape)) for x in column)
        raise ValueError(
            f"the replicas returned tensors of shape {shapes}: expected the batch along dim 0, the rest alike"
        )
    return torch.cat(list(column)) if first.dim() else torch.stack(list(column))


WAYS_OUT = "set its dropout to 0, call eval(), or use processes (instep.DataParallel)"


@contextmanager
def without_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise ``ValueError`` if ``module`` will drop out, or if the block has drawn random numbers.

    torch's default generator is one for all threads: who draws first would depend on timing.
    """
    for name, part in module.named_modules():
        if part.training and _drops(part):
            raise ValueError(
                f"{name or 'the module'!r} is {type(part).__name__} with dropout in training mode, and "
                f"threads share torch's random generator: {WAYS_OUT}"
            )
    before = [state_of(generator) for generator in generators(device)]
    others = [*global_generators(), *generators_of(module)]
    states = [generator.save() for generator in others]
    yield
    after = [state_of(generator) for generator in generators(device)]
    drawn = [] if all(map(torch.equal, before, after)) else ["torch's random generator"]
    drawn += [x.name for x, state in zip(others, states, strict=True) if not same_state(x.save(), state)]
    if drawn:
        raise ValueError(
            f"forward drew from {drawn[0]}, which threads share, so the numbers would depend on timing: "
            f"{WAYS_OUT}, or draw from a generator that each call makes for itself"
        )


def _drops(module: nn.Module) -> bool:
    """Whether a layer of torch drops out."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
