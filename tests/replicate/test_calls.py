"""How many Python functions of the package a step of data parallelism calls, on the training thread.

A reader who follows a step follows these calls, and between two operators each takes as long as reading the
clock. Over gloo, on two ranks; torch's own functions do not count.
These numbers only shrink.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import instep
import instep.run.step
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.world import world

PACKAGE = str(Path(instep.__file__).parent)
NUM_BLOCKS, WIDTH, WARM_UP = 4, 32, 6


def files_of_calls(function: Callable[[], object]) -> list[str]:
    """The file of every function of the package that ``function`` calls in this thread, in order."""
    files: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_BLOCKS)))


@pytest.mark.parametrize(("declared", "most", "num_files"), [(False, 155, 24), (True, 251, 31)])
@world(2)
def test_a_step_has_few_calls(mesh: Mesh, declared: bool, most: int, num_files: int) -> None:
    model = DataParallel(mlp(), process_group=mesh)
    optimizer, x = SGD(model.parameters(), lr=0.1), torch.ones(4, WIDTH)

    def step() -> None:
        if declared:
            for _ in model.micro_batches(2):
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    ours = (
        instep.run.step.__file__
    )  # its hook is there where another test had a run, and finds no step of one
    files = [file for file in files_of_calls(step) if file != ours]
    assert len(files) <= most
    assert len(set(files)) <= num_files
    model.close()
