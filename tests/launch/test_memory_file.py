"""A file without a name is opened by its number, has its room at once, and is never taken for another."""

from __future__ import annotations

import mmap
import os
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from instep.launch.memory_file import MemoryFile


def read_after(connection: Connection, file: MemoryFile) -> None:
    fd = file.open()
    connection.send("opened")
    connection.recv()
    connection.send(os.pread(fd, 5, 0))


def test_another_process_opens_it_and_has_it_after_its_maker_has_closed_it() -> None:
    file = MemoryFile.create()
    os.pwrite(file.fd, b"words", 0)
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=read_after, args=(theirs, file))
    process.start()
    assert ours.recv() == "opened"
    file.close()
    with pytest.raises(FileNotFoundError):
        file.open()
    ours.send("closed")
    assert ours.recv() == b"words"
    process.join()
    for end in (ours, theirs):
        end.close()


def test_it_has_room_no_name_and_a_position_for_each_opening() -> None:
    file = MemoryFile.create(4096)
    status = os.fstat(file.fd)
    assert (status.st_size, status.st_nlink) == (4096, 0)
    assert status.st_blocks * 512 >= 4096  # allocated: a mapping cannot end in SIGBUS
    with mmap.mmap(file.fd, 4096) as memory:
        assert memory[:] == bytes(4096)
    one, other = file.open(), file.open()
    os.write(one, b"abc")
    assert os.read(other, 3) == b"abc"
    stale = MemoryFile(file.pid, file.fd, os.fstat(file.fd).st_ino + 1)
    with pytest.raises(OSError, match=f"descriptor {file.fd} of process {file.pid} is not the memory"):
        stale.open()
    for fd in (one, other, file.fd):
        os.close(fd)
