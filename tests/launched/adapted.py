"""A script that trains adapters beside a frozen base, in stage 3, with the adapters alone in checkpoints."""

import sys

import torch
from torch import nn

import instep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


run = instep.Run("runs/mine", contract={}, checkpoint={"frozen": False})
torch.manual_seed(int(sys.argv[1]))
model = instep.fully_shard(nn.Sequential(Block(), Block()), run.mesh)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
for step in run.steps(4, model=model, optimizer=optimizer):
    with step:
        for micro_batch in model.micro_batches(4):
            torch.manual_seed(step * 4 + micro_batch.index)
            model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
