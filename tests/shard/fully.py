"""Training with a fully sharded module, to be compared with one process that shards nothing."""

from __future__ import annotations

from typing import Any

import torch

from instep.mesh.mesh import Mesh
from instep.ordered.norm import clip_grad_norm_
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.ranks import row_of
from tests.parity import filled
from tests.shard.trained import Result, Run, assert_same, copied, plain


def train_fully(run: Run, mesh: Mesh, **options: Any) -> Result:
    """The declared steps of ``run`` on the ranks of ``mesh``, with ``options`` for ``fully_shard``."""
    model = fully_shard(filled(run.module()), mesh, find_unused_parameters=True, **options)
    optimizer = ShardedOptimizer(run.groups(model), run.kind, row_of(mesh), **run.options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if run.scheduled else None
    for step in range(run.num_steps):
        for leaf in model.micro_batches(run.num_leaves):
            run.leaf_step(model, leaf, step)
        if run.clip is not None:
            clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    result = Result(full_state_dict(model), copied(optimizer.state_dict()))
    optimizer.close()
    model.close()
    return result


def assert_bits_of_one(mesh: Mesh, run: Run, **options: Any) -> None:
    """Weights and moments on every rank are those of one process that shards nothing."""
    ours, expected = train_fully(run, mesh, **options), plain(run)
    assert_same(ours.module, expected.module, "module")
    assert_same(ours.optimizer, expected.optimizer, "optimizer")
