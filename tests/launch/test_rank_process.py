"""What a rank inherits, prints to and ends with: its launcher, memory files, streams, its last error."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from instep.launch import process_memory
from instep.launch.memory_file import MemoryFile
from instep.launch.process_memory import ResidentMemory, keep_freed_memory, resident_memory, total_resident
from instep.launch.rank_exit import (
    MESSAGE_LIMIT,
    RECORD_LIMIT_BYTES,
    TRACEBACK_LIMIT,
    ErrorRecord,
    Exit,
    mark_secondary,
    root_cause,
)
from instep.mesh import join

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30
MORE_THAN_SELECT_KNOWS = 1100
RANK = """
import os, resource, signal, sys
from instep.launch.rank_process import end_with_parent
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[1]))]
end_with_parent()
end_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_process_whose_parent_is_killed_is_killed_and_says_why() -> None:
    launcher = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" "$2" & wait', sys.executable, RANK, str(MORE_THAN_SELECT_KNOWS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        rank = int(launcher.stdout.readline())
        pidfd = os.pidfd_open(rank)
        try:
            launcher.kill()
            assert select.select([pidfd], [], [], PATIENCE_S)[0]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        said = launcher.stderr.read()
    assert said == f"instep: pid {rank} ends: its launcher (pid {launcher.pid}) has ended\n"


@pytest.mark.parametrize(
    ("environ", "asked", "watched"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, {}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"outlive_launcher": True}, False),
        ({}, {}, False),  # a shell that ends may have set RANK
    ],
)
def test_a_rank_of_torchrun_ends_with_it_unless_the_user_says_no(
    environ: dict[str, str], asked: dict[str, bool], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(join, "end_with_parent", lambda: calls.append(None))
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**place, **environ}.items():
        monkeypatch.setenv(name, value)
    join.init(**asked).close()
    assert len(calls) == watched


ENDS = """
import atexit, os
atexit.register(print, "looks for what is left")
import instep.launch.forkserver
for number in (2, 10, 15):
    os.kill(os.getpid(), number)
if os.fork():
    os.wait()
    print("forkserver")
else:
    print("rank")
"""


def test_it_ignores_stop_signals_and_ends_without_a_look_at_what_is_left() -> None:
    """That would take a second, or, since nothing is collected, triton would name leaked objects."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split("\n") == ["rank", "looks for what is left", "forkserver", ""]
    assert (ended.returncode, ended.stderr) == (0, "")


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


PRINTS = """
import sys
from instep.launch.output import open_standard_streams, outlive_output
open_standard_streams()
outlive_output()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("l\\xe4ufe/\\udcff", file=stream)
assert open("/dev/null").fileno() > 2  # no file of a run in the place of a stream
import os
os.write(int(sys.argv[1]), b"done")
"""
DROPPED = b"stdout cannot be written: %s: output is dropped\n"


@pytest.mark.parametrize(
    ("redirect", "out", "err"),
    [
        ("", b"l\\xe4ufe/\\udcff\n" * 3, b"l\\xe4ufe/\\udcff\n" * 3),
        ("> /dev/full", b"", DROPPED % b"No space left on device" + b"l\\xe4ufe/\\udcff\n" * 3),
        ("2> /dev/full", b"l\\xe4ufe/\\udcff\n" * 3, b""),
        ("> /dev/full 2>&1", b"", b""),
        (">&- 2>&-", b"", b""),
        ("| true", b"", DROPPED % b"Broken pipe" + b"l\\xe4ufe/\\udcff\n" * 3),
    ],
)
def test_a_process_outlives_its_output(redirect: str, out: bytes, err: bytes) -> None:
    """Each of these ended training, the unknown letter in the last line that the run printed."""
    reader, writer = os.pipe()
    wait = "sleep 0.3; " if "true" in redirect else ""  # until nobody reads
    command = f"({wait}exec {sys.executable} -c '{PRINTS}' {writer}) {redirect}"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(["bash", "-c", command], capture_output=True, env=environ, pass_fds=[writer])
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert (file.read(), ended.stdout, ended.stderr) == (b"done", out, err)


def exit_(rank: int, code: int = 1, kind: str = "", at: int = 0, told: bool = False) -> Exit:
    return Exit(rank, 100 + rank, code, ErrorRecord(kind, "why", "", at, told) if kind else None)


DONE = exit_(0, 0)
# Best explanation first; whatever is missing, the first of the rest is the cause.
EXPLAINS = [
    exit_(2, -signal.SIGKILL),
    exit_(4, kind="ValueError", at=10),
    exit_(5, kind="RuntimeError", at=20),
    exit_(3, -signal.SIGABRT),
    exit_(1, 3),
    exit_(6, kind="instep.errors.PeerLost", at=5),
    exit_(7, kind="KeyError", at=6, told=True),
]


def test_the_best_explanation_wins_in_any_order_and_of_equals_the_first() -> None:
    for known in range(len(EXPLAINS)):
        left = EXPLAINS[known:]
        assert root_cause([DONE, *left]) is left[0]
        assert root_cause([*reversed(left), DONE]) is left[0]
    equal = [EXPLAINS[0], exit_(7, -signal.SIGSEGV)]
    assert root_cause(equal) is equal[0] and root_cause(equal[::-1]) is equal[1]
    assert root_cause([]) is root_cause([DONE]) is None


def caught(error: BaseException) -> ErrorRecord:
    def fails() -> None:
        raise error

    try:
        fails()
    except BaseException as raised:
        return ErrorRecord.of(raised)


def test_a_record_survives_being_written_down_whole_and_is_none_if_cut_off() -> None:
    record = caught(mark_secondary(ValueError("größer \udcff \x00")))
    data = record.to_bytes()
    assert record.told and ErrorRecord.from_bytes(data) == record
    assert ErrorRecord.from_bytes(b"") is ErrorRecord.from_bytes(data[:-1]) is None
    largest = caught(ValueError("\x00" * 10 * TRACEBACK_LIMIT))  # six bytes each in JSON
    assert len(largest.message) == MESSAGE_LIMIT
    assert len(largest.to_bytes()) <= RECORD_LIMIT_BYTES


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
