"""Threads: one process whose replicas share one set of weights, each with a part of the batch.

The oldest form of data parallelism in torch, which calls it ``DataParallel``. Nothing is sent, and there is
one optimizer. A batch that is split, and a declared step of micro-batches 0 to 3:

    caller      |split|.................|cat, loss, backward|= update
    replica 0         |== forward 0:2 ==|
    replica 1         |== forward 2:4 ==|
    caller      |..........................................|sum|= update
    replica 0   |= forward, backward 0 =|= f 1 =|=== b 1 ===|
    replica 1   |= forward, backward 2 =|= f 3 =|=== b 3 ===|

Operators run outside Python's lock, but Python does not, so replicas wait for each other between operators.
They share one random generator: dropout is refused. On a CPU autograd runs in the thread that calls backward.
Two threads cannot accumulate in one ``.grad``, because the order would depend on timing, so each has a
replica (``replica.py``). A declared step keeps all G gradients until it adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from instep.events import Recorder
from instep.mesh.join import require_one_rank
from instep.net.device import generators
from instep.reduce.tree import rank_major
from instep.replicate.module_proxy import ModuleProxy
from instep.replicate.replica import Broadcast, Gradients, has_rows, joined, replicate, take_leaf, tree_sum
from instep.rng.generators import generators_in, generators_of, global_generators, same_state
from instep.state.alignment import align
from instep.step.micro_batches import MicroBatch, changed_buffer, count_and_source, require_no_gradients
from instep.step.nesting import WrappedOnce, require_supported
from instep.step.parameter_registry import require_read_only
from instep.step.running_statistics import RunningStatistics, tracking_norms

T = TypeVar("T")
INSTEAD = "use instep.DataParallel, which has the same bits in declared steps"


class ThreadedReplicas(WrappedOnce, ModuleProxy):
    """Computes with ``module`` in ``num_replicas`` threads at once, to compare with ``DataParallel``.

    In forward, tensors among the arguments are split along dim 0, each replica computes its part in a thread,
    and outputs are concatenated along dim 0 (scalars are stacked); replica 0's buffers are kept. In backward,
    gradients are added in the order of the sum tree.

    Args:
        module: stays as it is; replicas share its weights.
        num_replicas: number of threads.
        alone: True allows it on one of several ranks: the others do not train.

    Raises:
        ValueError: no positive number; one of several ranks; in forward, random numbers are drawn.

    Example:
        >>> replicas = instep.ThreadedReplicas(model, 2)
        >>> loss_function(replicas(x), y).backward()
        >>> optimizer.step()
    """

    __module__ = "instep"
    is_outermost = True

    def __init__(self, module: nn.Module, num_replicas: int, *, alone: bool = False) -> None:
        if not alone:
            require_one_rank("ThreadedReplicas")
        super().__init__(module)
        if type(num_replicas) is not int or num_replicas < 1:
            raise ValueError(f"num_replicas: expected an int of at least 1, got {num_replicas!r}")
        require_supported(module)
        require_read_only(module)
        align([*module.parameters(), *module.buffers()])
        self.num_replicas, self.recorder = num_replicas, Recorder()
        self._constructed()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lengths = {len(x) for x in tree_leaves((args, kwargs)) if has_rows(x)}
        if len(lengths) > 1:
            raise ValueError(f"expected tensors of one length along dim 0, the batch, got {sorted(lengths)}")
        parts = min([self.num_replicas, *lengths]) if lengths else 1
        if parts < 2:
            return self.module(*args, **kwargs)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        copies = iter(Broadcast.apply(parts, *trained))

        def call(r: int) -> Callable[[], Any]:
            model = replicate(self.module, {id(p): next(copies) for p in trained}, owns_buffers=r == 0)
            own = tree_map(lambda x: x.tensor_split(parts)[r] if has_rows(x) else x, (args, kwargs))
            return partial(model[id(self.module)], *own[0], **own[1])

        return tree_map(joined, *self._run("forward", [call(r) for r in range(parts)]))

    def micro_batches(self, num_micro_batches: Any, body: Callable[[nn.Module, MicroBatch], T]) -> list[T]:
        """Run a declared step, with the bits of ``DataParallel``; ``.grad`` is then the mean over all G.

        Args:
            num_micro_batches: G, or a ``Loader``.
            body: ``body(model, micro_batch)`` runs forward and backward, in a thread; ``model`` is a replica.

        Returns:
            The results of ``body``, in the order of the micro-batches.

        Raises:
            ValueError: a rule of declared steps is broken, or a gradient came from no replica.

        Example:
            >>> def body(model, micro_batch):
            ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
            ...     loss_function(model(x[rows]), y[rows]).backward()
            >>> optimizer.zero_grad()
            >>> _ = replicas.micro_batches(8, body)
            >>> optimizer.step()
        """
        G, source = count_and_source(num_micro_batches)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        require_no_gradients(list(trained), list(trained.values()))
        for name, p in trained.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ValueError(f"parameter {name!r} has a hook, which a replica lacks: {INSTEAD}")
        data = [(None, 1)] * G if source is None else source.read(range(G))
        given = [MicroBatch(i, G, weight, x) for i, (x, weight) in enumerate(data)]
        all_statistics = RunningStatistics()
        all_statistics.norms = tracking_norms(self.module.modules())

        def compute(own: Sequence[int]) -> list[tuple[T, Gradients]]:
            weights = {id(p): nn.Parameter(p.detach()) for p in trained.values()}
            copies = replicate(self.module, weights, owns_buffers=False)
            model, statistics = copies[id(self.module)], RunningStatistics()
            statistics.begin(copies[id(norm)] for norm in all_statistics.norms)
            found = []
            for one in (given[i] for i in own):
                with statistics.leaf(one.index):
                    result = body(model, one)
                for (name, x), y in zip(self.module.named_buffers(), model.buffers(), strict=True):
                    if not torch.equal(x, y):
                        raise changed_buffer(name)
                found.append((result, take_leaf(weights.values(), one)))
            all_statistics.measured |= statistics.measured
            return found

        try:
            shares = rank_major(G, self.num_replicas)
            by_replica = self._run("micro-batches", [partial(compute, own) for own in shares if own])
            if stray := [name for name, p in trained.items() if p.grad is not None]:
                raise ValueError(f"a gradient of {stray[0]!r} came past its replica: {INSTEAD}")
        finally:
            for p in trained.values():
                p.grad = None
        results, gradients = zip(*chain(*by_replica), strict=True)
        if not (weight := sum(one.weight for one in given)):
            raise ValueError("the weights of all micro-batches of the step sum to 0: nothing to average")
        for p, total in zip(trained.values(), tree_sum(gradients), strict=True):
            p.grad = None if total is None else (total * (1.0 / weight)).to(p.dtype)
        all_statistics.apply()
        if source is not None:
            source.advance()
        return list(results)

    def _run(self, name: str, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What ``calls`` return, each in a thread with the caller's settings; the first error is raised."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        is_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        num_threads = torch.get_num_threads()
        casts = {k: torch.get_autocast_dtype(k) for k in ("cpu", device.type) if torch.is_autocast_enabled(k)}

        def run(r: int) -> T:
            torch.set_num_threads(num_threads)
            torch.set_autocast_cache_enabled(False)  # threads share it, and the first to leave empties it
            for kind, dtype in casts.items():
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)
            with torch.cuda.stream(stream), torch.inference_mode(is_inference):
                torch.set_grad_enabled(is_grad)
                with self.recorder.as_lane(f"replica {r}"), self.recorder.span(name, lane="compute"):
                    return calls[r]()

        drawn = generators_in(generators(device), "torch") + global_generators() + generators_of(self.module)
        before = [generator.save() for generator in drawn]
        with ThreadPoolExecutor(len(calls)) as pool, self.recorder.span("replicas", lane="compute"):
            found = list(pool.map(run, range(len(calls))))
        if not all(same_state(x.save(), state) for x, state in zip(drawn, before, strict=True)):
            raise ValueError(f"forward drew random numbers, which depend on the timing of threads: {INSTEAD}")
        return found

    def __instep_state__(self, *ignored: object) -> NoReturn:
        raise ValueError(f"ThreadedReplicas is for comparison, without Run, checkpoints, copies: {INSTEAD}")

    __reduce__ = __instep_state__  # of copies and pickles
