"""Output that cannot be written ends no run: without a reader, full, closed, in letters unknown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINTS = """
import sys
from instep.launch.output import open_standard_streams, outlive_output
open_standard_streams()
outlive_output()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("l\\xe4ufe/\\udcff", file=stream)
assert open("/dev/null").fileno() > 2  # no file of a run in the place of a stream
import os
os.write(int(sys.argv[1]), b"done")
"""
DROPPED = b"stdout cannot be written: %s: output is dropped\n"


@pytest.mark.parametrize(
    ("redirect", "out", "err"),
    [
        ("", b"l\\xe4ufe/\\udcff\n" * 3, b"l\\xe4ufe/\\udcff\n" * 3),
        ("> /dev/full", b"", DROPPED % b"No space left on device" + b"l\\xe4ufe/\\udcff\n" * 3),
        ("2> /dev/full", b"l\\xe4ufe/\\udcff\n" * 3, b""),
        ("> /dev/full 2>&1", b"", b""),
        (">&- 2>&-", b"", b""),
        ("| true", b"", DROPPED % b"Broken pipe" + b"l\\xe4ufe/\\udcff\n" * 3),
    ],
)
def test_a_process_outlives_its_output(redirect: str, out: bytes, err: bytes) -> None:
    """Each of these ended training, the unknown letter in the last line that the run printed."""
    reader, writer = os.pipe()
    wait = "sleep 0.3; " if "true" in redirect else ""  # until nobody reads
    command = f"({wait}exec {sys.executable} -c '{PRINTS}' {writer}) {redirect}"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(["bash", "-c", command], capture_output=True, env=environ, pass_fds=[writer])
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert (file.read(), ended.stdout, ended.stderr) == (b"done", out, err)
