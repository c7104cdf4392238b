"""The interpreter goes while threads are in native code: the exit code stays that of the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A store that answers after its deadline, as the interpreter goes.
LATE_ANSWER = """
import ctypes, os, sys
from datetime import timedelta
import torch.distributed as dist
from instep.net.store import StoreClient

class Lasting:
    "Goes last, and takes until the store has given up: all else may take a busy machine long."
    def __del__(self, usleep=ctypes.PyDLL(None).usleep, leave=os._exit):
        usleep(1_500_000)
        leave(3)

lasting = Lasting()
store = dist.FileStore(sys.argv[1], 2)
try:
    StoreClient(0).call(lambda: store.wait(["never"], timedelta(seconds=1)), 0.1)
except TimeoutError as error:
    print(error)
sys.exit(3)
"""
# Ranks that are threads, with a thread for each other one, which waits in native code; none is closed.
THREADS = """
import sys
import torch
import instep
from tests.world import world

kept = []

@world(3)
def train(mesh):
    model = instep.fully_shard(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]), mesh, stage=3)
    model(torch.ones(2, 8)).sum().backward()
    kept.append(model)

train()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("program", "said"), [(LATE_ANSWER, "no answer from the store within 0.1 s\n"), (THREADS, "")]
)
def test_the_exit_code_is_that_of_the_program(tmp_path: Path, program: str, said: str) -> None:
    """A thread that came back from native code as the interpreter went was ended by force: SIGABRT."""
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "store"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, said), ended.stderr
    assert program != THREADS or ended.stderr == ""
