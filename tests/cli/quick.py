"""Is a command's help there at once?

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


def seconds(*args: str) -> float:
    """Processor time of Python with ``args``, from its first instruction to its last."""
    before = os.times()
    subprocess.run([sys.executable, *args], capture_output=True, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def assert_quick(*args: str) -> None:
    """It takes less than ``TIMES`` the yardstick: the best of each, measured by turns, if need be many."""
    ours: list[float] = []
    yardsticks: list[float] = []
    for _ in range(TRIES):
        yardsticks.append(seconds(*YARDSTICK))
        ours.append(seconds("-m", "instep", *args))
        if min(ours) < TIMES * min(yardsticks):
            return
    raise AssertionError(f"{min(ours):.2f} s, at most {TIMES} * {min(yardsticks):.2f} s: {ours} {yardsticks}")
