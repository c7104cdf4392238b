"""Imported first by the forkserver: signals, threads and garbage collection where ranks are forked.

SIGINT and the signals that stop a run politely may be sent to every process of a job; a forkserver that they
end takes all ranks along. numpy's BLAS starts threads at its import, and a process that forks should have
none. The collector of a forked rank looks at the rank's own objects only: otherwise its first run would write
to every page that the forkserver has loaded. At its own end the forkserver exits at once, because native
libraries would report the objects that are not collected as leaked (triton does, in thirty lines).
"""

import atexit
import gc
import os
import signal
import sys

from instep.launch.signals import STOP_SIGNALS

_pid = os.getpid()


def _freeze() -> None:
    if os.getpid() == _pid:  # a rank that forks keeps collecting
        gc.freeze()
        atexit.unregister(_end)
        atexit.register(_end)  # again last, so that it runs first


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


for number in (signal.SIGINT, *STOP_SIGNALS):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *STOP_SIGNALS])
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.register_at_fork(before=_freeze, after_in_child=lambda: atexit.unregister(_end))
