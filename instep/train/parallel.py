"""How the micro-batches of a step are shared out, and how their gradients become weights.

    Ranks      naive, flat, overlap, bucketed: every rank ends with the gradient and makes the same update
    Server     rank 0 ends with the gradient, makes the update, and sends the weights
    Threads    one process: replicas in threads, one module, one update

One loop trains with any of them. ``gradients`` makes a declared step, ``update`` clips and steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh
from instep.ordered.norm import clip_grad_norm_, grad_norm
from instep.replicate.leaves import Leaf
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.train.config import Config, local_ranks

LossOf = Callable[[nn.Module, Leaf], Tensor]
"""The loss of one micro-batch with the given model."""


class Ranks:
    """A replica per rank, and the same update on each."""

    model: Any

    def __init__(self, config: Config, mesh: Mesh, module: nn.Module, optimizer: Optimizer) -> None:
        self.config, self.module, self.optimizer = config, module, optimizer
        self.recorder = mesh.recorder
        self.num_replicas = mesh["dp"].whole.size
        self._wrap(mesh)

    @property
    def contract(self) -> str | None:
        """Which of the two contracts the last step was under."""
        contract: str | None = self.model.contract
        return contract

    def gradients(self, step: int, loss_of: LossOf) -> dict[int, Tensor]:
        """Forward and backward of step number ``step``; this rank's losses by micro-batch."""
        leaves = self.model.micro_batches(self.config.num_leaves, step=step)
        return {leaf.index: _backward(self.module, leaf, loss_of) for leaf in leaves}

    def update(self) -> float:
        """New weights on all ranks; the norm of the gradient before clipping."""
        with self.recorder.span("update", lane="compute"):
            norm = self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norm

    def keep_own_state(self) -> None:
        """All moments have been loaded on every rank: drop those that this one has no use for."""

    def _wrap(self, mesh: Mesh) -> None:
        self.model = DataParallel(
            self.module,
            process_group=mesh["dp"],
            strategy=self.config.parallel.strategy,
            bucket_cap_mb=self.config.parallel.bucket_mb,
            ordered=self.config.parallel.ordered,
            find_unused_parameters=False,
            seed=self.config.seed,
        )

    def _clip(self) -> float:
        if self.config.optim.clip:
            return clip_grad_norm_(self.module.parameters(), self.config.optim.clip).item()
        return grad_norm(p.grad for p in self.module.parameters() if p.grad is not None)


class Server(Ranks):
    """A replica per rank, and the update of rank 0 for all."""

    def update(self) -> float:
        """As in ``Ranks``, but only the server knows the norm: nan on its workers."""
        norm = math.nan
        if self.model.is_server:
            with self.recorder.span("clip", lane="compute"):
                norm = self._clip()
        self.model.step()
        return norm

    def keep_own_state(self) -> None:
        """As in ``Ranks``: workers need no moments."""
        if not self.model.is_server:
            self.optimizer.state.clear()

    def _wrap(self, mesh: Mesh) -> None:
        self.model = ParameterServer(
            self.module, self.optimizer, mesh["dp"], find_unused_parameters=False, seed=self.config.seed
        )


class Threads(Ranks):
    """A replica per thread of this process, and one update."""

    def gradients(self, step: int, loss_of: LossOf) -> dict[int, Tensor]:
        """As in ``Ranks``; all the losses."""

        def body(model: nn.Module, leaf: Leaf) -> Tensor:
            return _backward(model, leaf, loss_of)

        return dict(enumerate(self.model.micro_batches(self.config.num_leaves, body)))

    def _wrap(self, mesh: Mesh) -> None:
        self.num_replicas = local_ranks(self.config, len(os.sched_getaffinity(0)))
        self.model = ThreadedReplicas(self.module, self.num_replicas, recorder=self.recorder)


def _backward(model: nn.Module, leaf: Leaf, loss_of: LossOf) -> Tensor:
    loss = loss_of(model, leaf)
    loss.backward()
    return loss.detach()


def parallel(config: Config, mesh: Mesh, module: nn.Module, optimizer: Optimizer) -> Ranks:
    """The way to train that ``config.parallel.strategy`` names. Collective."""
    kind = {"server": Server, "threads": Threads}.get(config.parallel.strategy, Ranks)
    return kind(config, mesh, module, optimizer)
