"""What a run tells of itself: its report, its summary, and the advice where something was planted.

Faults last long against a step, so that a busy machine does not matter.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from instep.elastic.faults import Fault
from tests.launched.command import Ended, instep, summary, train, tree
from tests.launched.conftest import STEPS


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


PLANTED_STEPS = 12
SLEEP_S = 0.4  # a step has some 0.02, and several times that on a busy machine
EVERY_STEP = {"step": 1, "steps": PLANTED_STEPS, "seconds": SLEEP_S}


def run(recipe: Sequence[str], faults: Sequence[Fault], path: Path) -> tuple[list[str], dict[str, Any]]:
    """A run on two ranks: the lines that it ends with, and its figures."""
    words = [f"--fault={fault}" for fault in faults]
    ended = train(*recipe, "--steps", PLANTED_STEPS, *words, "-n", 2, "--run-dir", "run", cwd=path)
    assert ended.code == 0, ended.err
    return ended.out.splitlines(), summary(path / "run")


@pytest.mark.parametrize(
    ("phase", "slow_in", "words_for_it"),
    [
        ("forward", "its own compute", "computes longer"),
        ("data", "its data", "waits longer for its data"),
    ],
)
def test_a_slow_rank_is_named_in_the_first_line_of_the_advice(
    phase: str, slow_in: str, words_for_it: str, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    said, found = run(recipe, [Fault("slow", rank=1, phase=phase, **EVERY_STEP)], tmp_path)
    slow, first = found["slow_rank"], found["advice"][0]
    assert (slow["rank"], slow["phase"]) == (1, slow_in)
    assert first["cause"] == "slow rank"
    assert f"Rank 1 {words_for_it}" in first["text"]
    assert first["gain_ms"] == pytest.approx(1e3 * SLEEP_S, rel=1 / 3)
    line = next(line for line in said if line.startswith("advice "))
    assert first["text"] in line


@pytest.mark.slow
def test_where_all_are_equally_slow_nobody_is_named(recipe: tuple[str, ...], tmp_path: Path) -> None:
    both = [Fault("slow", rank=rank, **EVERY_STEP) for rank in range(2)]
    said, found = run(recipe, both, tmp_path)
    assert found["slow_rank"] is None
    assert found["advice"] == []
    assert not [line for line in said if line.startswith(("advice ", "slow "))]
