"""Bad input, through the command: one error in one rank's voice, nothing overwritten, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from instep.cli.exit_codes import FAILED, INTERRUPTED, REJECTED, USAGE
from instep.record.directory import CHECKPOINTS, CONFIG, RECORD, SUMMARY, WORKERS
from instep.run.folder import LOCK
from instep.timeline.trace_files import FOLDER
from tests.launched.command import (
    INSTEP,
    PATIENCE_S,
    instep,
    read_until,
    started,
    started_warm,
    train,
    tree,
)

NEWEST, OLDER, FIRST = (f"{CHECKPOINTS}/step-0000000{step}" for step in (4, 2, 0))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--stpes 3", ["Unrecognized options: --stpes", "Perhaps you meant", "--steps INT"]),
        ("--parallel.strategy bukketed", ["invalid choice", "bukketed", "bucketed"]),
        ("--optim.lr fast", ["--optim.lr", "could not convert string to float: 'fast'"]),
    ],
)
def test_a_flag_that_means_nothing_is_explained_with_those_that_do(flags, words, recipe, tmp_path):
    ended = train(*recipe, *flags.split(), "-n", 2, cwd=tmp_path)
    assert ended.code == USAGE
    unframed = re.sub(r"[^\S\n]*[│╭╮╰╯─]+[^\S\n]*", "", ended.err)
    assert all(word in unframed for word in words), ended.err
    assert unframed.count("For full helptext") == 1
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ("[model]\nlayer = 3", "bad.toml: unknown key 'model.layer': did you mean 'model.layers'?"),
        ("stpes = 3", "bad.toml: unknown key 'stpes': did you mean 'steps'?"),
        ("steps = 'three'", "bad.toml: steps: expected int, got str 'three'"),
        ("[optim]\nlr = true", "bad.toml: optim.lr: expected float, got bool True"),
        ("steps = ", "bad.toml: Invalid value"),
    ],
)
def test_a_config_file_that_means_nothing_is_explained_by_key(toml, line, tmp_path):
    (tmp_path / "bad.toml").write_text(toml)
    before = tree(tmp_path)
    train("--config", "bad.toml", "-n", 2, cwd=tmp_path).assert_failed(USAGE, line)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--batch.global-size 15", "batch.global_size 15 is no multiple of batch.micro_size 2: use 14 or 16"),
        ("-n 9", "9 ranks, but only 8 micro-batches (global 16 / micro 2): use at most 8 ranks"),
        ("--data empty", "data file empty is empty, expected at least context(32) + 1 = 33 bytes"),
        ("--data short", "data file short has 32 bytes, expected at least context(32) + 1 = 33 bytes"),
        (
            "--run-dir empty/run",
            "run directory empty/run cannot be made (Not a directory): pass another --run",
        ),
        ("--run-dir /proc/nope", "run directory /proc/nope cannot be made (No such file or directory)"),
        ("--run-dir typo --resume", "typo does not exist, so there is no run to resume: look at --run-dir"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_leaves_no_trace(flags, line, recipe, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 32)
    before = tree(tmp_path)
    ended = train(*recipe, "-n", 2, *flags.split(), cwd=tmp_path)
    ended.assert_failed(USAGE, line)
    assert ended.err.count("\n") == 1, ended.err
    runs = tmp_path / "runs"  # where runs without a name go; nothing is in it
    assert tree(tmp_path) in (before, {**before, str(runs): None})


def test_a_directory_with_another_run_is_left_as_it_is(recipe, half_way, tmp_path):
    path = half_way()
    before = tree(path)
    ended = train(*recipe, "-n", 2, "--run-dir", path, cwd=tmp_path)
    ended.assert_failed(USAGE, f"{path} has another run: pass --resume to resume it, or another --run-dir")
    assert tree(path) == before


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


def state_of(run_dir: Path) -> str:
    """The hash of what a run has arrived at."""
    return json.loads((run_dir / SUMMARY).read_text())["state_sha256"]


def truncate(path: Path) -> int:
    """Cut a file in half; its size before."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return size


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before_it(
    recipe: tuple[str, ...], undisturbed: Path, half_way: Callable[[], Path], tmp_path: Path
) -> None:
    path = half_way()
    model = path / NEWEST / "model.safetensors"
    size = truncate(model)
    ended = train(*recipe, "-n", 2, "--run-dir", path, "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert f"passed over {model}: expected {size} bytes, got {size // 2}: cut off or replaced" in ended.err
    assert f"resumed from {path / OLDER}, step 2\n" in ended.err
    assert state_of(path) == state_of(undisturbed)


def test_without_a_checkpoint_that_verifies_a_run_stops_and_says_why_of_each(recipe, half_way, tmp_path):
    path = half_way()
    for step in (NEWEST, OLDER, FIRST):
        truncate(path / step / "model.safetensors")
    before = tree(path)
    ended = train(*recipe, "-n", 2, "--run-dir", path, "--resume", cwd=tmp_path)
    ended.assert_failed(
        REJECTED, "expected a checkpoint that verifies, got 3 that do not: restore one, or start"
    )
    assert ended.err.count("cut off or replaced") == 3
    assert tree(path) == before


def test_a_run_does_not_go_on_under_other_settings(recipe, half_way, tmp_path):
    path = half_way()
    before = tree(path)
    ended = train(*recipe, "-n", 3, "--optim.lr", 0.5, "--run-dir", path, "--resume", cwd=tmp_path)
    ended.assert_failed(FAILED, f"{path} was begun with other settings; restore these in the script")
    assert "\n  optim.lr: 0.002 in the checkpoint, 0.5 now\n" in ended.err
    assert tree(path) == before


def test_a_run_is_not_told_to_stop_where_it_has_stopped(recipe, half_way, tmp_path):
    path = half_way()
    before = tree(path)
    ended = train(*recipe, "-n", 2, "--run-dir", path, "--resume", "--stop-after", 4, cwd=tmp_path)
    ended.assert_failed(USAGE, "stop_after 4: the run is at step 4 of 8 already: pass a later step, or 0")
    assert tree(path) == before


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


@pytest.mark.parametrize(
    ("ranks", "by"),
    [
        (1, started_warm),
        (2, started_warm),
        pytest.param(2, partial(started, *INSTEP), marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks", "two ranks as from a terminal, with an interpreter of their own"],
)
def test_ctrl_c_ends_a_run_and_keeps_its_record(ranks, by, recipe, tmp_path):
    flags = ("-n", ranks, "--steps", 100_000, "--eval.every", 1, "--run-dir", "run")
    starting = by("train", *recipe, *flags, cwd=tmp_path)
    with starting as process:
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


@pytest.mark.parametrize(
    ("code", "line"), [(USAGE, "step: expected a whole number from 0, got 'x'"), (FAILED, "")]
)
def test_a_run_does_not_go_on_with_what_no_run_has_written(code, line, recipe, half_way, tmp_path):
    path = half_way() / RECORD
    if line:
        path.write_text(path.read_text() + '{"step": "x"}\n')
    else:
        path.unlink()
        os.mkfifo(path)
    ended = train(*recipe, "-n", 2, "--run-dir", path.parent, "--resume", cwd=tmp_path)
    ended.assert_failed(code, line or f"{path}: expected a regular file, got a pipe")


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


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--parallel.chunks", 2), "1f1b has 1 stages per rank, got chunks=2: leave it out"),
        (("--parallel.cuts", 9), "cuts=[9]: expected 1 of the layers 1 to 3, in order"),
    ],
)
def test_what_a_pipeline_refuses_ends_in_one_line(
    flags: tuple[object, ...], line: str, tmp_path: Path
) -> None:
    ended = instep("train", "-n", 2, "--parallel.pp", 2, *flags, cwd=tmp_path)
    assert (ended.code, ended.err) == (USAGE, ended.err.splitlines()[0] + "\n"), ended.err
    assert ended.err.startswith(f"instep train: error: {line}")
