"""Imported last by the forkserver: what it has loaded lives as long as it does, and a fork may fail.

The collector of a forked rank then looks at the rank's own objects only. Without this, its first run would
write to every page that the forkserver has loaded, and the end of a process would take a second. At its own
end the forkserver goes at once: native libraries would report what was not collected as leaked (triton does,
in thirty lines).

A fork that fails, because the job may have no more processes or the host has no more memory, would end the
forkserver, and with it every rank. The launcher is told instead, by a process id that none can have.

A forkserver that was stopped would not see that its launcher has ended, and its ranks would live on: the
kernel lets it go on then. SIGCONT means nothing to one that runs, whichever thread of the launcher ends.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys

from instep.mesh.rank_process import PR_SET_PDEATHSIG

_fork = os.fork


def fork_or_say_why() -> int:
    """As ``os.fork``; the negative number of the error where there can be no other process."""
    try:
        return _fork()
    except OSError as error:
        return -(error.errno or 1)


def _restore() -> None:
    os.fork = _fork
    atexit.unregister(_end)


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
gc.freeze()
atexit.register(_end)
os.fork = fork_or_say_why
os.register_at_fork(after_in_child=_restore)
