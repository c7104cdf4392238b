"""What the container of this process may use: the limits of its control groups, of both versions.

A limit of any ancestor holds too, and inside a container the group's path may not exist in what is mounted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60  # version 1 writes a number near 2**63


def memory_limit(root: Path) -> int | None:
    """Bytes, or None for no limit; ``root`` is "/", or stands for it."""
    texts = [*_read(root, "memory", "memory.limit_in_bytes"), *_read(root, "", "memory.max")]
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < UNLIMITED]
    return min(limits, default=None)


def cpu_limit(root: Path) -> float | None:
    """Cores' worth of time, or None for no limit."""
    pairs = [tuple(text.split()) for text in _read(root, "", "cpu.max")]
    quotas, periods = (_read(root, "cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    pairs += zip(quotas, periods, strict=False)
    # "max" and -1 are no limit.
    limits = [int(quota) / int(period) for quota, period in pairs if quota.isdecimal()]
    return min(limits, default=None)


def _read(root: Path, controller: str, name: str) -> Iterator[str]:
    """File ``name`` of the process's group and of its ancestors; controller "" is version 2."""
    mounted = root / "sys/fs/cgroup"
    base = mounted / controller
    for group in _ancestors(root, controller):
        try:
            yield (base / group.lstrip("/") / name).read_text().strip()
        except OSError:
            continue


def _ancestors(root: Path, controller: str) -> Iterator[str]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = PurePosixPath(path)
            yield from map(str, (own, *own.parents))
            return
