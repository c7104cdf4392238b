"""A load between forward and backward: gradients of old activations through new weights, without an error.

In stage 3 backward gathers the weights again, and it found the ones that had been loaded. New masters did not
count as a change of the parameters, as an optimizer's step does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint.shorthand import load, save
from instep.mesh.mesh import Mesh
from instep.shard.fully import FullySharded, fully_shard
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import samples, square
from tests.world import world

CHANGED = "modified by an inplace operation: .*is at version"
HALF: dict[str, Any] = {"compute_dtype": torch.bfloat16}


def load_again(model: FullySharded, directory: Path) -> None:
    save(directory, model, step=0)
    load(directory, model)


@world(2)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2},
        {"stage": 2, **HALF},
        {"stage": 3},
        {"stage": 3, **HALF},
        {"stage": 3, "reshard_after_forward": False},
    ],
)
def test_a_graph_from_before_the_load_is_refused(mesh: Mesh, options: dict[str, Any], tmp_path: Path) -> None:
    model = fully_shard(filled(Dense()), mesh, **options)
    x = samples(mesh.rank).to(options.get("compute_dtype"))
    loss = model(x).square().mean()
    load_again(model, tmp_path)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    model(x).square().mean().backward()
    model.close()


@world(2)
def test_a_frozen_weight_that_is_loaded_counts_too(mesh: Mesh, tmp_path: Path) -> None:
    module = filled(Dense())
    module.layers[5].requires_grad_(False)
    model = fully_shard(module, mesh, stage=3)
    loss = square(model, mesh.rank)
    load_again(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"'layers\.5\.weight' is at version"):
        loss.backward()
    model.close()
