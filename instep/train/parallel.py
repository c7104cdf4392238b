"""How the micro-batches of a step are shared out, and how their gradients become weights.

    Ranks      naive, flat, overlap, bucketed: every rank ends with the gradient and makes the same update
    Server     rank 0 ends with the gradient, makes the update, and sends the weights
    Threads    one process: replicas in threads, one module, one update
    Sharded    as Ranks, but each updates its part of the weights, and the moments are divided: stage 1
    Fully      the gradients are divided too, and the weights: stages 2 and 3

One loop trains with any of them: ``gradients`` makes a declared step, ``norm`` clips, then ``update`` or
``skip``. ``pulse`` is told in which phase the main thread is.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.elastic.pulse import Pulse
from instep.mesh.mesh import Mesh
from instep.ordered.hash import Entry, state_entries
from instep.ordered.keys import initialize
from instep.ordered.norm import clip_grad_norm_, grad_norm
from instep.ordered.tree import rank_major
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.shard import claims
from instep.shard.fully import fully_shard
from instep.shard.parts import replicated_entries
from instep.shard.ranks import num_rows
from instep.shard.rounds import deal
from instep.step.leaves import Leaf
from instep.train.config import Config, local_ranks
from instep.train.optimizers import make_sharded

LossOf = Callable[[nn.Module, Leaf], Tensor]
"""The loss of one micro-batch with the given model."""


class Ranks:
    """A replica per rank, and the same update on each."""

    model: Any
    holds_state = True  # this rank has all of the state, moments included
    is_sharded = False  # no rank has all of it, if there are several

    def __init__(
        self, config: Config, mesh: Mesh, module: nn.Module, optimizer: Optimizer, pulse: Pulse
    ) -> None:
        self.config, self.module, self.optimizer, self.pulse = config, module, optimizer, pulse
        self.recorder = mesh.recorder
        self.num_replicas = mesh.data.size
        self.row_size = self.num_replicas // num_rows(mesh)  # ranks that divide what is divided
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
        contract: str | None = self.model.contract
        return contract

    def gradients(self, step: int, loss_of: LossOf) -> dict[int, Tensor]:
        """Forward and backward of step number ``step``; this rank's losses by micro-batch."""
        losses = {}
        for leaf in self.model.micro_batches(self.config.num_leaves, step=step):
            loss = loss_of(self.module, leaf)
            with self.recorder.span("backward", lane="compute", leaf=leaf.index):
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


class Sharded(Ranks):
    """A replica per rank, of whose moments each has a part.

    ``optimizer`` is one of its own, of these ranks, without moments; the weights move into its memory.
    """

    is_sharded = True

    @property
    def holds_state(self) -> bool:  # type: ignore[override]
        """A rank that is alone in its row has all parts."""
        return self.row_size == 1

    def begin(self) -> None:
        """As in ``Ranks``; of one copy only its owner writes it."""
        group = self._sharded.group
        if group.rank == 0 or not self.config.parallel.one_copy:
            super().begin()
        group.barrier("the first values of the parameters")

    def update(self) -> None:
        """As in ``Ranks``; who has updated its part waits for the others' parts."""
        self.pulse.enter("exchange")
        self.optimizer.step()  # which records its own spans
        self.optimizer.zero_grad()

    def replicated(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Weights that each has, not moments."""
        return replicated_entries(self.module)

    def close(self) -> None:
        """As in ``Ranks``; the weights stay where they are, and the moments go."""
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


class Fully(Sharded):
    """The module in slices, in place: gradients, and in stage 3 the weights.

    ``bare`` makes a module of the same kind. After ``close`` the weights of stage 3 have no memory any more.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        module: nn.Module,
        optimizer: Optimizer,
        pulse: Pulse,
        bare: Callable[[], nn.Module],
    ) -> None:
        self._bare = bare
        super().__init__(config, mesh, module, optimizer, pulse)

    def begin(self) -> None:
        """As in ``Ranks``, one parameter after the other, of which a rank keeps its slice."""
        stage3 = self.model.sharding.stage3
        if stage3 is None:
            super().begin()
            return
        for unit in stage3.units:
            unit.free()
            unit.materialised = False
        self.model.materialise(seed=self.config.seed)

    def plan(self, num_ranks: int) -> Sequence[Sequence[int]]:
        """Rows have ranges, in which their ranks take turns."""
        return deal(self.config.num_leaves, self.row_size, num_ranks // self.row_size)

    def twin(self) -> nn.Module:
        """As in ``Ranks``; slices that other ranks have are fetched."""
        twin = self._bare()
        twin.to(next(self.module.parameters()).device)
        twin.load_state_dict(self.module.state_dict())
        twin.train(self.module.training)
        return twin

    def _unwrap_module(self) -> None:
        self.model.close(wait=False)  # all leave after the same step, or after one that was given up
        _leave_homes(self.module)

    def _wrap_module(self, mesh: Mesh) -> None:
        try:
            self.model = fully_shard(
                self.module,
                mesh,
                stage=self.config.parallel.shard_stage,
                one_copy=self.config.parallel.one_copy,
                find_unused_parameters=False,
                seed=self.config.seed,
                device=mesh.device,
            )
        except BaseException:
            _leave_homes(self.module)  # a rank may have been lost half-way
            raise


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
            self.module, self.optimizer, mesh, find_unused_parameters=False, seed=self.config.seed
        )


class Threads(Ranks):
    """A replica per thread of this process, and one update."""

    def gradients(self, step: int, loss_of: LossOf) -> dict[int, Tensor]:
        """As in ``Ranks``; all the losses."""

        def body(model: nn.Module, leaf: Leaf) -> Tensor:
            loss = loss_of(model, leaf)
            with self.recorder.span("backward", lane="compute", leaf=leaf.index):
                loss.backward()
            return loss.detach()

        self.pulse.enter("forward")
        losses = dict(enumerate(self.model.micro_batches(self.config.num_leaves, body)))
        self.pulse.enter("exchange")
        return losses

    def _wrap(self, mesh: Mesh) -> None:
        self.num_replicas = local_ranks(self.config, len(os.sched_getaffinity(0)))
        self.model = ThreadedReplicas(self.module, self.num_replicas, recorder=self.recorder)


def parallel(
    config: Config,
    mesh: Mesh,
    module: nn.Module,
    optimizer: Optimizer,
    pulse: Pulse,
    bare: Callable[[], nn.Module],
) -> Ranks:
    """The way to train that ``config.parallel`` names; ``bare`` makes another such module. Collective."""
    if config.parallel.shard_stage >= 2:
        return Fully(config, mesh, module, optimizer, pulse, bare)
    others = Sharded if config.parallel.shard_stage else Ranks
    kind = {"server": Server, "threads": Threads}.get(config.parallel.strategy, others)
    return kind(config, mesh, module, optimizer, pulse)


def _leave_homes(module: nn.Module) -> None:
    """The parameters of ``module`` belong to nobody."""
    for home in claims.homes(module.parameters()):
        claims.leave(home)
