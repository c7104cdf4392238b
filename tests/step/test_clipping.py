"""Clipping a tied parameter that the loop lists twice, as encoder, then decoder."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from tests.parity import filled
from tests.world import world

TOKENS = torch.arange(8)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 50, bias=False))
        self.decoder[1].weight = self.encoder[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.encoder(tokens))

    def both(self) -> list[Tensor]:
        return list(itertools.chain(self.encoder.parameters(), self.decoder.parameters()))


def trained(net: Tied, model: nn.Module, clip: Callable[..., Tensor]) -> list[float]:
    norms = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        model(TOKENS).square().sum().backward()
        norms.append(float(clip(net.both(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("stage", [0, 2, 3])
@world(2)
def test_it_counts_and_is_scaled_twice_as_in_torch(mesh: Mesh, stage: int) -> None:
    ours, theirs = filled(Tied()), filled(Tied())
    if stage:
        model = instep.fully_shard(ours, mesh, stage=stage)
    else:
        model = instep.DataParallel(ours, process_group=mesh)
    expected = trained(theirs, theirs, nn.utils.clip_grad_norm_)
    assert trained(ours, model, instep.clip_grad_norm_) == pytest.approx(expected, rel=1e-6)
    model.close()
