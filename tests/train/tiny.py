"""A small GPT in training by hand: the declared steps of the loop, each under the checks of its health."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.mesh.mesh import Mesh
from instep.ordered.hash import Entry, state_entries, state_sha256
from instep.ordered.keys import initialize
from instep.ordered.norm import clip_grad_norm_
from instep.ordered.tree import rank_major
from instep.replicate.wrapper import DataParallel
from instep.run.health import Health
from instep.step.micro_batches import MicroBatch
from instep.train.nonfinite import give_up
from instep.train.recompute import Computed, leaf_gradients
from instep.train.run_config import ChecksConfig
from tests.parity import numbers
from tests.replicate.nets import fused, gpt

SEED = 7

Fault = Callable[["Tiny", nn.Module, MicroBatch, Tensor], Tensor]
"""What becomes of a loss."""


class Tiny:
    """One rank's part of the run; ``fault`` may spoil the loss of a micro-batch."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        fault: Fault | None = None,
        checks: ChecksConfig | None = None,
        num_leaves: int = 4,
        module: nn.Module | None = None,
    ) -> None:
        self.mesh, self.fault, self.num_leaves = mesh, fault, num_leaves
        self.group = mesh.world.group
        self.module = module or gpt()
        initialize(self.module, SEED)
        self.model = DataParallel(self.module, process_group=mesh, seed=SEED)
        self.optimizer = fused(self.module.parameters())
        self.health = Health(checks or ChecksConfig())
        self.plan = rank_major(num_leaves, mesh.world.size)
        self.done = 0

    def loss(self, model: nn.Module, leaf: MicroBatch) -> Tensor:
        tokens = (numbers(3, 9, key=f"{self.done} {leaf.index}").abs() * 1000).long() % 17
        logits = model(tokens[:, :-1].contiguous())
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return self.fault(self, model, leaf, loss) if self.fault else loss

    def compute(self, leaf: int) -> Computed:
        """A micro-batch of this step once more."""
        return leaf_gradients(
            self.module, self.loss, leaf, num_leaves=self.num_leaves, step=self.done, seed=SEED
        )

    def gradients(self) -> float:
        """Forward and backward of a step; the norm of the reduced gradient, which is clipped."""
        for leaf in self.model.micro_batches(self.num_leaves, step=self.done):
            self.loss(self.module, leaf).backward()
        return clip_grad_norm_(self.module.parameters(), 0.5).item()

    def step(self) -> str | None:
        """A step; why it was skipped, or None."""
        reason = self.health.planned(self.done)
        if reason is None:
            norm = self.gradients()
            reason = self.health.judge(norm)
            if self.health.exhausted:
                self.give_up(str(reason), norm)
            if reason is None:
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.done += 1
        return reason

    def give_up(self, reason: str, norm: float) -> None:
        give_up(
            self.health,
            reason,
            norm,
            step=self.done,
            compute=self.compute,
            leaves=self.plan[self.group.rank],
            group=self.group,
            weights=self.module.named_parameters(),
        )

    def entries(self) -> list[Entry]:
        return state_entries(self.module, self.optimizer)

    def state_sha256(self) -> str:
        return state_sha256(self.entries(), self.done)


def flawed(factor: float, *, leaves: set[int], steps: set[int]) -> Fault:
    """Multiplies the loss of these micro-batches in these steps."""

    def fault(tiny: Tiny, model: nn.Module, leaf: MicroBatch, loss: Tensor) -> Tensor:
        return loss * factor if leaf.index in leaves and tiny.done in steps else loss

    return fault


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32))
