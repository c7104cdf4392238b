"""How the micro-batches of a step are shared out, and how their gradients become weights.

    Replicated               naive, flat, overlap, bucketed: all ranks have the gradient and make the update
    DividedOptimizerState    each rank has its part of the moments, and updates that of the weights: stage 1
    FullyDivided             the gradients are divided too, and the weights: stages 2 and 3
    Server                   rank 0 ends with the gradient, makes the update, and sends the weights
    Threads                  one process: replicas in threads, one module, one update

One loop trains with any of them: ``gradients`` makes a declared step, ``norm`` clips, then ``update`` or
``skip``. ``heartbeat`` is told in which phase the main thread is.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.elastic.heartbeat import Heartbeat
from instep.mesh.mesh import Mesh
from instep.ordered.keys import initialize
from instep.ordered.norm import clip_grad_norm_, grad_norm
from instep.ordered.tree import rank_major
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.round_plan import deal
from instep.shard.shard_groups import num_shard_groups
from instep.step.micro_batches import MicroBatch
from instep.train.optimizers import make_sharded
from instep.train.run_config import RunConfig, local_ranks

LossOf = Callable[[nn.Module, MicroBatch], Tensor]
"""The loss of one micro-batch with the given model."""


class Replicated:
    """A replica per rank, and the same update on each."""

    model: Any
    is_sharded = False  # no rank has all of it, if there are several

    def __init__(
        self, config: RunConfig, mesh: Mesh, module: nn.Module, optimizer: Optimizer, heartbeat: Heartbeat
    ) -> None:
        self.config, self.module, self.optimizer, self.heartbeat = config, module, optimizer, heartbeat
        self.recorder = mesh.recorder
        self.num_replicas = mesh.data.size
        self.shard_group_size = self.num_replicas // num_shard_groups(
            mesh
        )  # ranks that divide what is divided
        self._wrap(mesh)

    def begin(self) -> None:
        """The weights of before the first step. Collective where the state is sharded."""
        initialize(self.module, self.config.seed)

    def plan(self, num_ranks: int) -> Sequence[Sequence[int]]:
        """The micro-batches of each of so many ranks."""
        return rank_major(self.config.num_leaves, num_ranks)

    def twin(self) -> nn.Module:
        """The module once more, whole, with memory of its own and nothing around it. Not collective."""
        return copy.deepcopy(self.module)

    @property
    def contract(self) -> str | None:
        """Which of the two contracts the last step was under."""
        contract: str | None = self.model.step_mode
        return contract

    def gradients(self, step: int, loss_of: LossOf) -> dict[int, Tensor]:
        """Forward and backward of step number ``step``; this rank's losses by micro-batch."""
        losses = {}
        for leaf in self.model.micro_batches(self.config.num_leaves, step=step):
            loss = loss_of(self.module, leaf)
            with self.recorder.span("backward", lane="compute", leaf=leaf.index):
                self.heartbeat.enter("backward")
                loss.backward()
            losses[leaf.index] = loss.detach()
            self.heartbeat.enter("exchange")
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

    def close(self) -> None:
        """Give the group back."""
        self.model.close()

    def _wrap(self, mesh: Mesh) -> None:
        self.model = DataParallel(
            self.module,
            process_group=mesh,
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


class DividedOptimizerState(Replicated):
    """A replica per rank, of whose moments each has a part.

    ``optimizer`` is one of its own, of these ranks, without moments; the weights move into its memory.
    """

    is_sharded = True

    def update(self) -> None:
        """As in ``Replicated``; who has updated its part waits for the others' parts."""
        self.heartbeat.enter("exchange")
        self.optimizer.step()  # which records its own spans
        self.optimizer.zero_grad()

    def close(self) -> None:
        """As in ``Replicated``; the weights stay where they are, and the moments go."""
        self._sharded.close()
        self._unwrap_module()

    def _wrap(self, mesh: Mesh) -> None:
        self._wrap_module(mesh)
        try:
            self._sharded = make_sharded(
                self.module.parameters(),
                self.config.optim,
                mesh,
                one_copy=self.config.parallel.one_copy,
            )
        except BaseException:
            self._unwrap_module()
            raise
        self.optimizer = self._sharded

    def _wrap_module(self, mesh: Mesh) -> None:
        super()._wrap(mesh)

    def _unwrap_module(self) -> None:
        super().close()


class FullyDivided(DividedOptimizerState):
    """The module in slices, in place: gradients, and in stage 3 the weights.

    ``bare`` makes a module of the same kind. After ``close`` the weights of stage 3 have no memory any more.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        module: nn.Module,
        optimizer: Optimizer,
        heartbeat: Heartbeat,
        bare: Callable[[], nn.Module],
    ) -> None:
        self._bare = bare
        super().__init__(config, mesh, module, optimizer, heartbeat)

    def begin(self) -> None:
        """As in ``Replicated``, one parameter after the other, of which a rank keeps its slice."""
        stage3 = self.model.sharding.stage3
        if stage3 is None:
            super().begin()
            return
        for unit in stage3.units:
            unit.free()
            unit.materialised = False
        self.model.materialise(seed=self.config.seed)

    def plan(self, num_ranks: int) -> Sequence[Sequence[int]]:
        """Each shard group has a range, in which its ranks take turns."""
        return deal(self.config.num_leaves, self.shard_group_size, num_ranks // self.shard_group_size)

    def twin(self) -> nn.Module:
        """As in ``Replicated``; slices that other ranks have are fetched."""
        twin = self._bare()
        twin.to(next(self.module.parameters()).device)
        twin.load_state_dict(self.module.state_dict())
        twin.train(self.module.training)
        return twin

    def _unwrap_module(self) -> None:
        self.model.close(wait=False)  # all leave after the same step, or after one that was given up

    def _wrap_module(self, mesh: Mesh) -> None:
        self.model = fully_shard(
            self.module,
            mesh,
            stage=self.config.parallel.shard_stage,
            one_copy=self.config.parallel.one_copy,
            find_unused_parameters=False,
            seed=self.config.seed,
            device=mesh.device,
        )


class Server(Replicated):
    """A replica per rank, and the update of rank 0 for all."""

    def norm(self) -> float:
        """As in ``Replicated``, but only the server knows it: 0 on its workers."""
        return super().norm() if self.model.is_server else 0.0

    def told(self, norm: float) -> dict[str, float]:
        """The server's norm, and no other."""
        return {"norm": norm}

    def update(self) -> None:
        """As in ``Replicated``: the server's optimizer, then its weights for all."""
        if not self.model.is_server:
            self.heartbeat.enter("exchange")  # it waits for the server
        self.model.step()

    def skip(self) -> None:
        """As in ``Replicated``."""
        self.model.discard()

    def _wrap(self, mesh: Mesh) -> None:
        self.model = ParameterServer(
            self.module, self.optimizer, mesh, find_unused_parameters=False, seed=self.config.seed
        )


class Threads(Replicated):
    """A replica per thread of this process, and one update."""

    def gradients(self, step: int, loss_of: LossOf) -> dict[int, Tensor]:
        """As in ``Replicated``; all the losses."""

        def body(model: nn.Module, leaf: MicroBatch) -> Tensor:
            loss = loss_of(model, leaf)
            with self.recorder.span("backward", lane="compute", leaf=leaf.index):
                loss.backward()
            return loss.detach()

        self.heartbeat.enter("forward")
        losses = dict(enumerate(self.model.micro_batches(self.config.num_leaves, body)))
        self.heartbeat.enter("exchange")
        return losses

    def _wrap(self, mesh: Mesh) -> None:
        self.num_replicas = local_ranks(self.config, len(os.sched_getaffinity(0)))
        self.model = ThreadedReplicas(self.module, self.num_replicas, recorder=self.recorder)


def parallel(
    config: RunConfig,
    mesh: Mesh,
    module: nn.Module,
    optimizer: Optimizer,
    heartbeat: Heartbeat,
    bare: Callable[[], nn.Module],
) -> Replicated:
    """The way to train that ``config.parallel`` names; ``bare`` makes another such module. Collective."""
    if config.parallel.shard_stage >= 2:
        return FullyDivided(config, mesh, module, optimizer, heartbeat, bare)
    others = DividedOptimizerState if config.parallel.shard_stage else Replicated
    kind = {"server": Server, "threads": Threads}.get(config.parallel.strategy, others)
    return kind(config, mesh, module, optimizer, heartbeat)
