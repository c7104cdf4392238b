"""A backward in two parts: first the gradients of a stage's inputs, for which another stage waits, then the
rest.

    outputs <- ... <- N <- ... <- inputs       the path on which gradients come back
                       \\
                        <- weight              what hangs on it: computed later, from what came to N

In the first part, what comes to each node N that weights hang on is kept. The second one begins at these
nodes. No kernel computes anything twice: backward nodes compute what is asked of them alone. So the bits are
those of a backward in one part.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", 2024, in the form of
``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Kept(NamedTuple):
    """A node that weights hang on, and what has come to it."""

    node: Node
    weights: list[Tensor]
    gradients: list[Tensor | None]


def input_gradients(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Iterable[Tensor],
) -> tuple[list[Tensor | None], list[Kept]]:
    """The gradients of ``inputs``; and what is to be done for ``weights``, by ``weight_gradients``."""
    own = {get_gradient_edge(w).node: w for w in weights if w.requires_grad}
    ends = {get_gradient_edge(x).node for x in inputs}
    order = _from_outputs([get_gradient_edge(x).node for x in outputs])
    on_path: set[Node] = set()
    below: dict[Node, list[Tensor]] = {}  # by node off the path: the weights under it
    for node in order:  # the inputs' end first
        following = [other for other, _ in node.next_functions if other is not None]
        if node in ends or any(other in on_path for other in following):
            on_path.add(node)
            continue
        found = [own[node]] if node in own else []
        below[node] = [*found, *(w for other in following for w in below[other])]
    kept, handles = [], []
    for node in order:
        if node not in on_path:
            continue
        off = [other for other, _ in node.next_functions if other is not None and other not in on_path]
        hanging = list({id(w): w for other in off for w in below[other]}.values())
        if hanging:
            kept.append(Kept(node, hanging, []))
            handles.append(node.register_prehook(_keeping(kept[-1].gradients)))
    try:
        came = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(came), kept


def weight_gradients(kept: Sequence[Kept]) -> None:
    """Accumulate into the ``.grad`` of all weights."""
    for node, weights, gradients in kept:
        edges = [GradientEdge(node, i) for i, x in enumerate(gradients) if x is not None]
        torch.autograd.backward(edges, [x for x in gradients if x is not None], inputs=weights)


def _keeping(gradients: list[Tensor | None]) -> Any:
    def keep(came: tuple[Tensor | None, ...]) -> None:
        gradients[:] = came

    return keep


def _from_outputs(roots: Sequence[Node]) -> list[Node]:
    """All nodes under ``roots``, each after those that it leads to."""
    seen: set[Node] = set()
    order: list[Node] = []
    stack = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(other, False) for other, _ in node.next_functions if other is not None]
    return order
