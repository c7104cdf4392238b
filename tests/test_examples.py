"""The scripts in examples/ do what they say, and what the library does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import instep
from instep.mesh.mesh import Mesh
from tests.world import world

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(wrap, rank: int) -> list[torch.Tensor]:
    """The weights after three steps, from others on each rank."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@world(2, by="process")
def test_ddp_in_sixty_lines_trains_as_the_library_does(mesh: Mesh) -> None:
    short = example("ddp_in_sixty_lines")
    ours = trained(instep.DataParallel, mesh.rank)
    assert all(map(torch.equal, trained(short.DataParallel, mesh.rank), ours))
    assert short.main(steps=50) < 0.02
    torch.manual_seed(mesh.rank)
    with pytest.raises(ValueError, match="the ranks begin with different weights"):
        short.DataParallel(nn.Linear(2, 2), verify=True)


def test_the_sixty_lines_are_counted() -> None:
    lines = (EXAMPLES / "ddp_in_sixty_lines.py").read_text().split('"""', 2)[2].splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", '"""'))]
    assert len(code) <= 60
