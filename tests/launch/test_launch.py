"""Ranks find their place, one failure is one error, and however the launcher ends, nothing is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from instep.launch.launch import launch
from instep.launch.launch_environment import LaunchEnvironment, detect
from instep.launch.process_state import look
from instep.launch.rank_exit import RankFailed
from instep.mesh.join import init

PATIENCE_S = 60
ROOT = Path(__file__).parents[2]


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """A pidfd for each process, readable once it has ended; at the end of the block it has to."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield pidfds
    finally:
        for pidfd in pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], PATIENCE_S)[0])


def is_alive(pid: int) -> bool:
    return look(pid) is not None


def my_rank() -> int:
    return detect(os.environ).rank


def report(directory: Path) -> None:
    place = detect(os.environ)
    assert place.store_file is not None
    store = Path(place.store_file)
    facts = {
        "place": asdict(place),
        "names": store.stat().st_nlink,
        "pid": os.getpid(),
        "session": os.getsid(0),
        "threads": torch.get_num_threads(),
        "told": os.environ.get("TOLD"),
        "cwd": os.getcwd(),
        "start_method": multiprocessing.get_start_method(),
    }
    (directory / str(place.rank)).write_text(json.dumps(facts))


def reports(directory: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(directory.iterdir())]


def test_every_rank_finds_its_place_and_the_launcher_s_world(tmp_path, monkeypatch):
    monkeypatch.setenv("TOLD", "after the forkserver was born")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.chdir(tmp_path.parent)
    pids: list[int] = []
    launch(report, (tmp_path,), ranks=2, threads=2, on_start=pids.extend)
    found = reports(tmp_path)
    store = found[0]["place"]["store_file"]
    for rank, facts in enumerate(found):
        assert LaunchEnvironment(**facts["place"]) == LaunchEnvironment(
            rank, 2, rank, 2, "instep", store_file=store
        )
        assert facts["pid"] == facts["session"] == pids[rank]
        assert facts["names"] == 0
        assert facts["threads"] == 2
        assert facts["told"] == "after the forkserver was born"
        assert facts["cwd"] == str(tmp_path.parent)
        assert facts["start_method"] == multiprocessing.get_start_method()
    assert not Path(store).exists()


def fail_on_rank_one(fail: Callable[..., None], *args: object) -> None:
    """Rank 0 waits, and ignores SIGTERM."""
    if my_rank() == 1:
        fail(*args)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def raise_value_error() -> None:
    raise ValueError("expected 2, got 3")


def kill_myself(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_error_is_the_failing_rank_s_and_the_others_are_killed():
    pids: list[int] = []
    with pytest.raises(RankFailed, match=r"^rank 1 of 3 \(pid \d+\) failed with ValueError: exp") as failure:
        launch(fail_on_rank_one, (raise_value_error,), ranks=3, on_start=pids.extend, grace_s=0.1)
    assert failure.value.type_name == "ValueError"
    assert failure.value.exit.pid == pids[1]
    assert failure.value.rank_traceback.count("Traceback") == 1
    assert "in raise_value_error" in failure.value.rank_traceback
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("fail", "args", "code", "message"),
    [
        (sys.exit, (3,), 3, "exited with code 3"),
        (sys.exit, ("a reason",), 1, "exited with code 1"),
        (os._exit, (75,), 75, "exited with code 75"),
        (kill_myself, (signal.SIGKILL,), -signal.SIGKILL, "was killed by SIGKILL: out of memory?"),
        (kill_myself, (signal.SIGTERM,), -signal.SIGTERM, "was killed by SIGTERM"),
    ],
)
def test_a_rank_that_ends_without_an_exception(fail, args, code, message):
    with pytest.raises(RankFailed, match=f"rank 1 of 2 .* {message}") as failure:
        launch(fail_on_rank_one, (fail, *args), ranks=2, grace_s=0.1)
    assert failure.value.exit.code == code
    assert failure.value.type_name == ""


def meet_and_fail() -> None:
    world = init(timeout_s=PATIENCE_S)
    if world.rank == 1:
        raise_value_error()
    world.world.group.broadcast(torch.empty(1), "the broadcast of a test", root=1)


def test_the_cause_is_not_the_rank_that_lost_its_peer():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 \(pid \d+\) failed with ValueError"):
        launch(meet_and_fail, ranks=2, grace_s=PATIENCE_S)


def leave_a_helper(directory: Path) -> None:
    helper = subprocess.Popen(["sleep", "1000"])
    (directory / str(my_rank())).write_text(str(helper.pid))


def test_helpers_of_a_rank_end_with_it(tmp_path):
    launch(leave_a_helper, (tmp_path,), ranks=1)
    helper = int((tmp_path / "0").read_text())
    with suppress(ProcessLookupError), watched([helper]) as pidfds:
        assert ended(pidfds[0])


def test_a_launch_that_fails_leaves_nothing():
    pids: list[int] = []

    def refuse(started: list[int]) -> None:
        pids.extend(started)
        raise LookupError("no")

    with pytest.raises(LookupError):
        launch(signal.pause, ranks=2, on_start=refuse)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        launch(lambda: None, ranks=2)
    for numbers in ({"ranks": 0}, {"ranks": 1, "threads": 0}):
        with pytest.raises(ValueError, match="at least 1 rank of at least 1 thread"):
            launch(signal.pause, **numbers)


# A launcher of its own, without torch, whose ranks say that they are there and wait for ever. Lines are
# written whole, by os.write, because three processes share the pipe.
LAUNCHER = r"""
import os
import instep.launch.launch as launcher
launcher.PRELOAD = ()
rank = r"import os, signal; os.write(1, b'up\n'); signal.pause()"
def tell(pids): os.write(1, f"{pids[0]} {pids[1]}\n".encode())
launcher.launch(exec, (rank,), ranks=2, on_start=tell, grace_s=1)
"""


def test_a_long_tmpdir_is_no_obstacle(tmp_path: Path) -> None:
    """It was "AF_UNIX path too long", without a way out."""
    (folder := tmp_path / ("x" * 100)).mkdir()
    with a_launcher(folder) as (process, _):
        process.terminate()


@contextmanager
def a_launcher(directory: Path, up: int = 2) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """The launcher and its ranks' process ids, when ``up`` ranks are there."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while lines.count("up\n") < up or len(lines) == lines.count("up\n"):
                lines.append(process.stdout.readline())
                assert lines[-1]
            yield process, [int(pid) for line in lines if line != "up\n" for pid in line.split()]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code", "tracebacks"),
    [(signal.SIGINT, -signal.SIGINT, 1), (signal.SIGTERM, 143, 0), (signal.SIGHUP, 129, 0)],
)
def test_a_launcher_that_is_told_to_end_takes_everything_along(number, code, tracebacks):
    with tempfile.TemporaryDirectory() as directory:  # short, because a socket's path goes into it
        with a_launcher(Path(directory)) as (process, pids), watched(pids) as pidfds:
            # To the whole group, as a terminal does it.
            os.killpg(process.pid, number)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert all(map(ended, pidfds))
        assert len(pids) == 2
        assert process.returncode == code
        assert errors.count("Traceback") == tracebacks, errors
        assert not list(Path(directory).glob("instep-*"))


@pytest.mark.parametrize("up", [0, 2], ids=["ranks are still starting", "ranks are running"])
def test_a_launcher_that_is_killed_leaves_no_rank(up):
    with tempfile.TemporaryDirectory() as directory:
        with a_launcher(Path(directory), up) as (process, pids), watched(pids) as pidfds:
            process.kill()
            assert all(map(ended, pidfds))
        assert len(pids) == 2


def test_a_printed_line_is_one_write_so_that_lines_of_ranks_do_not_mix() -> None:
    read, write = os.pipe2(os.O_DIRECT)  # keeps writes apart
    program = "from instep.launch.launch import launch; launch(print, ('a line',), ranks=2)"
    try:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, "-c", program], stdout=write, env=environ, cwd=ROOT, check=True)
        assert [os.read(read, 4096) for _ in range(2)] == [b"a line\n"] * 2
    finally:
        os.close(read)
        os.close(write)
