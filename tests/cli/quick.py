"""Is a command's help there at once?"""

from __future__ import annotations

import os
import subprocess
import sys

BOUND_S = 0.3
TRIES = 10


def seconds(*args: str) -> float:
    """Processor time of ``instep`` with ``args``, from its first instruction to its last."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "instep", *args], capture_output=True, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def assert_quick(*args: str) -> None:
    """It takes less than ``BOUND_S``; if need be the best of many, for a core is slower beside a busy one."""
    found: list[float] = []
    while min(found, default=BOUND_S) >= BOUND_S and len(found) < TRIES:
        found.append(seconds(*args))
    assert min(found) < BOUND_S, found
