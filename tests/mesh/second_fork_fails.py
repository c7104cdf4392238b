"""Loaded by a forkserver before it begins: its second fork finds that the job has all its processes."""

import errno
import os
from itertools import count

_fork, _numbers = os.fork, count(1)


def fork() -> int:
    if next(_numbers) == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


os.fork = fork
