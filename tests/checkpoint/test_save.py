"""Saving: whatever happens meanwhile, the newest checkpoint that verifies is the old one or the new one."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import files, load
from instep.checkpoint.load import verify
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE, prune
from instep.errors import CheckpointRejected
from tests.checkpoint.states import OPTIONS, save, save_steps, state, whole_step

OLD, NEW = (1, 2), 3


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A directory as it is before the save under test: two checkpoints, and the remains of a dead writer."""
    directory = tmp_path / "before"
    save_steps(directory, *OLD)
    remains = directory / f".step-00000002.tmp-{'0' * 16}"
    remains.mkdir()
    (remains / "model.safetensors").write_bytes(b"half")
    return directory


def step_names(directory: Path) -> list[str]:
    return sorted(path.name for _, path in files.step_directories(directory))


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "directory", **state(7), extra={"rng": [1, 2]})
    assert path.name == "step-00000007"
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    assert whole_step(path.parent) == 7
    manifest = verify(path)
    assert manifest.extra == {"rng": [1, 2], "optimizer": OPTIONS}
    assert manifest.versions["torch"] == torch.__version__


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_system_that_refuses_the_bytes_is_quoted_with_the_path(before: Path) -> None:
    big = {**state(NEW), "model": {"weight": torch.ones(1 << 20)}}
    with (
        file_size_limit(1 << 18),
        pytest.raises(OSError, match=r"\.step-00000003.*model\.safetensors") as caught,
    ):
        save(before, **big)
    assert caught.value.errno == errno.EFBIG
    assert sorted(os.listdir(before))[1:] == ["step-00000001", "step-00000002"]
    assert whole_step(before) == OLD[-1]


def test_a_read_only_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int = 0o777) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(OSError, match=r"Read-only file system.*step-00000007"):
        save(tmp_path, **state(7))


def test_the_same_state_at_the_same_step_counts_as_saved(tmp_path: Path) -> None:
    first, second = save_steps(tmp_path, 1), save_steps(tmp_path, 1)
    assert first == second
    assert save(tmp_path, **{**state(1), "world_size": 64}) == first[0]
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    "other",
    [
        {"model": state(2)["model"]},
        {"optimizer": state(2)["optimizer"]},
        {"data_cursor": 9},
        {"numerical": {}},
        {"extra": {"lr": 1}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_state_at_a_saved_step_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    save_steps(tmp_path, 1)
    with pytest.raises(FileExistsError, match="step-00000001"):
        save(tmp_path, **{**state(1), **other})
    assert whole_step(tmp_path) == 1


def test_a_damaged_checkpoint_of_the_step_is_kept_under_another_name(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 1)
    (path / MODEL_FILE).write_bytes(b"damaged")
    save_steps(tmp_path, 1)
    assert whole_step(tmp_path) == 1
    (aside,) = (name for name in os.listdir(tmp_path) if name != path.name)
    assert aside.startswith("step-00000001.rejected-")
    assert (tmp_path / aside / MODEL_FILE).read_bytes() == b"damaged"


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, **state(step), keep=3)
    assert step_names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_step_that_is_there_already_cleans_up_like_one_that_was_written(before: Path) -> None:
    """The writer died after it had published the checkpoint, and before it deleted what was too much."""
    save_steps(before, NEW)
    assert len(os.listdir(before)) == len(OLD) + 1
    (remains := before / f".step-00000002.tmp-{'0' * 16}").mkdir()
    save(before, **state(NEW), keep=2)
    assert not remains.exists()
    assert step_names(before) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_fewer_than_two_cannot_be_kept(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=f"expected keep of at least 2, got {keep}"):
        save(tmp_path, **state(1), keep=keep)


def test_damaged_ones_do_not_count_among_the_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-00000003" / MODEL_FILE, -1)
    (tmp_path / "step-00000002" / OPTIMIZER_FILE).unlink()
    save(tmp_path, **state(4), keep=2)
    assert step_names(tmp_path) == [files.step_name(step) for step in (1, 2, 3, 4)]
    save(tmp_path, **state(5), keep=2)
    assert step_names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_cut_file_further_back_does_not_count_either(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    os.truncate(tmp_path / "step-00000002" / OPTIMIZER_FILE, 100)
    save(tmp_path, **state(4), keep=3)
    assert step_names(tmp_path) == [files.step_name(step) for step in (1, 2, 3, 4)]


def test_only_directories_with_our_manifest_are_pruned_and_no_link_is_followed(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    save_steps(elsewhere, 1)
    save_steps(runs, 3, 4)
    foreign = runs / "step-00000002"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"step": 2}')
    (runs / "step-00000001").symlink_to(elsewhere / "step-00000001", target_is_directory=True)
    save(runs, **state(5), keep=2)
    assert sorted(os.listdir(runs)) == [files.step_name(step) for step in (1, 2, 4, 5)]
    assert whole_step(elsewhere) == 1


def test_the_checkpoint_just_saved_is_never_pruned_for_newer_ones(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11, 12):
        save(tmp_path, **state(step), keep=9)
    save(tmp_path, **state(5), keep=2)
    assert [step for step, _ in files.step_directories(tmp_path)] == [12, 11, 10, 5, 2]


def test_pruning_reports_what_it_deleted(tmp_path: Path) -> None:
    paths = [save(tmp_path, **state(step), keep=9) for step in (1, 2, 3, 4)]
    assert prune(paths[-1], keep=2) == [paths[1], paths[0]]


def test_a_disk_that_returns_other_bytes_than_written_costs_no_old_checkpoint(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_and_rot(path: Path) -> load.Manifest:
        flip(path / MODEL_FILE, -1)
        return verify(path)

    monkeypatch.setattr(load, "verify", verify_and_rot)
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors: expected sha256"):
        save(before, **state(NEW), keep=2)
    monkeypatch.undo()
    assert whole_step(before) == OLD[-1]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
