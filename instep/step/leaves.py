"""The declared step: a global batch of G micro-batches, whichever rank computes them.

for leaf in model.micro_batches(G):
    loss = f(model(x[leaf.index]))
    loss.backward()
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instep.ordered.keys import LeafKeys
from instep.step.reduction import Reduction
from instep.step.roster import Roster

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


class DeclaredStep:
    """Runs the leaves of this rank, one step at a time.

    In a step: per leaf, the random generators are keyed, gradients gathered, and the rules checked that
    placement independence rests on; after the last leaf, gradients are reduced and set.
    """

    def __init__(self, module: nn.Module, reducer: Reduction, keys: LeafKeys, roster: Roster) -> None:
        self.module = module
        self.reducer = reducer
        self.keys = keys
        self.roster = roster
        self.leaf: Leaf | None = None
        self._weight = 0  # of the leaves that have had gradients
        self._weight_taken: int | None = None  # of the open leaf, when its first gradient came

    def gradient_came(self) -> None:
        """A gradient of the open leaf, if there is one, has come: its weight counts from now on."""
        if self.leaf is not None and self._weight_taken is None:
            self._weight_taken = _checked(self.leaf).weight
            self._weight += self._weight_taken

    def run(self, num_leaves: int, step: int) -> Iterator[Leaf]:
        """Yield this rank's leaves of step ``step``, then set every ``.grad``.

        Raises:
            ValueError: a rule of declared steps is broken; the message names it and the ways out.
            Desync: another rank left the step, or is in another one.
        """
        group, reducer = self.reducer.group, self.reducer
        plan = reducer.assign(num_leaves)
        span = reducer.recorder.span
        with span("prepare", lane="host"):
            self._check_start()
            reducer.begin(plan, lambda: self._weight)
        self._weight = 0
        own = plan.leaves[group.rank]
        leaf = None
        try:
            for index in own:
                leaf = self.leaf = Leaf(index, num_leaves)
                with span("micro-batch", lane="host", leaf=index):
                    self._weight_taken = None
                    before = self._buffer_states()
                    reducer.open_leaf(index, last=index == own[-1])
                    with self.keys.leaf(step, index):
                        yield leaf
                    self._check_leaf(leaf, before)
                    reducer.close_leaf()
            leaf = self.leaf = None
            with span("finish", lane="host"):
                self._check_statistics()
                reducer.finish()
        finally:
            if self.leaf is leaf:  # not if another step has begun since
                self.leaf = None
                reducer.leave()

    def _check_start(self) -> None:
        if self.leaf is not None:
            self.leaf = None
            self.reducer.leave()
            raise ValueError(
                "micro_batches() began while the loop of another one was open, nested or left by keeping its "
                "iterator: run one to its end, or close() the iterator, before the next one begins"
            )
        self.roster.check()
        for name, parameter in zip(self.reducer.names, self.reducer.parameters, strict=True):
            if parameter.grad is not None:
                raise ValueError(
                    f"parameter {name!r} already has a gradient when micro_batches() begins: call "
                    "optimizer.zero_grad(set_to_none=True) before it; the step is the sum of its leaves alone"
                )
        # The kernel of batch norm writes its statistics without counting a version.
        buffers = [(name, x) for name, x in self.module.named_buffers() if x.is_floating_point()]
        self._statistics = [(name, x, x.detach().clone()) for name, x in buffers]
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
        if leaf is not self.leaf:
            raise ValueError(f"the step of micro-batch {leaf.index} was given up when another one began")
        if self._weight_taken is None and leaf.weight != 0:
            raise ValueError(
                f"micro-batch {leaf.index} ended without a gradient: call backward() once per micro-batch, "
                "inside the loop (a loss over several cannot be declared), or set leaf.weight = 0"
            )
        if self._weight_taken is not None and leaf.weight != self._weight_taken:
            raise ValueError(
                f"the weight of micro-batch {leaf.index} was {self._weight_taken} in backward and is "
                f"{leaf.weight} now: set leaf.weight before backward"
            )
        for (name, owner, key), (buffer, version) in zip(self._buffers, before, strict=True):
            if owner._buffers[key] is not buffer or (buffer is not None and buffer._version != version):
                raise _changed(name)

    def _check_statistics(self) -> None:
        for name, buffer, before in self._statistics:
            if not torch.equal(buffer, before):
                raise _changed(name)

    def _buffer_states(self) -> list[State]:
        buffers = [owner._buffers[key] for _, owner, key in self._buffers]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]


def _changed(name: str) -> ValueError:
    return ValueError(
        f"forward changed buffer {name!r} in a declared step: it would depend on who had which micro-batch. "
        "Put the layer into eval() mode, use track_running_stats=False, GroupNorm or LayerNorm, or train "
        "with plain backward outside of micro_batches()"
    )


def _checked(leaf: Leaf) -> Leaf:
    if type(leaf.weight) is not int or leaf.weight < 0:
        raise ValueError(
            f"weight of micro-batch {leaf.index}: expected a non-negative int (a number of items), got "
            f"{leaf.weight!r}; integers keep the sum of weights exact"
        )
    return leaf
