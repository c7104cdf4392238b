"""A model that changes, and is not registered, is told of once, by its kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import instep
from tests.run.loops import Loop


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    run = instep.Run(tmp_path / "run")
    yield Loop(run)
    run.close()


def test_an_average_of_the_weights_is_told_of_once(loop: Loop) -> None:
    average = AveragedModel(loop.model.module)
    with pytest.warns(RuntimeWarning) as told:
        loop.train(3, after=lambda step: average.update_parameters(loop.model.module))
    (message,) = [str(one.message) for one in told if "not registered" in str(one.message)]
    assert message.startswith("step 0 has changed AveragedModel, a model that is not registered: a rank")


def test_one_that_is_registered_or_stays_as_it_is_is_not_told_of(loop: Loop) -> None:
    average = AveragedModel(loop.model.module)
    teacher = copy.deepcopy(loop.model.module)
    inner = nn.Sequential(loop.model.module[0])  # has weights of a registered model
    with torch.inference_mode():
        kept = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.train(
            2,
            after=lambda step: average.update_parameters(loop.model.module),
            loss=lambda y: (y - teacher(torch.ones(4))).square().mean(),
            average=average,
        )
    assert inner[0] is loop.model.module[0] and kept.weight.is_inference()
