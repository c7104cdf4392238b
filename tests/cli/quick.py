"""Is a command's help there at once, and without torch?

What is bounded is the processor time against that of a yardstick, the start of Python with some larger
modules of its library: seconds differ by a factor of two and more between machines, and between hours of
one, and the ratio hardly does. Importing torch alone would be some ten times the yardstick.
"""

from __future__ import annotations

import os
import subprocess
import sys

TIMES = 3.0
TRIES = 10
YARDSTICK = (
    "-c",
    "import asyncio, argparse, dataclasses, email, http.client, inspect, json, logging, typing, unittest, "
    "urllib.request, xml.dom.minidom",
)
# As ``python -m instep``; in the end it says on stderr what it has imported.
INSTEP = (
    "-c",
    """
import atexit, runpy, sys
def tell():
    print(*[name for name in ("torch", "numpy") if name in sys.modules], file=sys.stderr)
atexit.register(tell)
runpy.run_module("instep", run_name="__main__", alter_sys=True)
""",
)
_yardsticks: list[float] = []  # the machine's, so they hold for all commands


def seconds(*args: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Processor time of Python with ``args``, from its first instruction to its last, and how it ended."""
    before = os.times()
    ended = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4]), ended


def assert_quick(*args: str) -> None:
    """It says something without torch and in less than ``TIMES`` the yardstick.

    The best of each is taken, measured by turns, if need be many.
    """
    ours: list[float] = []
    for tried in range(TRIES):
        if tried or not _yardsticks:
            _yardsticks.append(seconds(*YARDSTICK)[0])
        taken, ended = seconds(*INSTEP, *args)
        assert ended.stdout
        assert ended.stderr.split() == []
        ours.append(taken)
        if min(ours) < TIMES * min(_yardsticks):
            return
    raise AssertionError(
        f"{min(ours):.2f} s, at most {TIMES} * {min(_yardsticks):.2f} s: {ours} {_yardsticks}"
    )
