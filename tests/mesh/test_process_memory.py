"""The kernel's counts, read from files that were written by hand; freed memory stays with the process."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from instep.mesh import process_memory
from instep.mesh.process_memory import ResidentMemory, keep_freed_memory, resident_memory, total_resident

STATUS = "Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t   40 kB\nVmRSS:\t  30 kB\nThreads:\t8\n"
ROLLUP = (
    "5583038c000-7ffe6ac32000 ---p 00000000 00:00 0   [rollup]\n"
    "Rss:            30 kB\nPss:            14 kB\nPss_Anon:       1 kB\nShared_Clean:   24 kB\n"
    "Private_Clean:   2 kB\nPrivate_Dirty:   4 kB\nSwap:  7 kB\n"
)


@pytest.fixture
def process(tmp_path):
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "smaps_rollup").write_text(ROLLUP)
    return tmp_path


def test_a_process_is_read_in_bytes(process):
    assert resident_memory(process) == ResidentMemory(
        peak=40 * 1024, now=30 * 1024, private=6 * 1024, pss=14 * 1024
    )


def test_the_peak_is_never_below_what_is_there_now(process):
    (process / "status").write_text("VmHWM:\t 29 kB\n")
    assert resident_memory(process).peak == 30 * 1024


@pytest.mark.parametrize("missing", ["status", "smaps_rollup"])
def test_a_kernel_that_does_not_tell_is_no_error(process, missing):
    (process / missing).unlink()
    assert resident_memory(process) is None


def test_a_kernel_that_leaves_a_field_out_has_not_told(process):
    (process / "smaps_rollup").write_text(ROLLUP.replace("Pss:", "Old:"))
    assert resident_memory(process) is None


# Pages: ranks A and B, and F, which is no rank.
#
#     A only   B only   A and B   A, B and F
#       10       20        6          12
A = ResidentMemory(peak=28, now=28, private=10, pss=10 + 3 + 4)
B = ResidentMemory(peak=38, now=38, private=20, pss=20 + 3 + 4)


def test_pages_that_all_ranks_share_count_once_whoever_else_has_them():
    assert total_resident([A, B]) == 10 + 20 + 6 + 12


def test_one_process_takes_what_it_takes():
    assert total_resident([A]) == 28


def test_no_process_takes_nothing():
    assert total_resident([]) == 0


def test_what_a_process_had_more_at_its_peak_was_its_own():
    high = ResidentMemory(peak=33, now=28, private=10, pss=17)
    assert total_resident([high, B]) == total_resident([A, B]) + 5


# Four ranks of which each pair shares 8 pages that the other pair has not: the proportional count sees both.
def test_pages_of_some_ranks_are_found_by_the_proportional_count():
    each = ResidentMemory(peak=9, now=9, private=1, pss=1 + 4)
    assert total_resident([each] * 4) == 4 * 1 + 2 * 8


def test_this_process_has_what_it_touches():
    before = resident_memory()
    if before is None:
        pytest.skip("this kernel tells no process how much it takes")
    with mmap.mmap(-1, 16 << 20) as memory:
        memory[:] = b"x" * (16 << 20)
        after = resident_memory()
    assert after.now - before.now >= 15 << 20
    assert after.peak >= after.now >= after.private
    assert after.now >= after.pss


# 64 blocks of 1 MB, taken and freed three times; then the page faults of a fourth time.
STEPS = """
import ctypes, resource
from instep.mesh.process_memory import keep_freed_memory

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
    monkeypatch.setattr(process_memory.ctypes, "CDLL", lambda _: Untouchable())
    assert not keep_freed_memory({name: value})


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory.ctypes, "CDLL", lambda _: object())
    assert not keep_freed_memory({})


class Untouchable:
    def mallopt(self, *_: object) -> int:
        raise AssertionError("the limits were changed")
