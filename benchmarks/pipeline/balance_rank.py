"""A rank of ``balance.py``: a pipeline with a slow stage, its proposal, and the model cut as proposed."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import instep

SLOW_RANK = 1
WARM_UP, LOOKED_AT = 3, 8  # steps before the proposal: those that are not counted, and those that are


class Feed(nn.Module):
    """A feed-forward block, as in a transformer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Slowed:
    """Makes every layer of ``net`` take ``times`` as long on this rank, by waiting after its work."""

    def __init__(self, net: nn.Sequential, times: float) -> None:
        self.times = times
        self._begun: dict[int, float] = {}
        for layer in net:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)
            layer.register_full_backward_pre_hook(self._begin)
            layer.register_full_backward_hook(self._end)

    def _begin(self, layer: nn.Module, *_: Any) -> None:
        self._begun[id(layer)] = time.perf_counter()

    def _end(self, layer: nn.Module, *_: Any) -> None:
        now = time.perf_counter()
        until = now + (self.times - 1) * (now - self._begun[id(layer)])
        while time.perf_counter() < until:  # as a slow processor, it is busy
            pass


class Trained:
    """A copy of ``net``, cut at ``cuts``; each call is a step."""

    def __init__(self, net: nn.Sequential, mesh: Any, task: dict[str, Any], cuts: list[int]) -> None:
        torch.manual_seed(1)
        self.x = torch.randn(task["micro_batches"], task["rows"], task["width"])
        own = deepcopy(net)
        if mesh.rank == SLOW_RANK and task["slow_rank"] > 1:
            Slowed(own, task["slow_rank"])
        self.model = instep.Pipeline(
            own, mesh, task["schedule"], task["micro_batches"], cuts=cuts, example=self.x[0]
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.mesh = mesh

    def __call__(self) -> float:
        """The seconds of a step, of this rank."""
        self.mesh.world.group.barrier("a step's begin")
        began = time.perf_counter()
        self.model.step(lambda output, one: output.square().mean(), lambda one: self.x[one.index])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began


def measure(task: dict[str, Any], folder: str) -> None:
    """Train, ask, cut as proposed, and time both by turns: A B, B A, A B, ..."""
    mesh = instep.init(pp=-1, dp=1, backend=task["backend"])
    torch.manual_seed(0)
    net = nn.Sequential(*[Feed(task["width"], hidden) for hidden in task["hidden"]])
    before = Trained(net, mesh, task, task["cuts"])
    for _ in range(WARM_UP + LOOKED_AT):
        before()
    proposal = before.model.propose_cuts(LOOKED_AT)
    after = Trained(net, mesh, task, list(proposal.proposed))
    for _ in range(WARM_UP):
        after()
    times: dict[str, list[float]] = {"before": [], "after": []}
    for sample in range(task["samples"]):
        pairs = [("before", before), ("after", after)]
        for name, trained in pairs[:: 1 if sample % 2 == 0 else -1]:
            times[name].append(trained())
    found = {
        **times,
        "proposed": list(proposal.proposed),
        "expected_s": proposal.expected_s,
        "simulated_s": proposal.simulated_s,
        "step_s": proposal.step_s,
        "text": str(proposal),
    }
    (Path(folder) / str(mesh.rank)).write_text(json.dumps(found))
    for trained in (before, after):
        trained.model.close()
    mesh.close()
