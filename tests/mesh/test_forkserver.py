"""What happens to the forkserver must not happen to the ranks: a fork that fails, a stop, and silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# torch, which takes seconds to load, is nothing that these ranks need.
BEGIN = """
import multiprocessing.forkserver, os, signal, sys, time
from instep.mesh import launch
from instep.mesh.launch import Children, surroundings, warm
from instep.mesh.rank_process import Child

launch.PRELOAD, launch.REVIVE_S = ("instep.mesh.launch",), 0.05

def rank():
    signal.pause()

def start(number, **options):
    return children.start(Child(number, 1, surroundings(1, {})), rank, **options)

def stop():
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    return server

def wait_in_slices():
    while not (ended := children.wait(0.01)[0]):
        pass
    return [(end.rank, end.code) for end in ended]
"""
SURVIVES = """
if __name__ == "__main__":
    warm("tests.mesh.second_fork_fails")
    children = Children()
    first = start(0)
    try:
        start(1)
    except OSError as error:
        print(str(error).removeprefix("[Errno 11] ").split(":")[::2])
    print("alive", children.wait(0)[0], list(child.number for child, _ in children.running.values()))
    stop()
    start(2)
    print("started")
    stop()
    os.kill(first, signal.SIGKILL)
    print("ended", wait_in_slices())
    stop()
    print("stopped", [(end.rank, end.code) for end in children.stop(0)])
"""
SILENT = """
if __name__ == "__main__":
    launch._revive = lambda: None  # SIGCONT does not help
    warm()
    children = Children()
    first = start(0)
    start(1)
    stop()
    try:
        start(2, answer_s=0.1)
    except TimeoutError as error:
        print(error)
    os.kill(first, signal.SIGKILL)
    print(sorted(wait_in_slices() + [(end.rank, end.code) for end in children.wait_all(None)]))
    start(3)  # by another forkserver
    print("number", next(iter(children.running.values()))[0].number, flush=True)
    stop()
    os.kill(os.getpid(), signal.SIGKILL)  # the forkserver and its rank hold stdout for as long as they live
"""


def said_by(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    path.write_text(BEGIN + script)
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_ranks_outlive_a_fork_that_fails_and_a_forkserver_that_is_stopped(tmp_path: Path) -> None:
    done = said_by(SURVIVES, tmp_path / "script.py")
    lines = [
        "['no process can be started', ' raise pids.max or ulimit -u']",
        "alive [] [0]",
        "started",
        "ended [(0, -9)]",
        "stopped [(2, -9)]",
    ]
    assert done.stdout.splitlines() == lines, done.stderr
    assert done.returncode == 0
    assert done.stderr.count("was stopped: it goes on") == 3


def test_a_forkserver_that_tells_nothing_is_replaced_and_ends_with_its_launcher(tmp_path: Path) -> None:
    done = said_by(SILENT, tmp_path / "script.py")
    lines = ["the forkserver has started no process within 0.1 s", "[(0, 255), (1, 255)]", "number 3"]
    assert done.stdout.splitlines() == lines, done.stderr
    assert "does not tell that a process has ended: killed, with all ranks" in done.stderr


ENDS = """
import atexit, os
atexit.register(print, "looks for what is left")
import instep.mesh.forkserver
if os.fork():
    os.wait()
    print("forkserver")
else:
    print("rank")
"""


def test_it_ends_without_a_look_at_what_is_left() -> None:
    """That would take a second, or, since nothing is collected, triton would name what it has lost."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split("\n") == ["rank", "looks for what is left", "forkserver", ""]
    assert (ended.returncode, ended.stderr) == (0, "")
