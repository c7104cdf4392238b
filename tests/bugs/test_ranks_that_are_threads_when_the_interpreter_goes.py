"""Ranks that are threads of a program end without ``close()``: the exit code stays that of the program.

In stage 3 a rank has a thread for each other one, which waits for its requests in native code. At exit the
ranks said goodbye one after the other, each once the one before had waited for it in vain; what they had
woken came back into an interpreter that was being taken down, was ended by force there, and C++ made SIGABRT
of it: "terminate called without an active exception".
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
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


def test_the_exit_code_is_that_of_the_program() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
