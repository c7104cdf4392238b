"""What the forkserver does at its end."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import atexit, os
atexit.register(print, "looks for what is left")
import instep.mesh.forkserver
if os.fork():
    os.wait()
    print("forkserver")
else:
    print("rank")
"""


def test_it_ends_without_a_look_at_what_is_left() -> None:
    """That would take a second, or, since nothing is collected, triton would name what it has lost."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split("\n") == ["rank", "looks for what is left", "forkserver", ""]
    assert (ended.returncode, ended.stderr) == (0, "")
