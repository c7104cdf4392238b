"""torch's own tests of DDP, with our class in its place; ``run.py`` says which, and why one does not pass."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")


@pytest.mark.slow
def test_torch_s_own_tests_of_ddp_pass_or_say_why():
    pytest.importorskip("expecttest")
    ended = subprocess.run([sys.executable, RUN], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    assert ended.stdout.count("\npass") + ended.stdout.startswith("pass") == 9
