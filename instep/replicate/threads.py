"""Threads: one process whose replicas share one set of weights, each with a part of the batch.

The oldest form of data parallelism in torch, which calls it ``DataParallel``. Nothing has to be sent, and
there is one optimizer:

    caller      |split|.................|cat, loss|...................|sum|= update
    replica 0         |== forward 0:2 ==|         |==== backward =====|
    replica 1         |== forward 2:4 ==|         |==== backward =====|

What it costs: operators run outside of Python's lock, but Python does not, so the replicas wait for each
other between operators, and small models gain nothing; the caller's part runs alone; there is one random
generator for all; and it ends at the border of the host.

R: replicas. G: micro-batches in a declared step.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from instep.events import Recorder
from instep.replicate.crew import Ambient, Crew
from instep.replicate.names import OwnNames
from instep.replicate.replica import without_random_numbers
from instep.replicate.shares import Body, Shares, T
from instep.replicate.split import SplitBatch
from instep.step.roster import require_read_only


class ThreadedReplicas(OwnNames):
    """Computes with ``module`` in ``num_replicas`` threads at once.

    In forward: every tensor among the arguments is split along dim 0, each replica computes its part in a
    thread with the caller's grad mode and autocast, and the outputs are concatenated along dim 0 (scalars
    are stacked). In backward: each replica's backward runs in its thread; then their gradients are added, in
    the order of the sum tree over the replicas, and accumulate in the ``.grad`` of the one module. The bits
    are the same in every run; another number of replicas may give others.

    ``micro_batches`` is the declared form, whose bits are those of ``DataParallel.micro_batches`` on any
    number of ranks. (But under autocast weights are cast anew for each use, so one that a forward uses
    several times may get a gradient that is rounded otherwise.)

    What forward writes into buffers in place (running statistics, say) is kept from replica 0 and lost from
    the others, as in torch. Forward hooks see the replicas. Gradients of gradients are not offered.

    Args:
        module: on the device where it shall train; all replicas compute there.
        num_replicas: R, the number of threads; a batch with fewer rows uses fewer.
        recorder: receives "forward" and "backward" on the lanes "replica 0" and so on; on the caller's own,
            "replicas" while they compute, and "aggregate".

    Raises:
        ValueError: at once, with R > 1, if an embedding rescales its weight in forward (``max_norm``); in
            forward, if a replica draws random numbers (dropout in training mode): the threads share one
            generator, so that the numbers would depend on timing.
    """

    __module__ = "instep"

    def __init__(self, module: nn.Module, num_replicas: int, *, recorder: Recorder | None = None) -> None:
        super().__init__(module)
        if type(num_replicas) is not int or num_replicas < 1:
            raise ValueError(f"num_replicas: expected an int of at least 1, got {num_replicas!r}")
        if num_replicas > 1:
            require_read_only(module)
        self.num_replicas = num_replicas
        self.contract: str | None = None
        self._crew = Crew(num_replicas, recorder or Recorder())
        self._shares: Shares | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.contract = "undeclared"
        if self.num_replicas == 1:
            return self.module(*args, **kwargs)
        batch = SplitBatch(self.module, (args, kwargs), self._crew, self._device)
        with without_random_numbers(self.module, self._device):
            return batch.forward()

    def micro_batches(self, num_leaves: int, body: Body[T]) -> list[T]:
        """Declare a step of ``num_leaves`` micro-batches, and make it: R of them at a time.

        ``body(model, leaf)`` is called once per micro-batch, in the thread of the replica that has it, with
        that replica as ``model``: it is what stands in the loop over ``DataParallel.micro_batches``.

            def body(model, leaf):
                loss = f(model(x[leaf.index]))
                loss.backward()
                return loss.item()

            losses = replicas.micro_batches(G, body)
            optimizer.step()

        Afterwards every ``.grad`` is the sum over the micro-batches divided by the sum of their weights.

        Returns:
            What ``body`` has returned, by micro-batch.

        Raises:
            ValueError: a rule of declared steps is broken: a gradient left over from before, a micro-batch
                without backward, a buffer that forward changed, random numbers (also with R = 1).
        """
        if num_leaves < 1:
            raise ValueError(f"micro_batches({num_leaves}): expected at least one micro-batch")
        self.contract = "declared"
        if self._shares is None:
            self._shares = Shares(self.module, self.num_replicas)
        shares = self._shares
        shares.begin(num_leaves)
        functions = [partial(shares.compute, r, body) for r in range(self.num_replicas)]
        with without_random_numbers(self.module, self._device):
            results = self._crew.run("micro-batches", functions, Ambient(self._device))
        with self._crew.recorder.span("aggregate", lane="compute"):
            shares.reduce()
        found = {index: value for part in results for index, value in part.items()}
        return [found[index] for index in range(num_leaves)]

    def close(self) -> None:
        """End the threads. Also happens when it is collected."""
        self._crew.close()

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadedReplicas:
        return ThreadedReplicas(copy.deepcopy(self.module, memo), self.num_replicas)

    def __reduce__(self) -> Any:
        raise TypeError(
            "ThreadedReplicas holds threads and cannot be pickled: pickle replicas.module instead"
        )
