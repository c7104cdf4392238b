"""Words of shared memory are never missed, calls are announced, and slices are everything once."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instep.shm import segment
from instep.shm.call import CALL_BYTES, LOCATION, SLOT_BYTES, Location, announcement, describe_call
from instep.shm.collectives import combine, own_slice, reduction_name
from instep.shm.segment import Words
from tests.shm.numbers import MOVED, REDUCTIONS, op

PATIENCE_S = 20


@pytest.fixture
def words() -> Words:
    return segment.create(4096).words()


def test_posts_of_two_threads_to_each_other_are_never_missed(words):
    """A word of each; either waits for the other's before it goes on. The kernel compares 32 bits of it."""
    line, first = 8, 2**32 - 1000

    def play(mine: int, theirs: int) -> None:
        for n in range(first, first + 2000):
            words.post(mine, n)
            while words[theirs] < n:
                words.sleep(theirs, n, PATIENCE_S)

    threads = [threading.Thread(target=play, args=pair) for pair in ((0, line), (line, 0))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words[0] == words[line] == first + 1999
    assert time.monotonic() - began < PATIENCE_S


def test_the_memory_of_a_segment_is_one_for_all_who_attach():
    own = segment.create(8192)
    other = segment.attach(os.getpid(), own.fd)
    assert (other.inode, other.fd) == (own.inode, -1)
    own.words().post(512, 77)
    assert other.words()[512] == 77
    other.tensor(100, 3).fill_(9)
    assert own.tensor(99, 5).tolist() == [0, 9, 9, 9, 0]
    assert own.tensor(0, 0).numel() == 0
    assert segment.inode(os.getpid(), own.fd) == own.inode


def test_a_segment_that_is_gone_cannot_be_attached():
    own = segment.create(4096)
    fd = own.fd
    tensor = own.tensor(0, 8).fill_(3)
    del own
    assert segment.inode(os.getpid(), fd) is not None  # a tensor looks at it
    assert tensor.tolist() == [3] * 8
    del tensor
    assert segment.inode(os.getpid(), fd) is None
    with pytest.raises(OSError):
        segment.attach(os.getpid(), fd)


COUNTS = st.integers(0, 2**62)
CALLS = st.tuples(
    st.sampled_from(("all_gather", "all_reduce", "reduce_scatter")),
    st.sampled_from(MOVED),
    COUNTS,
    st.sampled_from(("", *REDUCTIONS)),
    st.integers(-1, 10_000),
)


@given(CALLS, CALLS, st.builds(Location, st.integers(-1, 2**31), COUNTS, COUNTS, COUNTS))
def test_announcements_differ_exactly_where_calls_do_and_carry_the_location(a, b, place):
    slots = [announcement(describe_call(*call), place) for call in (a, b)]
    assert [len(slot) for slot in slots] == [SLOT_BYTES] * 2
    assert (a == b) == (slots[0][:CALL_BYTES] == slots[1][:CALL_BYTES])
    assert Location(*LOCATION.unpack(slots[0][CALL_BYTES:])) == place


def test_reductions_have_torch_s_names():
    options = dist.AllreduceOptions()
    for name in REDUCTIONS:
        options.reduceOp = dist.ReduceOp(op(name))
        assert reduction_name(options) == name
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(TypeError, match="expected a reduction out of sum, avg, product"):
        reduction_name(options)


def test_complex_numbers_are_added_and_averaged():
    for name, factor in (("sum", 3), ("avg", 1)):
        out = torch.empty(2, dtype=torch.complex64)
        combine([torch.tensor([1 + 2j, -3j]) * n for n in (1, 2, 6)], name, out)
        assert out.tolist() == [factor * (3 + 6j), factor * -9j]


@given(st.integers(0, 300_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9))
def test_the_slices_of_all_ranks_are_everything_once_and_share_no_line(count, itemsize, size):
    found = [own_slice(count, itemsize, rank, size) for rank in range(size)]
    assert [found[0].start, *(one.stop for one in found)] == [0, *(one.start for one in found[1:]), count]
    assert all(one.start * itemsize % 64 == 0 for one in found if one.start < one.stop)
