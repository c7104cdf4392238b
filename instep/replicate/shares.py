"""A declared step among threads: each replica has some of the micro-batches, and one sum tree has them all.

As among ranks, a replica adds its leaves as far as the tree allows. What ranks would send lies in the memory
of the process already, so that the exchange is nothing but the adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from instep.ordered.buckets import make_buckets
from instep.ordered.tree import adds, rank_major
from instep.replicate.flat import Flat
from instep.replicate.replica import Replica
from instep.step.gradients import Gradients
from instep.step.leaves import Leaf
from instep.step.roster import Roster

T = TypeVar("T")
Body = Callable[[nn.Module, Leaf], T]
"""What stands in the loop over micro-batches: forward and backward of one leaf with the given model."""


class Shares:
    """The parts that ``num_replicas`` replicas of ``module`` have in a declared step.

    At construction: a set of buckets per replica, kept from step to step. A step: ``begin``, then ``compute``
    in each replica's thread, then ``reduce``, which sets every ``.grad``.
    """

    def __init__(self, module: nn.Module, num_replicas: int) -> None:
        self.module = module
        self.roster = Roster(module)
        self.names = [name for name, _ in self.roster.trainable]
        self.parameters: list[Tensor] = [parameter for _, parameter in self.roster.trainable]
        groups = Flat.group(self.parameters, range(len(self.parameters)), 25)
        self.buckets = [make_buckets(self.parameters, groups, 1, ordered=True) for _ in range(num_replicas)]

    def begin(self, num_leaves: int) -> None:
        """A step of ``num_leaves`` micro-batches begins.

        Raises:
            ValueError: a gradient is left from before, a parameter is new, or a layer mixes micro-batches.
        """
        self.roster.check()
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                raise ValueError(
                    f"parameter {name!r} already has a gradient when the step begins: call "
                    "optimizer.zero_grad(set_to_none=True) before; the step is the sum of its leaves alone"
                )
        self.num_leaves = num_leaves
        self.leaves = rank_major(num_leaves, len(self.buckets))
        self.weights = [0] * len(self.buckets)
        self.sparse: set[int] = set()  # parameters with sparse gradients
        for buckets in self.buckets:
            for bucket in buckets:
                bucket.begin(num_leaves, 0)

    def compute(self, r: int, body: Body[T]) -> dict[int, T]:
        """Forward and backward of the micro-batches of replica ``r``; what ``body`` returns for each."""
        replica = Replica(self.module, owns_buffers=False)
        gradients = Gradients(self.names, replica.parameters, ())
        found = {}
        for index in self.leaves[r]:
            leaf = Leaf(index, self.num_leaves)
            found[index] = body(replica.module, leaf)
            self._check(r, leaf, replica)
            for bucket in self.buckets[r]:
                buffer = bucket.counter.open()
                gradients.land(bucket, buffer)
                bucket.counter.push(index, buffer)
                gradients.take(bucket)
        return found

    def reduce(self) -> None:
        """Add the roots of all replicas down the tree, and set ``.grad``."""
        weight = sum(self.weights)
        if weight == 0:
            raise ValueError(
                "the weights of all micro-batches of the step sum to 0: there is nothing to average"
            )
        gradients = Gradients(self.names, self.parameters, self.sparse)
        for same in zip(*self.buckets, strict=True):
            nodes, values = zip(*[root for bucket in same for root in bucket.counter.roots], strict=True)
            # Replica 0 has leaf 0, and so the sum ends in the home of its bucket.
            for left, right in adds(nodes, self.num_leaves):
                torch.add(values[left], values[right], out=values[left])
            home = same[0]
            if weight != 1:
                home.home.mul_(1.0 / weight)
            for k, (slot, view) in enumerate(zip(home.slots, home.views(home.home), strict=True)):
                if any(bucket.slots[k].present for bucket in same):
                    gradients.attach(slot, view, whole=True)

    def _check(self, r: int, leaf: Leaf, replica: Replica) -> None:
        if type(leaf.weight) is not int or leaf.weight < 0:
            raise ValueError(
                f"weight of micro-batch {leaf.index}: expected a non-negative int (a number of items), got "
                f"{leaf.weight!r}; integers keep the sum of weights exact"
            )
        came = {i: p.grad for i, p in enumerate(replica.parameters) if p.grad is not None}
        if came:
            self.weights[r] += leaf.weight
        elif leaf.weight != 0:
            raise ValueError(
                f"micro-batch {leaf.index} ended without a gradient: call backward() in the function, on a "
                "loss of the model that it is given (not of the wrapped one), or set leaf.weight = 0"
            )
        self.sparse.update(i for i, gradient in came.items() if gradient.is_sparse)
        changed = replica.changed_buffer(self.module)
        if changed is not None:
            raise ValueError(
                f"forward changed buffer {changed!r} in a declared step: it would depend on who had which "
                "micro-batch. Put the layer into eval() mode, use track_running_stats=False, GroupNorm or "
                "LayerNorm, or train with plain backward, outside of micro_batches()"
            )
