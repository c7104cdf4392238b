"""A small loop as a run in the test's own process: what it is made of, and what its files say of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import instep
from instep.record.directory import RECORD, SUMMARY
from instep.record.jsonl import read_lines

MICRO_BATCHES = 2

Loss = Callable[[Tensor], Tensor]


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


class Loop:
    """A model, its optimizer and the steps of ``run``."""

    def __init__(self, run: instep.Run, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.run = run
        self.model = instep.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), run.mesh)
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.drawn: list[Tensor] = []

    def train(
        self,
        num_steps: int = 3,
        *,
        loss: Loss = squares,
        before: Callable[[instep.Step], object] = lambda step: None,
        after: Callable[[instep.Step], object] = lambda step: None,
        **objects: Any,
    ) -> list[int]:
        """The steps that were made, each with what is called ``before`` its update and ``after`` it."""
        made = []
        for step in self.run.steps(num_steps, model=self.model, optimizer=self.optimizer, **objects):
            with step:
                losses = []
                for _ in self.model.micro_batches(MICRO_BATCHES):
                    x = torch.randn(3, 4)
                    self.drawn.append(x)
                    value = loss(self.model(x))
                    value.backward()
                    losses.append(value.detach())
                before(step)
                self.optimizer.step()
                after(step)
                self.optimizer.zero_grad()
                step.log(loss=instep.mean(losses))
            made.append(int(step))
        return made


def summary(path: Path) -> dict[str, Any]:
    return json.loads((path / SUMMARY).read_text())


def recorded(path: Path) -> list[dict[str, Any]]:
    """The lines of steps."""
    return [line for line in read_lines(path / RECORD) if "event" not in line]


def bits(path: Path) -> list[dict[str, Any]]:
    """The same, without what took how long."""
    timed = ("_ms", "_per_s")
    return [{name: x for name, x in line.items() if not name.endswith(timed)} for line in recorded(path)]
