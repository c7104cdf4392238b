"""How the micro-batches of a step are shared out, and how their gradients become weights.

    Ranks      naive, flat, overlap, bucketed: every rank ends with the gradient and makes the same update
    Server     rank 0 ends with the gradient, makes the update, and sends the weights
    Threads    one process: replicas in threads, one module, one update

One loop trains with any of them: ``gradients`` makes a declared step, ``norm`` clips, then ``update`` or
``skip``. ``pulse`` is told in which phase the main thread is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.elastic.pulse import Pulse
from instep.mesh.mesh import Mesh
from instep.ordered.hash import Entry, state_entries
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
    holds_state = True  # this rank has all of the state, moments included

    def __init__(
        self, config: Config, mesh: Mesh, module: nn.Module, optimizer: Optimizer, pulse: Pulse
    ) -> None:
        self.config, self.module, self.optimizer, self.pulse = config, module, optimizer, pulse
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
        losses = {}
        for leaf in self.model.micro_batches(self.config.num_leaves, step=step):
            loss = loss_of(self.module, leaf)
            self.pulse.enter("backward")
            loss.backward()
            losses[leaf.index] = loss.detach()
            self.pulse.enter("exchange")
        return losses

    def norm(self) -> float:
        """The norm of the gradient before clipping, which is done here."""
        with self.recorder.span("clip", lane="compute"):
            return self._clip()

    def told(self, norm: float) -> dict[str, float]:
        """What others have to be told, to be added up over the ranks: nothing where all know the norm."""
        return {}

    def update(self) -> None:
        """New weights on all ranks."""
        with self.recorder.span("update", lane="compute"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def skip(self) -> None:
        """The gradient is used for nothing."""
        self.optimizer.zero_grad()

    def replicated(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Those of this rank's ``entries`` that all ranks hold."""
        return entries

    def close(self) -> None:
        """Give the group back."""
        self.model.close()

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
            init_sync=False,  # equal seeds give equal weights, and the state is agreed upon after this
            seed=self.config.seed,
        )

    def _clip(self) -> float:
        if self.config.optim.clip:
            return clip_grad_norm_(self.module.parameters(), self.config.optim.clip).item()
        return grad_norm(p.grad for p in self.module.parameters() if p.grad is not None)


class Server(Ranks):
    """A replica per rank, and the update of rank 0 for all."""

    @property
    def holds_state(self) -> bool:  # type: ignore[override]
        """Workers have no moments."""
        return bool(self.model.is_server)

    def norm(self) -> float:
        """As in ``Ranks``, but only the server knows it: 0 on its workers."""
        return super().norm() if self.holds_state else 0.0

    def told(self, norm: float) -> dict[str, float]:
        """The server's norm, and no other."""
        return {"norm": norm}

    def update(self) -> None:
        """As in ``Ranks``: the server's optimizer, then its weights for all."""
        if not self.holds_state:
            self.pulse.enter("exchange")  # it waits for the server
        self.model.step()

    def skip(self) -> None:
        """As in ``Ranks``."""
        self.model.discard()

    def replicated(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Weights, not moments."""
        return state_entries(self.module)

    def keep_own_state(self) -> None:
        """As in ``Ranks``: workers need no moments."""
        if not self.holds_state:
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
            loss = loss_of(model, leaf)
            loss.backward()
            return loss.detach()

        self.pulse.enter("forward")
        losses = dict(enumerate(self.model.micro_batches(self.config.num_leaves, body)))
        self.pulse.enter("exchange")
        return losses

    def _wrap(self, mesh: Mesh) -> None:
        self.num_replicas = local_ranks(self.config, len(os.sched_getaffinity(0)))
        self.model = ThreadedReplicas(self.module, self.num_replicas, recorder=self.recorder)


def parallel(config: Config, mesh: Mesh, module: nn.Module, optimizer: Optimizer, pulse: Pulse) -> Ranks:
    """The way to train that ``config.parallel.strategy`` names. Collective."""
    kind = {"server": Server, "threads": Threads}.get(config.parallel.strategy, Ranks)
    return kind(config, mesh, module, optimizer, pulse)
