"""The same small training in every way in which a script can place it, as a run in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import instep

MICRO_BATCHES = 4
PLACEMENTS = ("replicas", "undeclared", "stage1", "stage2", "stage3")

Before = Callable[[int, nn.Module], object]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


class Placed:
    """A model and its optimizer, of ``run``, placed as ``kind`` says."""

    def __init__(self, run: instep.Run, kind: str) -> None:
        self.run, self.kind, self.module = run, kind, net()
        options: dict[str, Any] = {"lr": 0.1, "fused": True}
        self.model: Any
        if kind in ("stage2", "stage3"):
            self.model = instep.fully_shard(self.module, run.mesh, stage=int(kind[-1]))
        else:
            self.model = instep.DataParallel(self.module, run.mesh)
        if kind == "stage1":
            made: Any = instep.ShardedOptimizer(self.module.parameters(), torch.optim.AdamW, **options)
        else:
            made = torch.optim.AdamW(self.module.parameters(), **options)
        self.optimizer = made

    def loss(self, model: nn.Module, step: int, number: int) -> Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + number))
        return model(x).square().mean()

    def _gradients(self, step: int, loss: Callable[..., Tensor]) -> None:
        if self.kind == "undeclared":
            loss(self.model, step, self.run.rank).backward()
        else:
            for micro_batch in self.model.micro_batches(MICRO_BATCHES):
                loss(self.model, step, micro_batch.index).backward()

    def train(
        self,
        num_steps: int,
        *,
        loss: Callable[..., Tensor] | None = None,
        before: Before = lambda step, module: None,
    ) -> list[int]:
        """The steps that were made; ``before(step, module)`` comes before each update."""
        made = []
        for step in self.run.steps(num_steps, model=self.model, optimizer=self.optimizer):
            with step:
                self._gradients(int(step), loss or self.loss)
                before(int(step), self.module)
                self.optimizer.step()
                self.optimizer.zero_grad()
            made.append(int(step))
        return made


def run_of(path: Path, kind: str, **words: Any) -> Placed:
    """A run in ``path`` with its training."""
    return Placed(instep.Run(path, **words), kind)
