"""Words of shared memory: waiting for them takes no time when they are there, and none is missed."""

from __future__ import annotations

import os
import threading
import time

import pytest

from instep.shm import segment
from instep.shm.segment import Words

PATIENCE_S = 20


@pytest.fixture
def words() -> Words:
    return segment.create(4096).words()


def test_words_are_signed_and_have_all_their_bits(words):
    for value in (0, 1, -1, 2**31, 2**32, 2**32 + 7, 2**62, -(2**62)):
        words.post(3, value)
        assert words[3] == value
    assert words[2] == words[4] == 0


def test_a_wait_for_what_never_comes_ends_in_its_time(words):
    began = time.monotonic()
    assert not words.spin(0, 1, 0.02)
    words.sleep(0, 1, 0.05)
    assert 0.06 < time.monotonic() - began < PATIENCE_S
    words.sleep(0, 1, 0)
    words.sleep(0, 1, -1)


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
