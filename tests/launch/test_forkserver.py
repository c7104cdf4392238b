"""The forkserver outlives signals to the whole job, and exits at once at its end."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import atexit, os
atexit.register(print, "looks for what is left")
import instep.launch.forkserver
for number in (2, 10, 15):
    os.kill(os.getpid(), number)
if os.fork():
    os.wait()
    print("forkserver")
else:
    print("rank")
"""


def test_it_ignores_stop_signals_and_ends_without_a_look_at_what_is_left() -> None:
    """That would take a second, or, since nothing is collected, triton would name leaked objects."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split("\n") == ["rank", "looks for what is left", "forkserver", ""]
    assert (ended.returncode, ended.stderr) == (0, "")
