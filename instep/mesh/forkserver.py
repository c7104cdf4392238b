"""Imported last by the forkserver: what it has loaded lives as long as it does.

The collector of a forked rank then looks at the rank's own objects only. Without this, its first run would
write to every page that the forkserver has loaded, and the end of a process would take a second. At its own
end the forkserver goes at once: native libraries would report what was not collected as leaked (triton does,
in thirty lines).
"""

import atexit
import gc
import os
import sys


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


gc.freeze()
atexit.register(_end)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_end))
