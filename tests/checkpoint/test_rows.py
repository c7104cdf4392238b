"""Moments that several shard groups have: saved once, loaded by all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep.checkpoint.shorthand import save
from instep.mesh.mesh import Mesh
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.shard.optimizer import ShardedOptimizer
from instep.state.shards import Shard
from instep.state.stored import assemble, shards_from_json, shards_to_json
from tests.kinds import KINDS, Program, net
from tests.parity import filled
from tests.training_state import training_state
from tests.world import world

ROWS = {"dp": 2, "shard": 2}


PROGRAM = Program("replicated", net)


@world(4, **ROWS)
@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "stage 3"])
def test_of_what_shard_groups_hold_alike_each_writes_a_run_and_all_of_them_everything_once(
    mesh: Mesh, kind: str
) -> None:
    model, optimizer = KINDS[kind].make(filled(net()), mesh)
    PROGRAM.step(model, optimizer, 0)
    state = training_state(model, optimizer)
    assert state.is_divided
    assert state.group.ranks == state.everyone.ranks == (0, 1, 2, 3)
    held, owned = state.shards(), state.owned()
    for shard in held:
        assert mesh.rank in shard.holders
        assert (mesh.rank + 2) % 4 in shard.holders  # at the same place in the other shard group
    by_rank = told(mesh, shards_to_json(held))
    assert by_rank[0] == by_rank[2] and by_rank[1] == by_rank[3]
    rows = {str(rank): shards_from_json(its) for rank, its in enumerate(told(mesh, owned_rows(owned)))}
    everything = assemble(rows)  # or it raises: each element once
    assert set(everything) == {row[0] for its in by_rank for row in its}
    sizes = [sum(row.last - row.first for row in its) for its in rows.values()]
    assert max(sizes) - min(sizes) <= len(everything) * BLOCK_ELEMENTS
    alone = training_state(getattr(model, "module", model), optimizer, mesh.data.group)
    assert alone.group.ranks == state.group.ranks
    assert owned_rows(alone.owned()) == owned_rows(owned)


def owned_rows(owned: list[Shard]) -> Any:
    return shards_to_json(owned)


def told(mesh: Mesh, value: Any) -> list[Any]:
    """Every rank's ``value``."""
    return [
        json.loads(data) for data in mesh.world.group.all_gather_bytes(json.dumps(value).encode(), "rows")
    ]


@world(4, **ROWS)
def save_the_bare_module(mesh: Mesh, directory: Path) -> None:
    model, optimizer = KINDS["stage 1"].make(filled(net()), mesh)
    others = ShardedOptimizer(nn.Linear(3, 2).parameters(), torch.optim.SGD, mesh["shard"], lr=0.1)
    assert (optimizer.num_shard_groups, others.num_shard_groups) == (2, 2)
    with pytest.raises(ValueError, match=r"2 shard groups of 2 ranks have.*pass the DataParallel"):
        save(directory, step=1, model=model.module, optimizer=optimizer)
    assert not list(directory.iterdir())
    others.close()


def test_a_bare_module_with_several_shard_groups_is_refused_by_name(tmp_path: Path) -> None:
    save_the_bare_module(directory=tmp_path)
