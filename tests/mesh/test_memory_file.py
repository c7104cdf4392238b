"""A file without a name is opened by its number, has its room at once, and is never taken for another."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from instep.mesh.memory_file import MemoryFile


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    made = MemoryFile.create(4096)
    yield made
    made.close()


def read_after(connection: Connection, file: MemoryFile) -> None:
    fd = file.open()
    connection.send("opened")
    connection.recv()
    connection.send(os.pread(fd, 5, 0))


def test_another_process_opens_it_and_has_it_when_its_maker_has_let_it_go() -> None:
    file = MemoryFile.create()
    os.pwrite(file.fd, b"words", 0)
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=read_after, args=(theirs, file))
    process.start()
    assert ours.recv() == "opened"
    file.close()
    ours.send("closed")
    assert ours.recv() == b"words"
    process.join()
    for end in (ours, theirs):
        end.close()


def test_it_has_its_room_and_no_name(file: MemoryFile) -> None:
    status = os.fstat(file.fd)
    assert (status.st_size, status.st_nlink) == (4096, 0)
    assert status.st_blocks * 512 >= 4096  # taken: what is mapped cannot end in SIGBUS
    with mmap.mmap(file.fd, 4096) as memory:
        assert memory[:] == bytes(4096)


def test_each_opening_has_a_position_and_locks_of_its_own(file: MemoryFile) -> None:
    one, other = file.open(), file.open()
    os.write(one, b"abc")
    assert os.read(other, 3) == b"abc"
    os.close(one)
    os.close(other)


def test_a_number_that_has_come_to_stand_for_another_file_is_refused(file: MemoryFile) -> None:
    stale = MemoryFile(file.pid, file.fd, file.inode + 1)
    with pytest.raises(OSError, match=f"descriptor {file.fd} of process {file.pid} is not the memory"):
        stale.open()


def test_one_that_was_let_go_is_not_there() -> None:
    file = MemoryFile.create()
    file.close()
    with pytest.raises(FileNotFoundError):
        file.open()
