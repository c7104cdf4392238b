"""Rows of ranks through the command: each has the state once, and all do what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched.command import train
from tests.launched.test_shard_stage import ONE_COPY, STAGE, assert_same_run, summary

ROWS = "--parallel.shard-ranks"


@pytest.mark.slow
def test_rows_that_lose_a_rank_shrink_stop_and_go_on_otherwise_give_the_run_that_nothing_disturbed(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    run = (*recipe, "--run-dir", "run")
    faults = ("--fault", "kill:rank=3,step=2,phase=exchange", "--fault", "resize:ranks=3,step=4")
    ended = train(*run, STAGE, 3, ROWS, 2, "-n", 4, *faults, "--stop-after", 6, cwd=tmp_path)
    assert ended.code == 75, ended.err
    assert "stage 3 of sharding in shard groups of 2 ranks; " in ended.err
    assert "3 ranks cannot be cut into shard groups of 2: the state is divided among 3" in ended.err
    ended = train(*run, STAGE, 2, ROWS, 2, "-n", 4, ONE_COPY, "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    found = summary(tmp_path / "run")
    assert (found["restarts"], found["memory"]["formula"]["bytes_per_parameter"]) == (3, 8)
