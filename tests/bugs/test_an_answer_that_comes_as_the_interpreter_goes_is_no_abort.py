"""A store answers after its deadline, as the interpreter goes: the exit code stays that of the program.

The thread that had asked came back from native code into an interpreter that was being taken down, was ended
by force there, and C++ made SIGABRT of it: a rank that had reported a lost peer and ended in order was
"aborted".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
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


def test_the_exit_code_is_that_of_the_program(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "store"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, "no answer from the store within 0.1 s\n"), ended.stderr
