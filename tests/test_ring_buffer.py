"""A ring keeps the last records, in memory or in a file that outlives its writer."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from instep.ring_buffer import FIRST, HEAD_BYTES, NAMES_BYTES, OTHER, RECORD, RingBuffer, read_head

HEAD = {"boot": "this one", "rank": 3}


def put(ring: RingBuffer, step: int, name: str = "forward") -> None:
    ring.put(name, "compute", 10 * step, 10 * step + 5, step, step, -1, -1, -1)


def steps(ring: RingBuffer) -> list[int]:
    return [record[4] for record in ring.since(0)]


@pytest.fixture(params=["memory", "file"])
def path(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "ring"


def test_the_oldest_are_overwritten(path):
    ring = RingBuffer(4, path, HEAD)
    assert steps(ring) == []
    for step in range(6):
        put(ring, step)
    assert steps(ring) == [2, 3, 4, 5]
    number, start, end, num_bytes, step, leaf, bucket, peer, name, lane, stages = ring.since(5)[0]
    assert (number, start, end, num_bytes, step, leaf, bucket, peer) == (6, 50, 55, 5, 5, -1, -1, -1)
    assert (ring.names[name], ring.names[lane], stages) == ("forward", "compute", 0)


def test_the_records_since_a_number_come_oldest_first_as_far_as_they_are_kept(path):
    ring = RingBuffer(4, path, HEAD)
    for newest in range(1, 12):
        put(ring, newest)
        for count in range(newest + 2):
            kept = [*range(max(count, newest - 4) + 1, newest + 1)]
            assert [(record[0], record[4]) for record in ring.since(count)] == [(x, x) for x in kept]


def test_a_place_that_holds_another_number_is_left_out(path):
    ring = RingBuffer(4, path, HEAD)
    for step in range(6):
        put(ring, step)
    RECORD.pack_into(ring._memory, FIRST + RECORD.size, *[0] * 11)  # that of number 6, the newest
    assert steps(ring) == [2, 3, 4]


@pytest.mark.parametrize("written", [0, 1, 3, 4, 5, 7, 8, 9, 11])
def test_a_file_is_gone_on_with_where_it_ended(tmp_path, written):
    first = RingBuffer(4, tmp_path / "ring", HEAD)
    for step in range(written):
        put(first, step, f"name {step}")
    second = RingBuffer(4, tmp_path / "ring", {**HEAD, "rank": 4})
    assert second.newest == written
    put(second, 99)
    assert steps(second) == [*range(written), 99][-4:]
    names = {second.names[record[8]] for record in second.since(0)}
    assert names == {"forward", *(f"name {step}" for step in range(max(written - 3, 0), written))}
    head, in_file = read_head(tmp_path / "ring")
    assert (head["rank"], in_file) == (4, second.names)


@pytest.mark.parametrize(("capacity", "boot"), [(4, "another"), (4, None), (5, HEAD["boot"])])
def test_another_boot_with_another_clock_and_another_capacity_begin_a_new_ring(tmp_path, capacity, boot):
    put(RingBuffer(4, tmp_path / "ring", HEAD), 1)
    assert steps(RingBuffer(capacity, tmp_path / "ring", {**HEAD, "boot": boot})) == []


def test_a_file_that_is_no_ring_is_replaced(tmp_path):
    (tmp_path / "ring").write_bytes(b"x" * FIRST)
    assert read_head(tmp_path / "ring") is None
    ring = RingBuffer(4, tmp_path / "ring", HEAD)
    assert steps(ring) == []
    assert read_head(tmp_path / "ring") is not None


def test_a_head_that_is_not_there_or_too_short_or_no_object_is_none(tmp_path):
    ring = tmp_path / "ring"
    assert read_head(ring) is None
    RingBuffer(2, ring, HEAD)
    whole = ring.read_bytes()
    ring.write_bytes(whole[: FIRST - 1])
    assert read_head(ring) is None
    ring.write_bytes(whole[:8] + b"[1]".ljust(HEAD_BYTES - 8) + whole[HEAD_BYTES:])
    assert read_head(ring) is None


def test_names_beyond_their_part_of_the_file_are_called_other():
    ring = RingBuffer(2)
    for i in range(NAMES_BYTES // 100):
        put(ring, i, f"{i:098}")
    put(ring, 0, "one too many" * 10)
    assert ring.names[ring.since(ring.newest - 1)[0][8]] == OTHER
    assert ring.names[0] == OTHER


def test_a_full_disk_is_an_error_at_once_and_not_a_signal_later(tmp_path, monkeypatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space left"):
        RingBuffer(2, tmp_path / "ring", HEAD)


def test_a_head_that_is_too_long_is_refused(path):
    with pytest.raises(ValueError, match="expected at most 4096 bytes, got"):
        RingBuffer(2, path, {"host": "x" * HEAD_BYTES})


def test_threads_lose_no_record(tmp_path: Path) -> None:
    ring = RingBuffer(4000, tmp_path / "ring", HEAD)

    def write(thread: int) -> None:
        for i in range(1000):
            put(ring, 1000 * thread + i, f"thread {thread}")

    threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps(RingBuffer(4000, tmp_path / "ring", HEAD))) == [*range(4000)]


def test_no_name_and_one_that_is_no_text_do_not_hide_those_that_follow(tmp_path):
    ring = RingBuffer(4, tmp_path / "ring", HEAD)
    for name in ("", "half a pair \ud800", "after"):
        put(ring, 1, name)
    _, names = read_head(tmp_path / "ring")
    assert names[-1] == "after"
    assert ring.names[ring.since(0)[0][8]] == OTHER
