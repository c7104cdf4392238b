"""What happens to the forkserver must not happen to the ranks: a fork that fails, a stop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import multiprocessing.forkserver, os, signal, sys, time
from instep.mesh.launch import Children, surroundings, warm
from instep.mesh.rank_process import Child

def rank():
    signal.pause()

def short():
    pass

if __name__ == "__main__":
    warm("tests.mesh.second_fork_fails")
    children = Children()
    def start(number, target):
        return children.start(Child(number, 1, surroundings(1, {})), target)
    first = start(0, rank)
    try:
        start(1, rank)
    except OSError as error:
        print(type(error).__name__, error)
    print("alive", children.wait(0)[0], list(child.number for child, _ in children.running.values()))
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    start(2, rank)
    print("started")
    os.kill(server, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    print("ended", [(end.rank, end.code) for end in children.wait(None)[0]])
    os.kill(server, signal.SIGSTOP)
    print("stopped", [(end.rank, end.code) for end in children.stop(0)])
"""


def test_ranks_outlive_a_fork_that_fails_and_a_forkserver_that_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    lines = [
        "BlockingIOError [Errno 11] no process can be started: Resource temporarily unavailable: "
        "raise pids.max or ulimit -u",
        "alive [] [0]",
        "started",
        "ended [(0, -9)]",
        "stopped [(2, -9)]",
    ]
    assert done.stdout.splitlines() == lines, done.stderr
    assert done.returncode == 0
    assert done.stderr.count("was stopped: it goes on") == 3
