"""A sharded optimizer gives the bits of the plain one: weights, moments, options; for one to four ranks."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam

from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.replicate.nets import PLAIN
from tests.shard.trained import (
    FUSED,
    Run,
    TiedWide,
    Wide,
    WideImages,
    assert_bits_of_plain,
    images_step,
    matrices_and_vectors,
    tokens_step,
    wide_step,
)
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}

RUNS = {
    "cut": Run(Wide, wide_step),
    "cut, clipped, scheduled, two groups": Run(
        Wide, wide_step, groups=matrices_and_vectors, clip=0.1, scheduled=True
    ),
    "cut, SGD": Run(Wide, wide_step, SGD, LOOP, num_leaves=7),
    "cut, amsgrad": Run(Wide, wide_step, Adam, {**FUSED, "amsgrad": True}),
    "named": Run(Wide, wide_step, groups=lambda module: module.named_parameters()),
    "tied and frozen": Run(TiedWide, tokens_step, groups=matrices_and_vectors),
    "channels last": Run(WideImages, images_step, num_leaves=3),
    "channels last, SGD": Run(WideImages, images_step, SGD, LOOP, num_leaves=3),
}
ODD = {
    name: Run(
        training.module, training.leaf_step, SGD, LOOP, clip=training.clip, num_leaves=training.num_leaves
    )
    for name, training in PLAIN.items()
}


@world(2, backend="shm")
def test_two_ranks_that_share_memory_give_the_bits_of_one(mesh: Mesh) -> None:
    for run in [*RUNS.values(), *ODD.values()]:
        assert_bits_of_plain(mesh, run)


@world(4)
def test_the_wide_model_is_cut_in_the_middle_of_its_matrices(mesh: Mesh) -> None:
    module = Wide()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, mesh)
    pieces = optimizer.sharded_state_dict()["pieces"]
    assert any(
        piece["first"] > 0 or piece["last"] < 288 * 72 for piece in pieces if piece["parameter"] in (0, 2)
    )
    optimizer.close()
