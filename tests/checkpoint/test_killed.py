"""A save that is killed, or fails, at any operation of the file system: the old state or the new one, whole.

The operations are counted on a disk that works, then one after the other is the last. What the save finds
when it begins differs, and with it what it does:

    prune       two older checkpoints, of which one goes, and the remains of a dead writer
    set aside   the step is there already and does not verify
    again       the step is there already, whole: its writer died before it could tell
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from instep.checkpoint import files
from instep.checkpoint.load import verify
from instep.checkpoint.save import MODEL_FILE
from instep.errors import CheckpointRejected
from tests.checkpoint.disk import Disk, Killed
from tests.checkpoint.states import save, save_steps, state, whole_step

OLD, NEW = (1, 2), 3


def prune(directory: Path) -> None:
    save_steps(directory, *OLD)
    remains = directory / f".step-00000002.tmp-{'0' * 16}"
    remains.mkdir()
    (remains / MODEL_FILE).write_bytes(b"half")


def set_aside(directory: Path) -> None:
    save_steps(directory, *OLD, NEW)
    (directory / files.step_name(NEW) / MODEL_FILE).write_bytes(b"damaged")


def again(directory: Path) -> None:
    save_steps(directory, *OLD, NEW)


BEGINNINGS = {"prune": prune, "set aside": set_aside, "again": again}


@pytest.fixture(params=BEGINNINGS)
def before(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory as it is before the save under test."""
    BEGINNINGS[request.param](tmp_path / "before")
    return tmp_path / "before"


@pytest.fixture
def count(before: Path) -> int:
    """How many operations the save does."""
    counting = copy_of(before, "counting")
    with Disk(counting).mounted() as counted:
        save_new(counting)
    return len(counted.story)


def copy_of(before: Path, name: object) -> Path:
    return shutil.copytree(before, before.with_name(f"copy-{name}"), symlinks=True)


def save_new(directory: Path) -> None:
    save(directory, **state(NEW), keep=2)


def rejected(names: list[str]) -> list[str]:
    return [name for name in names if ".rejected-" in name]


def temporary(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if files.TEMPORARY_NAME.fullmatch(name)]


def assert_the_next_save_works_and_cleans_up(directory: Path) -> None:
    save_new(directory)
    assert whole_step(directory) == NEW
    left = os.listdir(directory)
    assert sorted(set(left) - set(rejected(left))) == ["step-00000002", "step-00000003"]
    assert len(rejected(left)) <= 1  # what was damaged before is kept, once, for whoever wants to look


@pytest.mark.parametrize("power", ["on", "cut"])
def test_a_kill_at_any_operation_leaves_the_old_state_or_the_new_one(
    before: Path, count: int, power: str
) -> None:
    seen = []
    for number in range(count):
        copy = copy_of(before, number)
        disk = Disk(copy, fail_at=number, killed=True)
        with disk.mounted(), pytest.raises(Killed):
            save_new(copy)
        if power == "cut":
            disk.cut_power(copy)
        seen.append(whole_step(copy))
        whole = [path for _, path in files.step_directories(copy) if verifies(path)]
        assert len(whole) >= len(OLD), f"killed at operation {number}, {disk.story[number]}"
        if number % 3 == 0:
            assert_the_next_save_works_and_cleans_up(copy)
    first_new = seen.index(NEW)
    assert seen == [OLD[-1]] * first_new + [NEW] * (count - first_new)


def verifies(path: Path) -> bool:
    try:
        return verify(path) is not None
    except CheckpointRejected:
        return False


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False)],
    ids=["full for a moment", "full from then on", "broken for a moment"],
)
def test_an_error_at_any_operation_names_its_path_and_costs_no_older_checkpoint(
    before: Path, count: int, code: int, lasting: bool
) -> None:
    messages = []
    for number in range(count):
        copy = copy_of(before, number)
        with Disk(copy, fail_at=number, code=code, lasting=lasting).mounted():
            try:
                save_new(copy)
            except (OSError, CheckpointRejected) as error:
                messages.append((str(copy), str(error)))
        assert whole_step(copy) in (OLD[-1], NEW)
        if not lasting:
            assert [name for name in temporary(copy) if files.step_name(NEW) in name] == []
        if number % 3 == 1:
            assert_the_next_save_works_and_cleans_up(copy)
    assert [message for path, message in messages if path not in message] == []
    assert len(messages) > count // 3


def test_what_save_returned_survives_a_power_cut(before: Path) -> None:
    disk = Disk(before)
    with disk.mounted():
        save_new(before)
    disk.cut_power(before)
    assert whole_step(before) == NEW
