"""The help of a command imports nothing that is slow, such as torch: instep, Python's library, tyro."""

from __future__ import annotations

import subprocess
import sys

# As ``python -m instep``; at its end it prints on stderr what else it has imported.
INSTEP = """
import atexit, runpy, sys
before = set(sys.modules)
def tell():
    names = {name.partition(".")[0] for name in set(sys.modules) - before}
    names = {name for name in names - sys.stdlib_module_names if not name.startswith("_sysconfigdata")}
    print(*sorted(names), file=sys.stderr)
atexit.register(tell)
runpy.run_module("instep", run_name="__main__", alter_sys=True)
"""
# tyro, and what that needs.
QUICK = {"instep", "tyro", "docstring_parser", "typeguard", "typing_extensions"}


def assert_quick(*args: str) -> None:
    """It prints something on stdout, and imports nothing but ``QUICK``."""
    command = [sys.executable, "-c", INSTEP, *args]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout
    assert set(ended.stderr.split()) <= QUICK
