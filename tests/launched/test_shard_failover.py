"""Ranks that hold parts of the state, killed wherever it hurts: the run that nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.checkpoint.load import newest, verify
from instep.run.folder import CHECKPOINTS, FAULTS
from instep.run.jsonl import read_lines
from tests.launched.command import train
from tests.launched.conftest import STEPS
from tests.launched.test_shard_stage import STAGE, assert_same_run, summary


def sources(run_dir: Path) -> list[str]:
    """Where each recovery had the state from."""
    return [line["source"] for line in read_lines(run_dir / FAULTS) if line.get("event") == "recovery"]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_in_the_first_copy_all_go_on_from_what_was_built(
    rank: int, recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    fault = f"kill:rank={rank},step=1,phase=snapshot"
    ended = train(*recipe, STAGE, 1, "-n", 3, "--run-dir", "run", "--fault", fault, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert sources(tmp_path / "run") == ["the snapshot"]  # of before the first step


def test_all_ranks_but_one_killed_at_once_are_replaced_from_the_copies(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    faults = [word for rank in (0, 2) for word in ("--fault", f"kill:rank={rank},step=5,phase=exchange")]
    ended = train(*recipe, STAGE, 1, "-n", 3, "--run-dir", "run", *faults, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert set(sources(tmp_path / "run")) == {"the snapshot"}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_while_all_save_leaves_whole_checkpoints_only(
    rank: int, recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    fault = f"kill:rank={rank},step=4,phase=save"
    flags = (*recipe, STAGE, 1, "-n", 2, "--checkpoint.every", 2, "--run-dir", "run")
    ended = train(*flags, "--fault", fault, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    directory = tmp_path / "run" / CHECKPOINTS
    found = newest(directory)
    assert found is not None
    assert found.manifest.step == STEPS
    assert found.manifest.state_sha256 == summary(undisturbed)["state_sha256"]
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    for path in directory.iterdir():
        verify(path)


def test_another_number_of_ranks_takes_the_parts_over_and_loses_no_step(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """Who parts on purpose copies first."""
    flags = (*recipe, STAGE, 1, "-n", 3, "--run-dir", "run", "--fault", "resize:ranks=2,step=3")
    ended = train(*flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert summary(tmp_path / "run")["world_size"] == 2
