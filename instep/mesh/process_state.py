"""What the kernel says of a process of this host. Pure."""

from __future__ import annotations

import os


def look(pid: int) -> tuple[str, int] | None:
    """State and start time of process ``pid``, or None if it is gone or a zombie, or there is no /proc."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        stat = os.read(file, 1024)
    except OSError:  # it has ended just now
        return None
    finally:
        os.close(file)
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in b"ZX" else (state.decode(), int(fields[18]))


def io_counters(pid: int) -> bytes | None:
    """How much process ``pid`` has read and written so far, to be compared; None where that is not told."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return file.read()
    except OSError:
        return None


def waits_for_device(pid: int) -> bool:
    """Whether a thread of process ``pid`` is in a wait that no signal ends: for a disk, mostly."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any((found := look(int(thread))) is not None and found[0] == "D" for thread in threads)
