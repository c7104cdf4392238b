"""The promise, through the command: one hash for every number of ranks, fault, stop, restart, launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from instep.record.directory import CHECKPOINTS, CONFIG, RECORD, SUMMARY, WORKERS
from instep.record.jsonl import read_lines
from instep.timeline.trace_files import FOLDER
from tests.launched.command import (
    assert_same_run,
    events,
    faults,
    read_until,
    started_warm,
    summary,
    train,
)
from tests.launched.conftest import STEPS

# What others read in summary.json.
FIELDS = {
    "state_sha256",
    "steps",
    "world_size",
    "strategy",
    "step_mode",
    "loss_first",
    "loss_last",
    "step_ms_median",
    "tokens_per_s",
    "exposed_comm_share",
    "restarts",
    "fingerprint",
}


def test_a_run_leaves_its_whole_record(undisturbed):
    assert sorted(path.name for path in undisturbed.iterdir()) == sorted(
        [CONFIG, RECORD, SUMMARY, CHECKPOINTS, FOLDER]
    )
    found = summary(undisturbed)
    assert found.keys() >= FIELDS
    assert all(found[field] is not None for field in FIELDS)
    assert (found["steps"], found["world_size"], found["restarts"]) == (STEPS, 1, 0)
    assert found["step_mode"] == "declared"
    assert found["loss_last"] < found["loss_first"]
    saved = sorted(path.name for path in (undisturbed / CHECKPOINTS).iterdir())
    assert saved == ["step-00000000", f"step-{STEPS:08d}"]
    assert read_lines(undisturbed / RECORD)[-1]["state_sha256"] == found["state_sha256"]


def test_three_ranks_give_the_hash_of_one(recipe, undisturbed, tmp_path):
    ended = train(*recipe, "-n", 3, "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert summary(tmp_path / "run")["world_size"] == 3
    assert not (tmp_path / "run" / WORKERS).exists()
    last_words = ended.out.splitlines()
    assert last_words[0] == "run    run"
    assert last_words[-1] == f"state  sha256 {summary(undisturbed)['state_sha256']}"


def test_stopped_on_two_ranks_and_resumed_on_others_gives_the_run_that_nothing_disturbed(
    recipe: tuple[str, ...], undisturbed: Path, half_way: Callable[[], Path], tmp_path: Path
) -> None:
    path = half_way()
    ended = train(*recipe, "-n", 3, "--run-dir", path, "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert f"resumed from {path / CHECKPOINTS / 'step-00000004'}, step 4\n" in ended.err
    assert_same_run(path, undisturbed)
    found = summary(path)
    assert (found["restarts"], found["first_step"], found["world_size"]) == (1, 4, 3)
    assert "\nresume = false\n" in (path / CONFIG).read_text()  # from which the same run may begin again
    assert [row["steps"] for row in found["breakdown"]] == [STEPS - 4] * 3


def test_killed_with_all_its_ranks_and_resumed_on_others_gives_the_run_that_nothing_disturbed(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """The work since the last checkpoint is done again. The last steps wait for the kill."""
    path, run = tmp_path / "run", (*recipe, "--checkpoint.every", 3)
    slowly = ("--fault", f"slow:rank=0,phase=data,step=6,steps={STEPS},seconds=2")
    with started_warm("train", *run, *slowly, "-n", 2, "--run-dir", path, cwd=tmp_path) as process:
        read_until(process, f"step 5/{STEPS}")
        workers = json.loads((path / WORKERS).read_text()).values()
        for pid in (process.pid, *(worker["pid"] for worker in workers)):  # nobody is left to replace one
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
    assert "Traceback" not in err
    assert out == ""
    assert not (path / SUMMARY).exists()

    resumed = train(*run, "-n", 3, "--run-dir", path, "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_run(path, undisturbed)
    assert not (path / WORKERS).exists()


def test_a_run_that_ended_before_it_could_sum_up_does_so_when_resumed(recipe, undisturbed, tmp_path):
    path = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    (path / SUMMARY).write_text(json.dumps({"steps": STEPS}))  # and no more of it is left
    ended = train(*recipe, "-n", 2, "--run-dir", path, "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(path, undisturbed)
    found = summary(path)
    assert (found["steps"], found["first_step"], found["world_size"]) == (STEPS, STEPS, 2)
    assert found["step_ms_median"] is found["tokens_per_s"] is None and found["breakdown"] == []
    assert "speed  not measured: no step was made in this layout\n" in ended.out


def test_without_the_ordered_sum_the_hash_depends_on_the_ranks(recipe, tmp_path):
    """The negative control: where this fails, the other tests could not have failed either."""
    hashes = set()
    for ranks in (1, 4):
        ended = train(*recipe, "--parallel.no-ordered", "-n", ranks, "--run-dir", f"{ranks}", cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert summary(tmp_path / f"{ranks}")["ordered"] is False
        hashes.add(summary(tmp_path / f"{ranks}")["state_sha256"])
    assert len(hashes) == 2


@pytest.fixture(autouse=True)
def nothing_on_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever fails or not: of the command's own files in the temporary directory none is left."""
    with tempfile.TemporaryDirectory() as directory:  # short, because a socket's path goes into it
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert list(Path(directory).glob("instep-*")) == []


def test_a_rank_that_takes_a_lost_ones_place_has_no_hashes_and_none_waits_for_them(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """Survivors gathered those of the step before, without it, until the deadline; twice ended the run."""
    flags = (*recipe, "--record.leaves", "--timeout-s", 20, "-n", 2, "--run-dir", "run")
    ended = train(*flags, *faults("kill:rank=1,step=2,phase=gather"), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "never came" not in ended.err
    assert len(events(tmp_path / "run", "failure")) == 1
    assert_same_run(tmp_path / "run", undisturbed)
