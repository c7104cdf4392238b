"""The kernel's counts, read from files that were written by hand, and sums over processes that are drawn."""

import mmap

import pytest

from instep.mesh.resident import Resident, resident, together

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
    assert resident(process) == Resident(peak=40 * 1024, now=30 * 1024, private=6 * 1024, pss=14 * 1024)


def test_the_peak_is_never_below_what_is_there_now(process):
    (process / "status").write_text("VmHWM:\t 29 kB\n")
    assert resident(process).peak == 30 * 1024


@pytest.mark.parametrize("missing", ["status", "smaps_rollup"])
def test_a_kernel_that_does_not_tell_is_no_error(process, missing):
    (process / missing).unlink()
    assert resident(process) is None


def test_a_kernel_that_leaves_a_field_out_has_not_told(process):
    (process / "smaps_rollup").write_text(ROLLUP.replace("Pss:", "Old:"))
    assert resident(process) is None


# Pages: ranks A and B, and F, which is no rank.
#
#     A only   B only   A and B   A, B and F
#       10       20        6          12
A = Resident(peak=28, now=28, private=10, pss=10 + 3 + 4)
B = Resident(peak=38, now=38, private=20, pss=20 + 3 + 4)


def test_pages_that_all_ranks_share_count_once_whoever_else_has_them():
    assert together([A, B]) == 10 + 20 + 6 + 12


def test_one_process_takes_what_it_takes():
    assert together([A]) == 28


def test_no_process_takes_nothing():
    assert together([]) == 0


def test_what_a_process_had_more_at_its_peak_was_its_own():
    high = Resident(peak=33, now=28, private=10, pss=17)
    assert together([high, B]) == together([A, B]) + 5


# Four ranks of which each pair shares 8 pages that the other pair has not: the proportional count sees both.
def test_pages_of_some_ranks_are_found_by_the_proportional_count():
    each = Resident(peak=9, now=9, private=1, pss=1 + 4)
    assert together([each] * 4) == 4 * 1 + 2 * 8


def test_this_process_has_what_it_touches():
    before = resident()
    if before is None:
        pytest.skip("this kernel tells no process how much it takes")
    with mmap.mmap(-1, 16 << 20) as memory:
        memory[:] = b"x" * (16 << 20)
        after = resident()
    assert after.now - before.now >= 15 << 20
    assert after.peak >= after.now >= after.private
    assert after.now >= after.pss
