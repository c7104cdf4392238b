"""What a stranger on the same machine has written is neither believed nor written over.

What belongs to a stranger is made by root here, which may give files away.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from instep.checkpoint import files, owner
from instep.checkpoint import load as loading
from instep.checkpoint.load import newest
from instep.checkpoint.shorthand import load, save
from instep.errors import CheckpointRejected
from instep.events import Timeline
from instep.record.jsonl import JsonLines, replace_text
from instep.ring_buffer import RingBuffer
from instep.shm import segment
from instep.timeline import style
from instep.timeline.chrome_trace import write_traces
from tests.checkpoint.states import save_steps
from tests.parity import filled

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
PRECIOUS = b'{"step": 1}\n'


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


def give_away(path: Path) -> None:
    for place in (path, *path.iterdir()):
        os.chown(place, STRANGER, STRANGER)


def draw(path: Path) -> None:
    matplotlib.use("agg")
    style.save(Figure(figsize=(1, 1)), path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: replace_text(path, "by the run"),
    "trace.json.gz": lambda path: write_traces(Timeline([]), path.parent, world_size=1),
    "picture.svg": draw,
    "picture.png": draw,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_made_anew_takes_the_place_of_a_link(tmp_path: Path, precious: Path, name: str) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.symlink_to(precious)
    WRITERS[name](path)
    assert precious.read_bytes() == PRECIOUS
    assert not path.is_symlink()


@pytest.mark.parametrize(
    "open_it",
    [lambda path: JsonLines(path, before_step=2), lambda path: RingBuffer(4, path)],
    ids=["lines", "ring"],
)
def test_what_is_gone_on_with_is_no_link(tmp_path: Path, precious: Path, open_it: Callable[[Path], object]):
    path = tmp_path / "link"
    path.symlink_to(precious)
    with pytest.raises(OSError, match=r"expected a file or nothing, got a link.*: remove it.*link"):
        open_it(path)
    assert precious.read_bytes() == PRECIOUS


def test_descriptors_of_others_things_are_no_memory(precious: Path) -> None:
    with precious.open("r+b") as file, pytest.raises(OSError, match="no memory of instep's"):
        segment.attach(os.getpid(), file.fileno())
    other = os.memfd_create("other")
    try:
        with pytest.raises(OSError, match="no memory of instep's"):
            segment.attach(os.getpid(), other)
    finally:
        os.close(other)


@needs_root
def test_memory_of_a_stranger_is_not_computed_in() -> None:
    memory = segment.create(4096)
    assert segment.attach(os.getpid(), memory.fd).inode == memory.inode
    os.fchown(memory.fd, STRANGER, STRANGER)
    with pytest.raises(OSError, match=f"is memory of user {STRANGER}"):
        segment.attach(os.getpid(), memory.fd)


@needs_root
def test_a_strangers_checkpoint_is_passed_over_for_ones_own(tmp_path: Path) -> None:
    own, strange = save_steps(tmp_path, 1, 2)
    give_away(strange)
    found = newest(tmp_path)
    assert found is not None and found.path == own
    ((path, reason),) = found.rejected
    assert path == strange
    assert "belongs to user" in reason and "if you trust it, make it yours by chown" in reason


@needs_root
@pytest.mark.parametrize(
    ("file", "said"), [(".", r"step-00000001"), ("model.safetensors", r"model\.safe\w+")]
)
def test_one_file_of_a_stranger_is_enough(tmp_path: Path, file: str, said: str) -> None:
    (path,) = save_steps(tmp_path, 1)
    os.chown(path / file, STRANGER, STRANGER)
    with pytest.raises(CheckpointRejected, match=rf"{said}: belongs to user .*, not to user root"):
        newest(tmp_path)


@pytest.mark.parametrize("file", [".", "model.safetensors", "manifest.json"])
def test_what_every_user_may_write_to_is_refused(tmp_path: Path, file: str) -> None:
    (path,) = save_steps(tmp_path, 1)
    (path / file).chmod(0o702)
    for published in (False, True):
        with pytest.raises(CheckpointRejected, match=r"every user may write to it: .* chmod -R go-w "):
            newest(tmp_path, published=published)


def test_what_a_group_may_write_to_is_refused_but_for_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = save_steps(tmp_path, 1)
    path.chmod(0o770)
    with monkeypatch.context() as patch:
        patch.setattr(owner, "_is_private", lambda group: False)
        with pytest.raises(CheckpointRejected, match=r"group \d+ may write to it"):
            newest(tmp_path)
        assert newest(tmp_path, published=True) is not None
    monkeypatch.setattr(owner, "_is_private", lambda group: True)
    assert newest(tmp_path) is not None


@needs_root
def test_published_weights_are_those_of_the_directory_that_was_named(tmp_path: Path) -> None:
    model = filled(nn.Linear(2, 2))
    path = save(tmp_path, step=3, model=model)
    give_away(path)
    with pytest.raises(CheckpointRejected, match="belongs to user"):  # somebody else's in a directory of mine
        load(tmp_path, model=nn.Linear(2, 2))
    os.chown(tmp_path, STRANGER, STRANGER)
    other = nn.Linear(2, 2)
    assert load(tmp_path, model=other).step == 3
    assert torch.equal(other.weight, model.weight)


@needs_root
def test_where_all_files_are_called_anothers_ones_own_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network disk that takes root for nobody, or without permissions."""
    (path,) = save_steps(tmp_path, 1)
    give_away(path)
    path.chmod(0o777)
    write = files.write_file

    def write_there(file: Path, data: bytes) -> None:
        write(file, data)
        os.chown(file, STRANGER, STRANGER)
        file.chmod(0o777)

    monkeypatch.setattr(files, "write_file", write_there)
    before = sorted(tmp_path.iterdir())
    assert newest(tmp_path) is not None
    assert sorted(tmp_path.iterdir()) == before


@needs_root
def test_a_strangers_checkpoints_do_not_count_among_those_to_keep(tmp_path: Path) -> None:
    paths = save_steps(tmp_path, 1, 2, 3)
    for path in paths[1:]:
        give_away(path)
    save_steps(tmp_path, 4)
    assert paths[0].exists()
    assert loading.verify(paths[0]).step == 1


@pytest.mark.parametrize(("flag", "code"), [(os.ST_RDONLY, errno.EROFS), (0, errno.EACCES)])
def test_where_nothing_can_be_written_what_is_there_needs_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, code: int
) -> None:
    """A run that resumed there ended as a wrong use, and of a read-only disk with "Permission denied"."""
    model = filled(nn.Linear(2, 2))
    save(tmp_path, step=1, model=model)
    monkeypatch.setattr(os, "access", lambda *args: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flag))
    assert save(tmp_path, step=1, model=model) == tmp_path / "step-00000001"
    with pytest.raises(OSError, match=str(tmp_path)) as failed:
        save(tmp_path, step=2, model=model)
    assert failed.value.errno == code
