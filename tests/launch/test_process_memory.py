"""The kernel's counts, read from files that were written by hand; freed memory stays with the process."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from instep.launch import process_memory
from instep.launch.process_memory import ResidentMemory, keep_freed_memory, resident_memory, total_resident

STATUS = "Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t   40 kB\nVmRSS:\t  30 kB\nThreads:\t8\n"
ROLLUP = (
    "5583038c000-7ffe6ac32000 ---p 00000000 00:00 0   [rollup]\n"
    "Rss:            30 kB\nPss:            14 kB\nPss_Anon:       1 kB\nShared_Clean:   24 kB\n"
    "Private_Clean:   2 kB\nPrivate_Dirty:   4 kB\nSwap:  7 kB\n"
)
KB = 1024


@pytest.mark.parametrize(
    ("status", "rollup", "expected"),
    [
        (STATUS, ROLLUP, ResidentMemory(peak=40 * KB, now=30 * KB, private=6 * KB, pss=14 * KB)),
        ("VmHWM:\t 29 kB\n", ROLLUP, ResidentMemory(peak=30 * KB, now=30 * KB, private=6 * KB, pss=14 * KB)),
        (None, ROLLUP, None),
        (STATUS, None, None),
        (STATUS, ROLLUP.replace("Pss:", "Old:"), None),
    ],
)
def test_a_process_is_read_in_bytes_where_the_kernel_says_all(tmp_path, status, rollup, expected):
    for name, text in (("status", status), ("smaps_rollup", rollup)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert resident_memory(tmp_path) == expected


# Pages: ranks A and B, and F, which is no rank.
#
#     A only   B only   A and B   A, B and F
#       10       20        6          12
A = ResidentMemory(peak=28, now=28, private=10, pss=10 + 3 + 4)
B = ResidentMemory(peak=38, now=38, private=20, pss=20 + 3 + 4)
HIGH = ResidentMemory(peak=33, now=28, private=10, pss=17)  # at its peak it had 5 of its own more
# Four ranks of which each pair shares 8 pages that the other pair has not: the proportional count sees both.
PAIRED = ResidentMemory(peak=9, now=9, private=1, pss=1 + 4)


@pytest.mark.parametrize(
    ("processes", "total"),
    [([], 0), ([A], 28), ([A, B], 10 + 20 + 6 + 12), ([HIGH, B], 48 + 5), ([PAIRED] * 4, 4 * 1 + 2 * 8)],
)
def test_shared_pages_count_once(processes, total):
    assert total_resident(processes) == total


def test_this_process_has_what_it_touches():
    before = resident_memory()
    if before is None:
        pytest.skip("this kernel tells no process how much it takes")
    with mmap.mmap(-1, 16 << 20) as memory:
        memory[:] = b"x" * (16 << 20)
        after = resident_memory()
    assert after.now - before.now >= 15 << 20
    assert after.peak >= after.now >= max(after.private, after.pss)


# 64 blocks of 1 MB, taken and freed three times; then the page faults of a fourth time.
STEPS = """
import ctypes, resource
from instep.launch.process_memory import keep_freed_memory

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


def test_the_next_step_finds_the_memory_of_the_last_one() -> None:
    assert num_faults({}) < PAGES // 50
    assert num_faults({"MALLOC_TRIM_THRESHOLD_": "131072"}) > PAGES // 2  # as it is without


class Untouchable:
    def mallopt(self, *_: object) -> int:
        raise AssertionError("the limits were changed")


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, Untouchable()),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, Untouchable()),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, Untouchable()),
        ({}, object()),  # another C library
    ],
)
def test_limits_of_the_user_s_and_other_libraries_are_left_alone(environ, library, monkeypatch) -> None:
    monkeypatch.setattr(process_memory.ctypes, "CDLL", lambda _: library)
    assert not keep_freed_memory(environ)
