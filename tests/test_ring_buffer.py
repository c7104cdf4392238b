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
    return [record[4] for record in ring.backwards()]


@pytest.fixture(params=["memory", "file"])
def path(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "ring"


def test_the_newest_come_first_and_the_oldest_go(path):
    ring = RingBuffer(4, path, HEAD)
    assert steps(ring) == []
    for step in range(6):
        put(ring, step)
    assert steps(ring) == [5, 4, 3, 2]
    number, start, end, num_bytes, step, leaf, bucket, peer, name, lane, stages = next(ring.backwards())
    assert (number, start, end, num_bytes, step, leaf, bucket, peer) == (6, 50, 55, 5, 5, -1, -1, -1)
    assert (ring.names[name], ring.names[lane], stages) == ("forward", "compute", 0)


def test_what_came_since_a_count_comes_oldest_first_as_far_as_it_is_kept(path):
    ring = RingBuffer(4, path, HEAD)
    assert ring.since(0) == []
    for step in range(11):
        put(ring, step)
        kept = [*ring.backwards()][::-1]
        for count in range(step + 2):
            assert ring.since(count) == [record for record in kept if record[0] > count]


def test_a_place_that_holds_another_number_is_left_out(path):
    ring = RingBuffer(4, path, HEAD)
    for step in range(6):
        put(ring, step)
    RECORD.pack_into(ring._memory, FIRST + RECORD.size, *[0] * 11)  # that of number 6, the newest
    assert steps(ring) == [4, 3, 2]
    assert [record[4] for record in ring.since(0)] == [2, 3, 4]


@pytest.mark.parametrize("written", [0, 1, 3, 4, 5, 7, 8, 9, 11])
def test_a_file_is_gone_on_with_where_it_ended(tmp_path, written):
    first = RingBuffer(4, tmp_path / "ring", HEAD)
    for step in range(written):
        put(first, step, f"name {step}")
    second = RingBuffer(4, tmp_path / "ring", {**HEAD, "rank": 4})
    assert second.newest == written
    put(second, 99)
    assert steps(second) == [99, *range(written)[::-1]][:4]
    names = {second.names[record[8]] for record in second.backwards()}
    assert names == {"forward", *(f"name {step}" for step in range(max(written - 3, 0), written))}
    head, in_file = read_head(tmp_path / "ring")
    assert (head["rank"], in_file) == (4, second.names)


@pytest.mark.parametrize("change", [{"boot": "another"}, {"boot": None}])
def test_another_boot_begins_a_new_ring_because_its_clock_is_another(tmp_path, change):
    put(RingBuffer(4, tmp_path / "ring", HEAD), 1)
    assert steps(RingBuffer(4, tmp_path / "ring", {**HEAD, **change})) == []


def test_another_capacity_begins_a_new_ring(tmp_path):
    put(RingBuffer(4, tmp_path / "ring", HEAD), 1)
    assert steps(RingBuffer(5, tmp_path / "ring", HEAD)) == []


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
    assert ring.names[next(ring.backwards())[8]] == OTHER
    assert ring.names[0] == OTHER


def test_a_full_disk_is_an_error_at_once_and_not_a_signal_later(tmp_path, monkeypatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space left"):
        RingBuffer(2, tmp_path / "ring", HEAD)


def test_a_head_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="expected at most"):
        RingBuffer(2, None, {"host": "x" * HEAD_BYTES})


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
    assert sorted(record[4] for record in RingBuffer(4000, tmp_path / "ring", HEAD).backwards()) == [
        *range(4000)
    ]


def test_no_name_and_one_that_is_no_text_do_not_hide_those_that_follow(tmp_path):
    ring = RingBuffer(4, tmp_path / "ring", HEAD)
    for name in ("", "half a pair \ud800", "after"):
        put(ring, 1, name)
    _, names = read_head(tmp_path / "ring")
    assert names[-1] == "after"
    assert [ring.names[record[8]] for record in ring.backwards()][-1] == OTHER
