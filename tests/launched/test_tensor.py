"""Layers that ranks share, through the command: a kill, then another layout, with the hash of one rank."""

from __future__ import annotations

from pathlib import Path

from tests.launched.command import assert_same_run, events, faults, train
from tests.launched.conftest import STEPS


def test_killed_where_two_ranks_share_layers_and_resumed_where_none_do(
    recipe: tuple[str, ...], tmp_path: Path
) -> None:
    chunks = ("--parallel.tp-chunks", 2)
    ended = train(*recipe, *chunks, "-n", 1, "--run-dir", "one", cwd=tmp_path)
    assert ended.code == 0, ended.err
    shared = ("--parallel.tp", 2, "--parallel.sequence", "-n", 4, "--stop-after", STEPS // 2)
    killed = faults("kill:rank=3,step=2,phase=backward")
    ended = train(*recipe, *chunks, *shared, *killed, "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 75, ended.err
    assert len(events(tmp_path / "run", "failure")) == 1

    whole = train(*recipe, "-n", 2, "--run-dir", "run", "--resume", cwd=tmp_path)
    assert whole.code == 1 and "parallel.tp_chunks" in whole.err, whole.err

    ended = train(*recipe, *chunks, "-n", 2, "--run-dir", "run", "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", tmp_path / "one")
