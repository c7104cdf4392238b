"""Standard streams that a run outlives: each line is written at its end, and output never raises. Pure.

The reader of a log may end (``| head``), its disk may fill up, a terminal may lack a letter of a path: none
is worth a run, so what cannot be written is dropped. And a rank may be killed at any time: a line that waits
in a buffer would be lost with it.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress


class _Lossy(io.FileIO):
    """A descriptor to which writing succeeds; the first error is said once, on stderr."""

    _has_failed = False

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            while (written := super().write(data)) is None:  # another process has made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._has_failed and self.fileno() != 2:
                with suppress(OSError):
                    os.write(2, f"stdout cannot be written: {error.strerror}: output is dropped\n".encode())
            self._has_failed = True
            return len(data)


def open_standard_streams() -> None:
    """At the start of a command: open /dev/null in place of a closed stdin, stdout or stderr, so that no file
    gets its descriptor."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def outlive_output() -> None:
    """From now on writing to this process's own stdout and stderr never raises."""
    for fd, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or isinstance(_raw(stream), _Lossy):
            continue
        try:
            if stream.fileno() != fd:
                continue
            stream.flush()
        except (OSError, ValueError):  # it is closed, or no file
            continue
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        buffer = io.BufferedWriter(_Lossy(fd, "wb", closefd=False))  # type: ignore[type-var]
        lasting = io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=True)
        setattr(sys, name, lasting)


def _raw(stream: io.TextIOWrapper) -> object:
    return getattr(stream.buffer, "raw", None)
