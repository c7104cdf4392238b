"""The declared step: a global batch of G micro-batches, whichever rank computes them.

for leaf in model.micro_batches(G):
    loss = f(model(x[leaf.index]))
    loss.backward()
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from instep.ordered.keys import LeafKeys
from instep.ordered.tree import rank_major
from instep.replicate.reducer import Plan, Reducer

State = tuple[Tensor | None, int]  # a buffer and its version


@dataclass
class Leaf:
    """One micro-batch of the step: number ``index`` of ``num_leaves``.

    Set ``weight`` before backward if the loss is a sum over that many items (tokens, samples): the sum of
    all losses' gradients is divided by the sum of all weights. 0 is allowed. Left at 1, the loss is a mean
    and micro-batches count alike.
    """

    index: int
    num_leaves: int
    weight: int = 1
    gradients: int = 0  # how many of its gradients have come


class DeclaredStep:
    """Runs the leaves of this rank, one step at a time.

    In a step: per leaf, the random generators are keyed, gradients gathered, and the rules checked that
    placement independence rests on; after the last leaf, gradients are reduced and set.
    """

    def __init__(self, module: nn.Module, reducer: Reducer, keys: LeafKeys) -> None:
        self.module = module
        self.reducer = reducer
        self.keys = keys
        self.leaf: Leaf | None = None

    def run(self, num_leaves: int, step: int) -> Iterator[Leaf]:
        """Yield this rank's leaves of step ``step``, then set every ``.grad``.

        Raises:
            ValueError: a rule of declared steps is broken; the message names it and the ways out.
            Desync: another rank left the step, or is in another one.
        """
        group, reducer = self.reducer.group, self.reducer
        plan = Plan(True, num_leaves, rank_major(num_leaves, group.size))
        self._check_start()
        leaves = [Leaf(index, num_leaves) for index in plan.leaves[group.rank]]
        sent: set[int] = set()

        def weight() -> int:
            sent.add(total := sum(_checked(leaf).weight for leaf in leaves))
            return total

        reducer.begin(plan, weight)
        done = False
        try:
            for leaf in leaves:
                self.leaf = leaf
                before = self._buffer_states()
                reducer.open_leaf(leaf.index, last=leaf is leaves[-1])
                with self.keys.leaf(step, leaf.index):
                    yield leaf
                self._check_leaf(leaf, before)
                reducer.close_leaf()
            if sent - {weight()}:
                raise ValueError(
                    "a leaf's weight was changed after its backward: set leaf.weight before backward"
                )
            reducer.finish()
            done = True
        finally:
            self.leaf = None
            if not done:
                reducer.leave()

    def _check_start(self) -> None:
        for name, parameter in zip(self.reducer.names, self.reducer.parameters, strict=True):
            if parameter.grad is not None:
                raise ValueError(
                    f"parameter {name!r} already has a gradient when micro_batches() begins: call "
                    "optimizer.zero_grad(set_to_none=True) before it; the step is the sum of its leaves alone"
                )
        self._buffers: list[tuple[str, nn.Module, str]] = []
        for name, module in self.module.named_modules():
            self._buffers += [(f"{name}.{key}".lstrip("."), module, key) for key in module._buffers]
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{name!r} is a SyncBatchNorm, which mixes the micro-batches of several ranks: a "
                    "declared step would depend on the placement. Use GroupNorm or LayerNorm, or plain "
                    "backward outside of micro_batches()"
                )

    def _check_leaf(self, leaf: Leaf, before: list[State]) -> None:
        if leaf.gradients == 0 and leaf.weight != 0:
            raise ValueError(
                f"micro-batch {leaf.index} ended without a gradient: call backward() once per micro-batch, "
                "inside the loop (a loss over several cannot be declared), or set leaf.weight = 0"
            )
        for (name, owner, key), (buffer, version) in zip(self._buffers, before, strict=True):
            if owner._buffers[key] is not buffer or (buffer is not None and buffer._version != version):
                raise ValueError(
                    f"forward changed buffer {name!r} in a declared step: it would depend on who had "
                    "which micro-batch. Put the layer into eval() mode, use track_running_stats=False, "
                    "GroupNorm or LayerNorm, or train with plain backward outside of micro_batches()"
                )

    def _buffer_states(self) -> list[State]:
        buffers = [owner._buffers[key] for _, owner, key in self._buffers]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]


def _checked(leaf: Leaf) -> Leaf:
    if type(leaf.weight) is not int or leaf.weight < 0:
        raise ValueError(
            f"weight of micro-batch {leaf.index}: expected a non-negative int (a number of items), got "
            f"{leaf.weight!r}; integers keep the sum of weights exact"
        )
    return leaf
