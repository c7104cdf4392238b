"""The kernel's view of a process of this host, from /proc. Pure."""

from __future__ import annotations

import os
from pathlib import Path


def look(pid: int) -> tuple[str, int] | None:
    """State and start time of process ``pid``, or None if it is gone or a zombie, or there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in b"ZX" else (state.decode(), int(fields[18]))


def io_counters(pid: int) -> bytes | None:
    """The bytes that process ``pid`` has read and written so far, to be compared; None if unknown."""
    try:
        return Path(f"/proc/{pid}/io").read_bytes()
    except OSError:
        return None


def waits_for_device(pid: int) -> bool:
    """Whether a thread of process ``pid`` is in a wait that no signal ends: for a disk, mostly."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any((found := look(int(thread))) is not None and found[0] == "D" for thread in threads)
