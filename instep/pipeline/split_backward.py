"""A backward in two parts: first the gradients of a stage's inputs, for which another stage waits, then the
rest.

    outputs <- ... <- N <- ... <- inputs       the path on which gradients come back
                       \\
                        <- weight              what hangs on it: computed later, from what came to N

In the first part, what comes to each node N that weights hang on is kept. The second one begins at these
nodes. That is a backward in one part, in another order, where a weight hangs on one node of the path alone:
so the bits are the same. A weight that hangs on several, or on an output that no input leads to, gets its
gradient by a backward of its own from the outputs; on the way it computes once more what the first part did.

What is recomputed in backward (activation checkpointing) would be once per part and node. There
``gradients_at_once`` serves, a backward in one part that hands out the gradients of weights later.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", 2024, in the form of
``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Later: TypeAlias = Callable[[], None]
"""Computes the gradients of weights, which accumulate in ``.grad``."""
REENTRANT, ACCUMULATES = "CheckpointFunctionBackward", "torch::autograd::AccumulateGrad"  # names of nodes


class Kept(NamedTuple):
    """A node that weights hang on, and what has come to it."""

    node: Node
    weights: list[Tensor]
    gradients: list[Tensor | None]


def input_gradients(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor | None], Later]:
    """The gradients of ``inputs``, None for one that is not used; and what is left to do for weights, which
    are all others that gradients accumulate in."""
    hanging, others = _hanging(outputs, inputs)
    kept = [Kept(node, its, []) for node, its in hanging.items() if its]
    handles = [one.node.register_prehook(_keeping(one.gradients)) for one in kept]
    try:
        came = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    # What is not kept is let go: most weights need the nodes that they hang on alone.
    again = partial(torch.autograd.backward, outputs, gradients, retain_graph=True, inputs=others)
    return list(came), partial(_weight_gradients, kept, again if others else None)


def gradients_at_once(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor | None], Later]:
    """As ``input_gradients``, in one backward: those of weights take memory until they accumulate.

    Raises:
        ValueError: a layer is checkpointed with ``use_reentrant=True``, which computes all or nothing.
    """
    if any(node.name() == REENTRANT for node in _from_outputs([x.node for x in outputs])):
        raise ValueError(
            "a layer is checkpointed with use_reentrant=True, which cannot compute the gradients of inputs "
            "alone, as this schedule asks for: pass use_reentrant=False, or take a schedule without I and W, "
            "1f1b for instance"
        )
    trained = leaves_under(outputs, inputs)
    came = torch.autograd.grad(outputs, [*inputs, *trained], gradients, allow_unused=True)
    pairs = zip(trained, came[len(inputs) :], strict=True)
    return list(came[: len(inputs)]), partial(_accumulate, [(w, g) for w, g in pairs if g is not None])


def _accumulate(gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    # A hook of a weight has changed its gradient, and would once more. Nothing else holds the nodes where no
    # graph is left, and those that the backward made anew would not call these.
    nodes = [get_gradient_edge(w).node for w, _ in gradients]
    handles = [
        node.register_prehook(lambda again, came=g: (came,))
        for node, (_, g) in zip(nodes, gradients, strict=True)
    ]
    try:
        if gradients:
            torch.autograd.backward([w for w, _ in gradients], [g for _, g in gradients])
    finally:
        for handle in handles:
            handle.remove()


def leaves_under(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> list[Tensor]:
    """All that a backward from ``outputs`` accumulates gradients in, but the ``inputs``."""
    given = set(map(id, inputs))
    nodes = _from_outputs([x.node for x in outputs])
    return [x for node in nodes if (x := _leaf(node)) is not None and id(x) not in given]


def num_uses(outputs: Sequence[GradientEdge], leaf: Tensor) -> int:
    """How many operations under ``outputs`` take ``leaf``."""
    end = get_gradient_edge(leaf).node
    nodes = _from_outputs([x.node for x in outputs])
    return sum(other == end for node in nodes for other, _ in node.next_functions)


def _leaf(node: Node) -> Tensor | None:
    """What the gradients that come to ``node`` accumulate in, if they do."""
    return node.variable if node.name() == ACCUMULATES else None  # type: ignore[attr-defined]


def _hanging(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]
) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """Of each node on the path from ``outputs`` to ``inputs`` the weights that hang on it alone; and the
    other weights."""
    own: list[Tensor] = []
    ends = {get_gradient_edge(x).node for x in inputs}
    roots = [x.node for x in outputs]
    on_path: dict[Node, list[Tensor]] = {}
    below: dict[Node, list[Tensor]] = {}  # by node off the path: the weights under it
    for node in _from_outputs(roots):  # the inputs' end first
        following = [other for other, _ in node.next_functions if other is not None]
        under = {id(w): w for other in following for w in below.get(other, ())}
        if node in ends or any(other in on_path for other in following):
            on_path[node] = list(under.values())
        else:
            if (leaf := _leaf(node)) is not None:
                under[id(leaf)] = leaf
                own.append(leaf)
            below[node] = [*under.values()]
    off_path = [below[root] for root in dict.fromkeys(roots) if root in below]
    times = Counter(id(w) for its in (*on_path.values(), *off_path, *off_path) for w in its)
    hanging = {node: [w for w in its if times[id(w)] == 1] for node, its in on_path.items()}
    return hanging, [w for w in own if times[id(w)] > 1]


def _weight_gradients(kept: Sequence[Kept], again: Later | None) -> None:
    """``again`` computes those of weights that hang on more than one node."""
    if again is not None:
        again()
    for node, weights, came in kept:
        pairs = [(GradientEdge(node, i), x) for i, x in enumerate(came) if x is not None]
        if not pairs:  # a function before it had no gradient to give
            continue
        # A hook of a tensor has changed what came, and would once more.
        handle = node.register_prehook(lambda again, came=tuple(came): came)
        try:
            torch.autograd.backward([edge for edge, _ in pairs], [x for _, x in pairs], inputs=weights)
        finally:
            handle.remove()


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
