"""Moments that several rows of ranks have: saved once, loaded by all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from instep.checkpoint.load import verify
from instep.checkpoint.owned import holding
from instep.checkpoint.shorthand import save
from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.checkpoint.test_stages import expected, load_and_go_on, made, train, train_and_save, world

__all__ = ["expected"]  # a fixture

ROWS = {"dp": 2, "shard": 2}


@pytest.mark.parametrize(("ranks", "stage"), [(3, 2), (2, 0)])
def test_what_rows_have_saved_in_stage_1_goes_on_elsewhere(
    tmp_path: Path, expected: tuple[str, str], ranks: int, stage: int
) -> None:
    world(4, **ROWS)(train_and_save)(stage=1, directory=tmp_path)
    assert verify(tmp_path / "step-00000002").state_sha256 == expected[0]
    world(ranks)(load_and_go_on)(stage=stage, directory=tmp_path, expected=expected[1])


def test_rows_in_stage_1_go_on_from_what_others_have_saved(tmp_path: Path, expected: tuple[str, str]) -> None:
    world(3)(train_and_save)(stage=3, directory=tmp_path)
    world(4, **ROWS)(load_and_go_on)(stage=1, directory=tmp_path, expected=expected[1])


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(4, **ROWS)
def test_the_first_row_keeps_what_all_rows_hold(mesh: Mesh, stage: int) -> None:
    model, optimizer = made(mesh, stage, "a")
    train(model, optimizer, 1)
    division = holding(model, optimizer)
    assert division is not None
    assert division.group.ranks == (0, 1, 2, 3)
    assert division.keeper == (mesh.rank < 2)
    assert bool(division.divided) == division.keeper
    assert division.held or mesh.rank % 2
    alone = holding(getattr(model, "module", model), optimizer, mesh.data.group)
    assert alone is not None
    assert (alone.group.ranks, alone.keeper) == (division.group.ranks, division.keeper)


@world(4, **ROWS)
def save_the_bare_module(mesh: Mesh, directory: Path) -> None:
    model, optimizer = made(mesh, 1, "a")
    others = ShardedOptimizer(nn.Linear(3, 2).parameters(), torch.optim.SGD, mesh["shard"], lr=0.1)
    assert (optimizer.num_rows, others.num_rows) == (2, 2)
    with pytest.raises(ValueError, match=r"2 rows of 2 ranks have.*pass the DataParallel"):
        save(directory, model.module, optimizer, step=1)
    assert not list(directory.iterdir())
    others.close()


def test_a_bare_module_with_rows_is_refused_by_name(tmp_path: Path) -> None:
    save_the_bare_module(directory=tmp_path)
