"""Publishing directories, their names, and cleaning up after the dead."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from instep.checkpoint import files
from tests.checkpoint.disk import Disk


def write_two(path: Path) -> None:
    files.write_file(path / "a", b"one")
    files.write_file(path / "b", b"two")


def test_a_published_directory_has_its_name_its_files_and_no_temporary_left(tmp_path: Path) -> None:
    path = files.publish(tmp_path, "step-00000001", write_two)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert (path / "a").read_bytes() == b"one"
    assert (path / "b").read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "a").stat().st_mode) == 0o600


def test_files_are_synced_before_the_rename_and_the_parent_after_it(tmp_path: Path) -> None:
    with Disk(tmp_path).mounted() as disk:
        files.publish(tmp_path, "x", write_two)
    names = [
        (name, Path(subject).name) for name, subject in disk.story if name in ("write", "fsync", "rename")
    ]
    temporary = names[4][1]
    assert names == [
        ("write", "a"),
        ("write", "b"),
        ("fsync", "a"),
        ("fsync", "b"),
        ("fsync", temporary),
        ("rename", "x"),
        ("fsync", tmp_path.name),
    ]
    assert files.TEMPORARY_NAME.fullmatch(temporary)


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_nothing_that_has_the_name_is_ever_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "x"
    make = {
        "directory": target.mkdir,
        "file": target.touch,
        "dangling link": lambda: target.symlink_to("nowhere"),
    }
    make[kind]()
    with pytest.raises(FileExistsError, match="never overwritten"):
        files.publish(tmp_path, "x", write_two)
    assert os.listdir(tmp_path) == ["x"]


def test_a_name_taken_while_writing_is_not_replaced_either(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="never overwritten"):
        files.publish(tmp_path, "x", lambda path: (tmp_path / "x").mkdir())
    assert os.listdir(tmp_path) == ["x"]


def test_when_writing_fails_nothing_is_left(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        write_two(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.publish(tmp_path, "x", fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "../x", "a\n", "a\0b", "ä", "x" * 65])
def test_names_that_are_not_plain_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        files.publish(tmp_path, name, write_two)


def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"no space left on device: '.*/a'"):
        files.write_file(tmp_path / "a", b"one")


def test_steps_are_listed_newest_first_and_nothing_else_is(tmp_path: Path) -> None:
    for name in (
        "step-00000002",
        "step-00000010",
        "step-1",
        "step-000000003",
        ".step-00000004.tmp-0",
        "other",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").touch()
    (tmp_path / "step-00000006").symlink_to(tmp_path / "step-00000002", target_is_directory=True)
    assert [step for step, _ in files.step_directories(tmp_path)] == [10, 2]
    assert files.step_directories(tmp_path / "absent") == []


def test_a_directory_of_checkpoints_that_is_a_link_is_followed_and_one_to_a_disk_that_is_gone_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    files.make_directory(tmp_path / "link" / "deeper")
    files.publish(tmp_path / "link", "step-00000001", lambda path: files.write_file(path / "a", b"one"))
    assert files.step_directories(tmp_path / "link") == [(1, tmp_path / "link" / "step-00000001")]
    assert sorted(file.name for file in (tmp_path / "disk").iterdir()) == ["deeper", "step-00000001"]
    (tmp_path / "unmounted").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is a link to .*nowhere, which is not there: mount it"):
        files.step_directories(tmp_path / "unmounted")


def test_a_step_and_its_name_are_inverse() -> None:
    assert [files.step_of(files.step_name(step)) for step in (0, 7, 99999999)] == [0, 7, 99999999]
    assert files.step_of("step-" + "\N{ARABIC-INDIC DIGIT ONE}" * 8) is None
    for step in (-1, 10**8):
        with pytest.raises(ValueError, match="expected a step"):
            files.step_name(step)


def test_only_temporary_directories_of_dead_writers_are_removed(tmp_path: Path) -> None:
    dead, live = (tmp_path / f".step-00000001.tmp-{digit * 16}" for digit in "ab")
    foreign = tmp_path / ".something.tmp-else"
    link = tmp_path / f".step-00000001.tmp-{'c' * 16}"
    for path in (dead, live, foreign):
        path.mkdir()
        (path / "file").touch()
    link.symlink_to(foreign, target_is_directory=True)
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert files.remove_stale(tmp_path) == [dead]
    os.close(lock)
    assert files.remove_stale(tmp_path) == [live]
    assert sorted(os.listdir(tmp_path)) == sorted([foreign.name, link.name])
    assert (foreign / "file").exists()


def test_a_writer_at_work_is_not_taken_for_dead(tmp_path: Path) -> None:
    def clean_meanwhile(path: Path) -> None:
        write_two(path)
        assert files.remove_stale(tmp_path) == []

    assert sorted(os.listdir(files.publish(tmp_path, "x", clean_meanwhile))) == ["a", "b"]


def test_removing_a_directory_leaves_what_its_links_point_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    (doomed / "link").symlink_to(precious, target_is_directory=True)
    files.remove(doomed)
    assert os.listdir(tmp_path) == ["precious"]
    assert (precious / "file").exists()


def test_a_pipe_or_a_link_in_place_of_a_file_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            files.sha256(tmp_path / name)
