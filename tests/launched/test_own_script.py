"""``instep run`` with a script of one's own: ranks that die, come and go, and what a script does wrong."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from instep.record.directory import CHECKPOINTS
from tests.launched.command import (
    Ended,
    events,
    faults,
    instep,
    read_until,
    started_warm,
    steps_of,
    summary,
)
from tests.launched.command import run as command_line

SCRIPT = Path(__file__).with_name("net.py")


def run(*words: object, cwd: Path, script: Path = SCRIPT, says: tuple[object, ...] = ()) -> Ended:
    """``instep run`` of a script, which is given what ``says`` says."""
    return instep("run", *words, script, *says, cwd=cwd)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank, which nothing disturbed."""
    path = tmp_path_factory.mktemp("alone")
    ended = run("-n", 1, cwd=path)
    assert ended.code == 0, ended.err
    return path / "runs" / "mine"


def assert_same_run(run_dir: Path, expected: Path) -> None:
    """Equal steps, equal state; what each step has logged is there once."""
    assert summary(run_dir)["state_sha256"] == summary(expected)["state_sha256"]
    assert steps_of(run_dir) == steps_of(expected)


def test_killed_in_every_phase_three_ranks_give_the_bits_of_one(alone: Path, tmp_path: Path) -> None:
    kills = faults(
        "kill:rank=1,step=1,phase=forward",
        "kill:rank=0,step=3,phase=exchange",
        "kill:rank=2,step=4,phase=update",
        "kill:rank=0,step=6,phase=loss",
    )
    ended = run("-n", 3, *kills, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "runs" / "mine", alone)
    assert [x["source"] for x in events(tmp_path / "runs" / "mine", "recovery")][:2] == ["a survivor"] * 2
    assert sorted(ended.out.splitlines()[-3:]) == [f"rank {rank} of 3" for rank in range(3)]


ATTEMPTS = """
def attempt():
    with open("attempts", "a+") as file:
        file.write("x")
        file.seek(0)
        made = len(file.read())
    if made == {killed}:
        import os
        os.kill(os.getpid(), 9)
    return made

"""


@pytest.mark.parametrize(("wrap", "killed"), [("plain", 2), ("3", 3)])
def test_killed_while_a_step_is_made_again_three_ranks_give_the_bits_of_one(
    wrap: str, killed: int, alone: Path, tmp_path: Path
) -> None:
    """A step is made more than twice if rank 1 has slipped in it, which it does once."""
    factor = "2.0 if attempt() == 1 else 1.0" if killed > 2 else "1.0 + 0 * attempt()"
    with_attempts = (
        f"        factor = ({factor}) if step == 4 and run.rank == 1 else 1.0\n        losses = []\n"
    )
    text = SCRIPT.read_text().replace("        losses = []\n", with_attempts)
    text = text.replace("loss.backward()", "(loss * factor).backward()")
    script = tmp_path / "net.py"
    script.write_text(text.replace("for step in run", ATTEMPTS.format(killed=killed) + "for step in run"))
    ended = run("-n", 3, "--checks.replay-every", 4, cwd=tmp_path, script=script, says=("--wrap", wrap))
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "runs" / "mine", alone)
    assert len(events(tmp_path / "runs" / "mine", "recovery")) == 1
    assert len((tmp_path / "attempts").read_text()) == killed + 2  # then it is made twice, by the new rank


def test_killed_while_the_bucket_size_is_measured_and_after_the_ranks_choose_anew(tmp_path: Path) -> None:
    """Buckets of a few hundred bytes, so that a small net has some; the update is divided among the ranks."""
    text = SCRIPT.read_text().replace("net, run.mesh)", 'net, run.mesh, bucket_cap_mb="auto")')
    tiny = "from instep.replicate import auto_cap\n\nauto_cap.SMALL_MB, auto_cap.LARGE_MB = 1e-4, 4e-4\n"
    script = tmp_path / "net.py"
    script.write_text(text.replace("import instep\n", f"import instep\n{tiny}", 1))
    hashes = []
    for ranks, kills in ((1, []), (2, faults("kill:rank=1,step=3,phase=exchange", "kill:rank=0,step=11"))):
        where = tmp_path / f"{ranks}"
        where.mkdir()
        ended = run("-n", ranks, *kills, cwd=where, script=script, says=("--wrap", "1", "--steps", 20))
        assert ended.code == 0, ended.err
        hashes.append(summary(where / "runs" / "mine")["state_sha256"])
        assert len(events(where / "runs" / "mine", "recovery")) == len(kills) // 2
    assert hashes[0] == hashes[1]
    assert summary(where / "runs" / "mine")["parallel"]["bucket_mb"] == 0.1


def test_a_model_from_the_meta_device_is_filled_by_those_who_begin(alone: Path, tmp_path: Path) -> None:
    """The first ones twice, as one is lost before there is a state; later ones take what is there."""
    kills = "kill:rank=1,step=0,phase=gather", "kill:rank=0,step=2,phase=exchange"
    resizes = "resize:ranks=1,step=5", "resize:ranks=3,step=7"
    slowly = "slow:rank=0,phase=data,step=5,steps=6,seconds=0.4"
    ended = run("-n", 2, *faults(*kills, *resizes, slowly), cwd=tmp_path, says=("--wrap", "meta"))
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "runs" / "mine", alone)
    found = [x["source"] for x in events(tmp_path / "runs" / "mine", "recovery")]
    assert found[:2] == ["the beginning", "the snapshot"]


def test_a_run_goes_on_with_other_ranks_and_only_as_the_same_script(alone: Path, tmp_path: Path) -> None:
    ended = run("-n", 2, "--stop-after", 4, cwd=tmp_path)
    assert ended.code == 75, ended.err
    again = run("-n", 2, cwd=tmp_path)
    assert (again.code, "--resume" in again.err) == (2, True), again.err
    other = run("-n", 2, "--resume", cwd=tmp_path, says=("--wrap", "naive"))
    assert (other.code, "script.arguments" in other.err) == (1, True), other.err
    ended = run("-n", 3, "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "runs" / "mine", alone)


def test_a_sharded_run_goes_on_without_its_frozen_weights_on_the_same_base_alone(tmp_path: Path) -> None:
    script = SCRIPT.with_name("adapted.py")
    (tmp_path / "alone").mkdir()
    ended = run("-n", 1, cwd=tmp_path / "alone", script=script, says=(0,))
    assert ended.code == 0, ended.err
    ended = run("-n", 2, "--stop-after", 2, cwd=tmp_path, script=script, says=(0,))
    assert ended.code == 75, ended.err
    other = run("-n", 2, "--resume", cwd=tmp_path, script=script, says=(1,))
    assert (other.code, "build the base model that it was trained with" in other.err) == (3, True), other.err
    ended = run("-n", 3, "--resume", *faults("kill:rank=1,step=3"), cwd=tmp_path, script=script, says=(0,))
    assert ended.code == 0, ended.err
    hashes = [summary(path / "runs" / "mine")["state_sha256"] for path in (tmp_path, tmp_path / "alone")]
    assert hashes[0] == hashes[1]


UNLUCKY = """
import atexit, errno, os, sys, torch, instep

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 30 and not os.path.exists("failed"):
            open("failed", "w").close()
            raise OSError(errno.ESTALE, "Stale file handle", "/data/shard-7")
        return torch.full((4,), float(i))

run = instep.Run("runs/mine")
atexit.register(lambda: open(f"exit-{run.mesh.rank}", "w").close())
model = instep.DataParallel(torch.nn.Linear(4, 1), run.mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = instep.Loader(Samples(), batch_size=16, micro_batch_size=4, shuffle=False, num_workers=1)
for step in run.steps(4, model=model, optimizer=optimizer, data=data):
    with step:
        for micro_batch in model.micro_batches(data):
            model(micro_batch.data).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_error_of_a_disk_costs_a_step_and_exit_hooks_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNLUCKY)
    ended = run("-n", 2, cwd=tmp_path, script=script)
    assert ended.code == 0, ended.err
    assert "Stale file handle" in ended.err and len(events(tmp_path / "runs" / "mine", "recovery")) == 1
    assert {path.name for path in tmp_path.glob("exit-*")} == {"exit-0", "exit-1"}


ENDS = "import sys\nprint('here')\nsys.exit(int(sys.argv[1]))\n"
PARSES = "import argparse\nargparse.ArgumentParser().parse_args()\n"
NO_LOOP = "the script never iterated run.steps(): every process ran independently"
IN_BLOCK = SCRIPT.read_text().replace("        step.log", "        if step == 4: break\n        step.log")
BEHIND_BLOCK = SCRIPT.read_text().replace('print(f"rank', '    if step == 4: break\nprint(f"rank')
INIT = "import instep\nmesh = instep.init()\nprint('trained alone')\n"
TORCH = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
FORGETS = "import sys\nsys.argv[1:] = []\n" + SCRIPT.read_text()


@pytest.mark.parametrize(
    ("text", "arguments", "code", "words"),
    [
        # not 3, by which a checkpoint is rejected
        (ENDS, "3", 1, ["the script ended with exit code 3, by which `instep run` says that a checkpoint"]),
        (ENDS, "0", 0, [NO_LOOP]),
        (PARSES, "--lr 1", 2, ["error: unrecognized arguments: --lr 1"]),
        (IN_BLOCK, "", 1, ["the script left its loop after 4 of 12 steps, without a summary"]),
        (BEHIND_BLOCK, "", 1, ["the script left its loop after 4 of 12 steps, without a summary"]),
        (INIT, "", 1, ["instep.init: under `instep run` ranks form a group in the loop over run.steps"]),
        (TORCH, "", 2, ["take init_process_group() out of the script", 'other.py", line 2']),
        (FORGETS, "--lr -h", 2, ["-h is the last argument of the script, so only one process was started"]),
        ("", "--fail|import sys; sys.exit(5)", 5, [r"after \d+ of \d+ steps with exit code 5"]),
        ("", "--fail|raise KeyError('who')", 1,
         ["the same exception came twice at the same step", f'File "{SCRIPT}", line ', "KeyError: 'who'"]),
    ],
)  # fmt: skip
def test_what_a_script_does_wrong_is_told_with_its_exit_code(
    text: str, arguments: str, code: int, words: list[str], tmp_path: Path
) -> None:
    (script := tmp_path / "other.py").write_text(text)
    says = arguments.split("|" if "|" in arguments else None)
    ended = run("-n", 2, cwd=tmp_path, script=script if text else SCRIPT, says=tuple(says))
    assert ended.code == code, ended.err
    for each in words:
        assert re.search(each if "\\d" in each else re.escape(each), ended.err), ended.err
    assert (NO_LOOP in ended.err) == (code == 0)
    assert "trained alone" not in ended.out


def test_a_call_that_one_rank_makes_is_named_with_the_lines_of_all_and_once(tmp_path: Path) -> None:
    """It said "rank 0 calls all_gather of 256 uint8", four times; now the first time and as the last line."""
    script = tmp_path / "train.py"
    alone = "zero_grad()\n        if run.rank == 0: instep.mean(1.0)"
    script.write_text(UNLUCKY.replace("if i == 30", "if False").replace("zero_grad()", alone))
    ended = run("-n", 2, cwd=tmp_path, script=script)
    assert ended.code == 1, ended.err
    line = 1 + script.read_text().splitlines().index("        if run.rank == 0: instep.mean(1.0)")
    assert len(re.findall(rf"\n +0  in instep\.mean .* {tmp_path.name}/train\.py:{line} ", ended.err)) == 1
    assert len(re.findall(r"\n +1  in the exchange at the end of a step .*/train\.py:\d+ ", ended.err)) == 1
    said = rf"rank 0 calls instep\.mean, at {tmp_path.name}/train\.py:{line} .*rank 1 calls the exchange at"
    assert len(re.findall(said, ended.err)) == 2


def test_one_rank_finishes_the_run_of_all_and_what_follows_the_loop_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    early = UNLUCKY.replace("if i == 30", "if False").replace("run.steps(4,", "run.steps(400,")
    early = early.replace("zero_grad()", "zero_grad()\n        if run.rank == 1: run.finish()")
    script.write_text(early + "print('followed', run.rank)\n")
    ended = run("-n", 2, cwd=tmp_path, script=script)
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.out.splitlines() if "followed" in line) == [
        "followed 0",
        "followed 1",
    ]
    assert summary(tmp_path / "runs" / "mine")["steps"] == 1


def test_a_script_shows_its_help_once(tmp_path: Path) -> None:
    ended = run("-n", 3, cwd=tmp_path, says=("--help",))
    assert (ended.code, ended.out.count("usage: net.py ")) == (0, 1), ended.err
    assert list(tmp_path.iterdir()) == []


FIT = """
import argparse
import torch
import instep
from .net import width

words = argparse.ArgumentParser(add_help=False)
words.add_argument("-h", type=int, help="hidden")
hidden = words.parse_args().h
run = instep.Run("run")
model = instep.DataParallel(torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in run.steps(2, model=model, optimizer=optimizer):
    with step:
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {run.rank} of {run.world_size}, {hidden} wide")
"""


def test_a_module_of_a_package_is_run_with_a_help_flag_of_its_own(tmp_path: Path) -> None:
    """A script's ``-h 8`` made one unsupervised rank of it, without a word."""
    (tmp_path / "mine").mkdir()
    for name, text in {"__init__": "", "net": "width = 4", "fit": FIT}.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    ended = instep("run", "-n", 2, "-m", "mine.fit", "-h", 8, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()[-2:]) == [f"rank {rank} of 2, 8 wide" for rank in range(2)]
    kept = (tmp_path / "run" / "config.toml").read_text()
    assert 'module = "mine.fit"' in kept and 'arguments = ["-h", "8"]' in kept


SLOW = """
import os, select
import instep

run = instep.Run("run", timeout_s={timeout_s})
if not os.path.exists("seen"):
    open("seen", "w").close()
    select.select([], [], [], 60)
"""


def test_the_script_says_for_how_long_it_may_prepare_its_data(tmp_path: Path) -> None:
    """The watchdog knew the command's deadline alone, 300 s."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(timeout_s=3))
    ended = run("-n", 1, cwd=tmp_path, script=script)
    assert re.search(r"made no progress in script for 3\.\d s \(limit 3\.0 s\)", ended.err), ended.err


@pytest.mark.slow
def test_the_same_script_goes_on_after_a_restart_by_torchrun_and_runs_as_it_is(
    alone: Path, tmp_path: Path
) -> None:
    once = "import os, pathlib; f = pathlib.Path('fell'); f.exists() or (f.touch(), os.kill(os.getpid(), 9))"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    ended = command_line(*command, "--max-restarts", 1, SCRIPT, "--fail", once, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "resumed from runs/mine/checkpoints/step-00000003, step 3" in ended.err
    assert_same_run(tmp_path / "runs" / "mine", alone)
    (tmp_path / "plain").mkdir()
    ended = command_line(sys.executable, SCRIPT, cwd=tmp_path / "plain")
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "plain" / "runs" / "mine", alone)


def test_two_commands_do_not_write_to_one_folder_and_a_signal_ends_with_a_checkpoint(tmp_path: Path) -> None:
    slowly = faults("slow:rank=0,phase=data,step=1,steps=11,seconds=2")
    with started_warm("run", "-n", 1, *slowly, SCRIPT, cwd=tmp_path) as first:
        read_until(first, " 1/12 ")
        second = run("-n", 1, cwd=tmp_path)
        assert second.code == 2
        assert "directory in use by" in second.err
        first.send_signal(signal.SIGTERM)
        _, said = first.communicate()
    assert first.returncode == 75
    assert "--resume continues" in said
    assert list((tmp_path / "runs" / "mine" / CHECKPOINTS).iterdir())
