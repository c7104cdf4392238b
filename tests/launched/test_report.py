"""``instep report`` on runs as they are left: whole, going on, killed in the middle of a step, resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from instep.record.directory import RECORD
from instep.record.jsonl import read_lines
from instep.record.step_lines import steps_recorded
from instep.run.folder import workers
from tests.launched.command import Ended, instep, read_until, started_warm, train, tree
from tests.launched.conftest import SLOWLY, STEPS

LONG = 60  # steps: more than are made before a signal arrives


def report(run_dir: Path, out: Path, *words: object) -> tuple[dict[str, Any], Ended]:
    """The figures of a report, and how the command ended."""
    ended = instep("report", run_dir, "--out", out, *words, cwd=out.parent)
    assert ended.code == 0, ended.err
    assert ended.err == "" and "</html>" in (out / "report.html").read_text()
    return json.loads((out / "report.json").read_text()), ended


def test_a_finished_run_is_accounted_for_rank_by_rank(recipe: tuple[str, ...], tmp_path: Path) -> None:
    ended = train(*recipe, "--steps", 20, "-n", 2, "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    story, said = report(tmp_path / "run", tmp_path / "out", "--steps", 3, 19)
    assert (story["run"]["state"], story["run"]["notes"]) == ("finished", [])
    assert [row["rank"] for row in story["breakdown"]["ranks"]] == [0, 1]
    for row in story["breakdown"]["ranks"]:
        assert row["steps"] == 18 and sum(row["parts"].values()) == pytest.approx(row["wall_ms"])
        assert row["unattributed_share"] < 0.1 and min(row["parts"].values()) >= 0
    assert [step["step"] for step in story["timeline"]["steps"]] == [3, 19]
    assert story["curves"]["steps"] == [*range(20)] and story["buckets"] and story["contract"]
    assert re.search(r"^time   [\d,.]+ ms a step on average over \d+ = compute ", said.out, re.MULTILINE)


@pytest.mark.slow
def test_going_on_then_killed_then_resumed_on_fewer_ranks(recipe: tuple[str, ...], tmp_path: Path) -> None:
    path, flags = tmp_path / "run", (*recipe, "--steps", LONG, "--checkpoint.every", 10)
    with started_warm("train", *flags, *SLOWLY, "-n", 2, "--run-dir", path, cwd=tmp_path) as process:
        read_until(process, f"step 21/{LONG}")  # the save of step 20 has waited for that of step 10
        pids = [process.pid, *(peer.pid for peer in workers(path))]
        for pid in pids:  # in the middle of something, until it has been looked at
            os.kill(pid, signal.SIGSTOP)
        story, _ = report(path, tmp_path / "going on")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    done = steps_recorded(path)
    assert story["run"]["state"] == "running"
    notes = [note for note in story["run"]["notes"] if "not whole" not in note]  # stopped as it was written
    assert notes == [f"the run is still going: {done} of {LONG} steps so far"]

    story, said = report(path, tmp_path / "killed")
    assert story["run"]["state"] == "ended early"
    assert f"note   the run ended early, after {done} of {LONG} steps\n" in said.out
    known = story["over_time"]["steps"]
    assert known == [*range(len(known))] and abs(len(known) - done) <= 1
    assert [row["rank"] for row in story["breakdown"]["ranks"]] == [0, 1]

    resumed = train(*flags, "-n", 1, "--run-dir", path, "--resume", "--stop-after", done + 5, cwd=tmp_path)
    assert resumed.code == 75, resumed.err
    (begin,) = (line["step"] for line in read_lines(path / RECORD) if line.get("restarts") == 1)
    story, _ = report(path, tmp_path / "resumed", "--steps", begin - 1, begin, done + 4)
    ranks = [[row["rank"] for row in step["ranks"]] for step in story["timeline"]["steps"]]
    assert ranks == [[0, 1], [0], [0]] and story["over_time"]["steps"] == [*range(done + 5)]
    assert story["run"]["world_size"] == 1 and [line["world_size"] for line in story["starts"]] == [2, 1]
    assert [row["rank"] for row in story["breakdown"]["ranks"]] == [0]
    assert re.fullmatch(r"rank 1 took part until step \d+: .*", story["run"]["notes"][-1])


def test_a_run_that_is_resumed_after_its_last_step_says_so_and_stays_as_it_was(
    undisturbed: Path, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    """On two ranks, one of which has made no step ever, and with all of the state divided otherwise."""
    path = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    before, flags = tree(path), ("--run-dir", path, "--resume", "--parallel.shard-stage", 2)
    again = train(*recipe, "-n", 2, *flags, cwd=tmp_path)
    assert again.code == 0, again.err
    assert again.err.splitlines()[-1].startswith(f"already finished: {STEPS} of {STEPS} steps")
    assert f"steps  {STEPS} on 1 rank, bucketed\n" in again.out
    assert f"more   {path}/summary.json; instep report {path}\n" in again.out
    assert tree(path) == before
    story, _ = report(path, tmp_path / "out")
    assert story["run"]["state"] == "finished" and story["over_time"]["steps"] == [*range(STEPS)]
    assert [row["rank"] for row in story["breakdown"]["ranks"]] == [0]
