"""A rank whose launcher is killed ends, says so, and can be told not to."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from instep.mesh import join

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30
MORE_THAN_SELECT_KNOWS = 1100
RANK = """
import os, resource, signal, sys
from instep.launch.rank_process import end_with_parent
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[1]))]
end_with_parent()
end_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_process_whose_parent_is_killed_is_killed_and_says_why() -> None:
    launcher = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" "$2" & wait', sys.executable, RANK, str(MORE_THAN_SELECT_KNOWS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        rank = int(launcher.stdout.readline())
        pidfd = os.pidfd_open(rank)
        try:
            launcher.kill()
            assert select.select([pidfd], [], [], PATIENCE_S)[0]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        said = launcher.stderr.read()
    assert said == f"instep: pid {rank} ends: its launcher (pid {launcher.pid}) has ended\n"


@pytest.mark.parametrize(
    ("environ", "asked", "watched"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, {}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"outlive_launcher": True}, False),
        ({}, {}, False),  # a shell that ends may have set RANK
    ],
)
def test_a_rank_of_torchrun_ends_with_it_unless_the_user_says_no(
    environ: dict[str, str], asked: dict[str, bool], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(join, "end_with_parent", lambda: calls.append(None))
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**place, **environ}.items():
        monkeypatch.setenv(name, value)
    join.init(**asked).close()
    assert len(calls) == watched
