"""Bad input, through the command: one error in one rank's voice, nothing overwritten, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from instep.cli.exit_codes import FAILED, INTERRUPTED, REJECTED, USAGE
from instep.record.directory import CHECKPOINTS, CONFIG, RECORD, SUMMARY, WORKERS
from instep.run.folder import LOCK
from instep.timeline.trace_files import FOLDER
from tests.launched.command import (
    PATIENCE_S,
    instep,
    read_until,
    started_warm,
    train,
    tree,
)


def test_of_ranks_that_a_launcher_started_one_speaks_for_all(recipe, half_way, tmp_path):
    """With the variables that torchrun sets, and a store like its own; not with its imports of torch."""
    path = half_way()
    before = tree(path)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    with ExitStack() as ranks:
        processes = []
        for rank in range(2):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            env = {name: str(value) for name, value in (own | numbers).items()}
            words = ("train", *recipe, "--run-dir", path)
            processes.append(ranks.enter_context(started_warm(*words, cwd=tmp_path, env=env)))
        said = "".join(process.communicate()[1] for process in processes)
    assert all(process.returncode != 0 for process in processes)
    errors = [line for line in said.splitlines() if line.startswith("instep train: ")]
    assert len(errors) == 1, said
    assert f"{path} has another run" in errors[0]
    assert tree(path) == before


def stop_here(path: Path) -> None:
    """The run is at this step already."""


def cut_all(path: Path) -> None:
    for file in path.glob(f"{CHECKPOINTS}/*/model.safetensors"):
        os.truncate(file, 100)


def a_strange_line(path: Path) -> None:
    with (path / RECORD).open("a") as file:
        file.write('{"step": "x"}\n')


@pytest.mark.parametrize(
    ("spoil", "flags", "code", "line"),
    [
        (
            stop_here,
            ("--stop-after", 4),
            USAGE,
            "stop_after 4: the run is at step 4 of 8 already: pass a later",
        ),
        (a_strange_line, (), USAGE, "step: expected a whole number from 0, got 'x'"),
        (
            stop_here,
            ("--optim.lr", 0.5),
            FAILED,
            "was begun with other settings; restore these in the script",
        ),
        (
            cut_all,
            (),
            REJECTED,
            "expected a checkpoint that verifies, got 3 that do not: restore one, or start",
        ),
    ],
)
def test_a_run_that_cannot_go_on_says_why_and_is_left_as_it_was(
    spoil, flags, code, line, recipe, half_way, tmp_path
):
    path = half_way()
    spoil(path)
    before = tree(path)
    ended = train(*recipe, "-n", 2, "--run-dir", path, "--resume", *flags, cwd=tmp_path)
    ended.assert_failed(code, line)
    assert tree(path) == before


def state_of(run_dir: Path) -> str:
    """The hash of what a run has arrived at."""
    return json.loads((run_dir / SUMMARY).read_text())["state_sha256"]


# The command runs this before anything else. Ranks are what its forkserver forks; the second is killed by its
# first instruction.
KILLS_RANK_1 = """
import os, signal
command, forks = os.getpid(), []
def die():
    if os.getppid() != command and forks.count(os.getppid()) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
os.register_at_fork(before=lambda: forks.append(os.getpid()), after_in_child=die)
"""


def test_a_rank_that_dies_in_start_up_is_named_and_replaced(recipe, undisturbed, tmp_path):
    ended = instep("train", *recipe, "-n", 3, "--run-dir", "run", cwd=tmp_path, first=KILLS_RANK_1)
    assert ended.code == 0, ended.err
    named = r"(rank \d|a spare) \(pid \d+\).* was killed by SIGKILL: out of memory\?"
    assert len(re.findall(named, ended.err)) == 1, ended.err
    assert "Traceback" not in ended.err
    assert state_of(tmp_path / "run") == state_of(undisturbed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_a_run_and_keeps_its_record(ranks, recipe, tmp_path):
    flags = ("-n", ranks, "--steps", 100_000, "--eval.every", 1, "--run-dir", "run")
    with started_warm("train", *recipe, *flags, cwd=tmp_path) as process:
        read_until(process, "after step 2")
        assert (tmp_path / "run" / WORKERS).exists()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == INTERRUPTED
    assert re.search(
        r"instep train: interrupted after ([3-9]|\d\d+) steps, (with a checkpoint of step 0: resume with "
        r"--resume --run-dir run|before its first checkpoint: --resume --run-dir run starts over)\n$",
        err,
    )
    assert "Traceback" not in err
    assert out == ""
    left = {path.name for path in (tmp_path / "run").iterdir()} - {"faults.jsonl"}  # of a rank seen to end
    assert left == {CONFIG, RECORD, FOLDER, CHECKPOINTS}


def test_a_run_shares_its_directory_with_no_other_command_and_ends_when_it_is_removed(recipe, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    flags = (*recipe, "-n", 2, "--steps", 100_000, "--eval.every", 1)
    with started_warm("train", *flags, "--run-dir", "link", cwd=tmp_path) as process:
        read_until(process, "after step 2")
        other = train("--resume", "-n", 1, "--run-dir", "disk", cwd=tmp_path)
        other.assert_failed(USAGE, f"disk: directory in use by pid {process.pid} on ")
        read_until(process, "after step 5")
        (tmp_path / "disk").rename(tmp_path / "moved")
        out, err = process.communicate()
    assert process.returncode == FAILED and out == "" and "Traceback" not in err
    assert re.search(r"failed: link\S*: removed or replaced while it was in use, .*: start again\n$", err)
    assert not (tmp_path / "disk").exists() and LOCK not in tree(tmp_path / "moved")
