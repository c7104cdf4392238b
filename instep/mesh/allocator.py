"""Memory that a step has freed stays with the process, for the next step.

A training step takes memory and frees most of it again. glibc gives the end of its heap back to the system
when a few megabytes are free there, and then the kernel has to find and zero every page once more: 2,000 to
28,000 page faults in each step of a model of 50 M parameters. A process that trains needs the same again a
moment later.

Who has set these limits, by MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES, keeps them;
other C libraries and allocators are left alone. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES = 256 << 20  # what may be free at the end of the heap
MMAP_BYTES = 32 << 20  # of blocks that are mapped apart; glibc's own limit grows so far


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Do so from now on, in this process of ``environ``; whether it does."""
    if "MALLOC_TRIM_THRESHOLD_" in environ or "MALLOC_MMAP_THRESHOLD_" in environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
