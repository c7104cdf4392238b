"""Publishing directories, their names, and cleaning up after the dead."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from instep.checkpoint import files


def write_two(path: Path) -> None:
    files.write_file(path / "a", b"one")
    files.write_file(path / "b", b"two")


def test_a_published_directory_has_its_name_its_files_and_no_temporary_left(tmp_path: Path) -> None:
    def write_beside_a_cleaner(path: Path) -> None:
        write_two(path)
        assert files.remove_stale(tmp_path) == []  # a writer at work is not taken for dead

    path = files.publish(tmp_path, "step-00000001", write_beside_a_cleaner)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert ((path / "a").read_bytes(), (path / "b").read_bytes()) == (b"one", b"two")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path / "a")] == [0o700, 0o600]


TAKERS: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "file": Path.touch,
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("while_writing", [False, True])
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_nothing_that_has_the_name_is_ever_replaced(
    tmp_path: Path, take: Callable[[Path], object], while_writing: bool
) -> None:
    if not while_writing:
        take(tmp_path / "x")
    with pytest.raises(FileExistsError, match="never overwritten"):
        files.publish(tmp_path, "x", lambda path: take(tmp_path / "x"))
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "../x", "a\n", "a\0b", "ä", "x" * 65])
def test_names_that_are_not_plain_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        files.publish(tmp_path, name, write_two)


def test_steps_are_listed_newest_first_also_behind_a_link_and_a_disk_that_is_gone_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    files.make_directory(tmp_path / "link" / "deeper")
    files.publish(tmp_path / "link", "step-00000001", lambda path: files.write_file(path / "a", b"one"))
    assert files.step_directories(tmp_path / "link") == [(1, tmp_path / "link" / "step-00000001")]
    assert sorted(file.name for file in (tmp_path / "disk").iterdir()) == ["deeper", "step-00000001"]
    for name in ("step-00000010", "step-1", "step-000000003", ".step-00000004.tmp-0", "other"):
        (tmp_path / "link" / name).mkdir()
    (tmp_path / "link" / "step-00000005").touch()
    os.mkfifo(tmp_path / "link" / "step-00000007")
    (tmp_path / "link" / "step-00000006").symlink_to("step-00000010", target_is_directory=True)
    assert [step for step, _ in files.step_directories(tmp_path / "link")] == [10, 1]
    assert files.step_directories(tmp_path / "absent") == []
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
