"""Is a command's help there at once, and without what is slow to import?

What it imports is told by name: instep, the library of Python, and what reads the words.
Importing torch alone would be some ten times the yardstick.

What it computes is bounded by its processor time against that of a yardstick, the start of Python with some
larger modules of its library: seconds differ by a factor of two and more between machines, and between
moments of one, and the ratio of two runs side by side hardly does.
"""

from __future__ import annotations

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage

TIMES = 3.0
TRIES = 10
YARDSTICK = (
    "-c",
    "import asyncio, argparse, dataclasses, email, http.client, inspect, json, logging, typing, unittest, "
    "urllib.request, xml.dom.minidom",
)
# As ``python -m instep``; in the end it says on stderr what else it has imported.
INSTEP = (
    "-c",
    """
import atexit, runpy, sys
before = set(sys.modules)
def tell():
    names = {name.partition(".")[0] for name in set(sys.modules) - before}
    names = {name for name in names - sys.stdlib_module_names if not name.startswith("_sysconfigdata")}
    print(*sorted(names), file=sys.stderr)
atexit.register(tell)
runpy.run_module("instep", run_name="__main__", alter_sys=True)
""",
)
# tyro, and what that needs.
QUICK = {"instep", "tyro", "docstring_parser", "typeguard", "typing_extensions"}


def seconds(*args: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Processor time of Python with ``args``, from its first instruction to its last, and how it ended."""
    before = getrusage(RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, ended


def assert_quick(*args: str) -> None:
    """It says something, imports nothing that is slow, and takes less than ``TIMES`` the yardstick.

    Both run by turns, if need be many: other work on the machine falls on either.
    """
    pairs: list[tuple[float, float]] = []
    for _ in range(TRIES):
        yardstick = seconds(*YARDSTICK)[0]
        taken, ended = seconds(*INSTEP, *args)
        assert ended.stdout
        assert set(ended.stderr.split()) <= QUICK
        if taken < TIMES * yardstick:
            return
        pairs.append((taken, yardstick))
    raise AssertionError(f"more than {TIMES} times the yardstick in each of these pairs (s): {pairs}")
