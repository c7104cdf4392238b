"""Freed memory stays with the process: no page faults in the next step; who has set limits keeps them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from instep.mesh import allocator
from instep.mesh.allocator import keep_freed_memory

# 64 blocks of 1 MB, taken and freed three times; then the page faults of a fourth time.
STEPS = """
import ctypes, resource
from instep.mesh.allocator import keep_freed_memory

keep_freed_memory({environ})
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(64)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    for block in blocks:
        libc.free(block)
print(faults)
"""
PAGES = (64 << 20) // 4096


def num_faults(environ: dict[str, str]) -> int:
    code = STEPS.format(environ=environ)
    return int(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's limits")
def test_the_next_step_finds_the_memory_of_the_last_one() -> None:
    assert num_faults({}) < PAGES // 50
    assert num_faults({"MALLOC_TRIM_THRESHOLD_": "131072"}) > PAGES // 2  # as it is without


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_limits_of_the_user_s_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: Untouchable())
    assert not keep_freed_memory({name: value})


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    assert not keep_freed_memory({})


class Untouchable:
    def mallopt(self, *_: object) -> int:
        raise AssertionError("the limits were changed")
