"""A batch that is split over replicas, as one node of the caller's graph.

    caller's graph   x --split--> x0, x1 ---.                 .--> y0, y1 --cat--> y --> loss
                     parameters ------------ InThreads.forward
    replica 0's                   x0' --.   (detached)      .--> y0'
                                  aliases --- module -------'
    replica 1's                   x1', aliases, y1' in the same way

Each replica has a graph of its own, so that its backward can run in a thread of its own. The caller's engine
comes to ``InThreads.backward`` with the gradients of all outputs, and leaves with the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from instep.ordered.tree import adds
from instep.replicate.crew import Ambient, Crew
from instep.replicate.replica import Replica


class SplitBatch:
    """One forward of ``module``, and its backward, by the threads of ``crew``.

    At construction: the arguments are split. ``forward``: the replicas compute; ``graphs`` keeps theirs.
    ``backward``: they compute again, and are gone unless the caller retains the graph.
    """

    def __init__(self, module: nn.Module, arguments: Any, crew: Crew, device: torch.device) -> None:
        self.module = module
        self.crew = crew
        self.device = device
        self.ambient = Ambient(device)  # here, because inside of InThreads there is no grad mode
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        leaves, self.spec = tree_flatten(arguments)
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.parts = _split(leaves, self.at, crew.size)
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
        results = self.crew.run("forward", functions, self.ambient)
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
        results = self.crew.run("backward", functions, Ambient(self.device))
        of_inputs = [x for found, _ in results for x in found]
        with self.crew.recorder.span("aggregate", lane="compute"):
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
    for left, right in adds([(i, i + 1) for i in range(len(parts))], len(parts)):
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
