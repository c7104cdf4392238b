"""Finding the newest checkpoint that can be trusted, and saying why newer ones cannot."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from instep.checkpoint.load import newest, verify
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE
from instep.errors import CheckpointRejected
from tests.checkpoint.states import save_steps, vouch

FILES = [MODEL_FILE, OPTIMIZER_FILE, "manifest.json"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_steps(tmp_path, 1, 2)
    return tmp_path


def flip_last(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2] + bytes([path.read_bytes()[-2] ^ 1]) + path.read_bytes()[-1:])


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [Path.unlink, flip_last, cut, empty, link, directory], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(
    run: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damaged = run / "step-00000002" / file
    if (file, damage) == ("manifest.json", cut):
        damage(damaged)  # the first cut takes the newline at the end only
    damage(damaged)
    found = newest(run)
    assert found is not None
    assert found.path == run / "step-00000001"
    ((path, reason),) = found.rejected
    assert path == run / "step-00000002"
    assert str(damaged) in reason


def test_each_single_bit_flip_of_a_tensor_file_is_found(run: Path) -> None:
    path = run / "step-00000002" / MODEL_FILE
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointRejected, match=r"model\.safetensors: expected sha256"):
            verify(path.parent)


def test_a_cut_file_is_said_to_be_cut(run: Path) -> None:
    path = run / "step-00000002" / MODEL_FILE
    size = path.stat().st_size
    cut(path)
    with pytest.raises(
        CheckpointRejected, match=rf"model\.safetensors: expected {size} bytes, got {size - 1}"
    ):
        verify(path.parent)


def test_a_file_of_another_checkpoint_is_found_out(run: Path) -> None:
    (run / "step-00000002" / MODEL_FILE).write_bytes((run / "step-00000001" / MODEL_FILE).read_bytes())
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors: expected sha256"):
        verify(run / "step-00000002")


def test_a_file_more_is_ignored(run: Path) -> None:
    (run / "step-00000002" / "notes.txt").write_text("mine")
    assert newest(run) == newest(run)
    assert verify(run / "step-00000002").step == 2


def test_a_checkpoint_renamed_to_another_step_is_rejected_and_to_another_name_is_not(run: Path) -> None:
    (run / "step-00000001").rename(run / "step-00000003")
    with pytest.raises(CheckpointRejected, match="expected step 3 by its name, got 1"):
        verify(run / "step-00000003")
    (run / "step-00000003").rename(run / "best")
    assert verify(run / "best").step == 1


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None
    (tmp_path / "step-7").mkdir()
    assert newest(tmp_path) is None


def test_when_none_verifies_every_reason_is_given(run: Path) -> None:
    (run / "step-00000001" / MODEL_FILE).unlink()
    (run / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointRejected) as caught:
        newest(run)
    text = str(caught.value)
    assert "got 2 that do not" in text
    assert re.search(
        r"step-00000002/manifest\.json: cannot be read.*\n.*step-00000001/model\.safetensors", text
    )


def test_a_lying_header_behind_the_right_hash_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    path.mkdir()
    lie = (2**40).to_bytes(8, "little") + b"{}"
    (path / MODEL_FILE).write_bytes(lie)
    vouch(path)
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors: expected a header"):
        verify(path)


def test_a_manifest_from_elsewhere_cannot_name_files_elsewhere(run: Path) -> None:
    path = run / "step-00000002" / "manifest.json"
    body = json.loads(path.read_bytes())
    body["files"]["../step-00000001/model.safetensors"] = body["files"].pop(MODEL_FILE)
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointRejected, match=r"manifest\.json"):
        verify(path.parent)
