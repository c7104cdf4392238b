"""Saving, at once and in the background: the newest checkpoint that verifies is the old or the new one."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from instep.checkpoint import background, files, load
from instep.checkpoint import save as saving
from instep.checkpoint.background import Saver
from instep.checkpoint.load import verify
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE
from instep.errors import CheckpointRejected, PeerLost
from instep.net.peers import own_peer
from instep.net.process_group import Group
from tests.checkpoint.disk import Killed
from tests.checkpoint.states import (
    OPTIONS,
    all_bits,
    drafted,
    layout_of,
    read_tensors,
    save,
    save_steps,
    state,
    whole_step,
)

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


def in_the_background(directory: Path, **arguments: Any) -> Path:
    saver = Saver()
    saver.save(directory, *drafted(**arguments))
    saver.close()
    assert saver.last is not None
    return saver.last


WAYS = pytest.mark.parametrize("save", [save, in_the_background])


@WAYS
def test_the_same_state_at_the_same_step_counts_as_saved(tmp_path: Path, save: Callable[..., Path]) -> None:
    (path,) = save_steps(tmp_path, 1)
    written = (path / "manifest.json").stat().st_mtime_ns
    assert save(tmp_path, **{**state(1), "world_size": 64}) == path
    assert os.listdir(tmp_path) == [path.name]
    assert (path / "manifest.json").stat().st_mtime_ns == written


@WAYS
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
def test_another_state_at_a_saved_step_is_refused(
    tmp_path: Path, other: dict[str, Any], save: Callable[..., Path]
) -> None:
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


def test_a_step_that_is_there_already_cleans_up_like_one_that_was_written(before: Path) -> None:
    """The writer died after it had published the checkpoint, and before it deleted what was too much."""
    save_steps(before, NEW)
    assert len(os.listdir(before)) == len(OLD) + 1
    (remains := before / f".step-00000002.tmp-{'0' * 16}").mkdir()
    save(before, **state(NEW), keep=2)
    assert not remains.exists()
    assert step_names(before) == ["step-00000002", "step-00000003"]


def test_damaged_ones_do_not_count_among_the_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-00000003" / MODEL_FILE, -1)
    (tmp_path / "step-00000002" / OPTIMIZER_FILE).write_bytes(b"cut off")
    save(tmp_path, **state(4), keep=2)
    assert step_names(tmp_path) == [files.step_name(step) for step in (1, 2, 3, 4)]
    save(tmp_path, **state(5), keep=2)
    assert step_names(tmp_path) == ["step-00000004", "step-00000005"]


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


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No save writes anything before this is set."""
    opened, write = threading.Event(), saving.write

    def write_later(*args: Any) -> Path:
        assert opened.wait(30)
        return write(*args)

    monkeypatch.setattr(saving, "write", write_later)
    yield opened
    opened.set()


def test_what_changes_after_save_returned_is_not_in_the_checkpoint(
    tmp_path: Path, gate: threading.Event
) -> None:
    live, saver, extra = state(7), Saver(), {"list": [1]}
    saver.save(tmp_path, *drafted(**live, extra=extra))
    for tensor in (*live["model"].values(), *live["optimizer"].values()):
        tensor.fill_(99.0)
    live["numerical"]["optim.lr"] = 2.0
    extra["list"].append(2)
    gate.set()
    saver.close()
    assert whole_step(tmp_path) == 7
    assert saver.last == tmp_path / "step-00000007"
    assert load.verify(saver.last).extra == {"list": [1], "optimizer": OPTIONS}


def test_a_directory_that_was_removed_since_does_not_come_back(tmp_path: Path, gate: threading.Event) -> None:
    run = tmp_path / "run"
    saver = Saver()
    saver.save(run / "checkpoints", *drafted(**state(7)))
    shutil.rmtree(run)
    gate.set()
    with pytest.raises(FileNotFoundError, match="saving step 7 in the background"):
        saver.close()
    assert not run.exists()


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    saver = Saver()
    saver.save(tmp_path, *drafted(**state(1)))
    timer, land = threading.Timer(0.2, gate.set), saver._land
    with patch.object(saver, "_land", lambda timeout_s: (timer.start(), land(timeout_s))):
        saver.save(tmp_path, *drafted(**state(2)))
    timer.join()
    assert whole_step(tmp_path) >= 1  # the first is whole before the second begins
    saver.close()
    assert whole_step(tmp_path) == 2


def test_saves_one_after_the_other_use_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, write = [], saving.write

    def look(directory: Path, draft: Any, plan: Any, keep: int, wait: Any) -> Path:
        seen.append([shard.tensor.data_ptr() for shard in plan.shards])
        return write(directory, draft, plan, keep, wait)

    monkeypatch.setattr(saving, "write", look)
    saver = Saver()
    for step in (1, 2, 3):
        saver.save(tmp_path, *drafted(**state(step)))
    larger = {"weight": torch.randn(1 << 12)}
    saver.save(tmp_path, *drafted(**{**state(4), "model": larger}))
    saver.close()
    assert seen[0] == seen[1] == seen[2]
    assert {address % 64 for address in seen[0]} == {0}
    assert saver.last is not None and all_bits(read_tensors(saver.last, MODEL_FILE)) == all_bits(larger)


def test_copies_have_the_bits_of_what_was_given_whatever_its_strides(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    odd = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)  # a nan with a payload
    model = {"a": shared, "tied": shared, "t": torch.randn(3, 4).t(), "empty": torch.empty(0, 2), "nan": odd}
    saver = Saver()
    saver.save(tmp_path, *drafted(**{**state(1), "model": model}))
    saver.close()
    assert saver.last is not None
    read = read_tensors(saver.last, MODEL_FILE, layout_of(model))
    assert all_bits(read) == all_bits(model)
    assert read["a"] is read["tied"]


CALLS: dict[str, Callable[[Saver, Path], object]] = {
    "check": lambda saver, _: saver.check(),
    "save": lambda saver, path: saver.save(path, *drafted(**state(4))),
    "close": lambda saver, _: saver.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_comes_out_of_the_next_call_with_the_step_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save_steps(tmp_path, 1, 2)
    saver = Saver()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        saver.save(tmp_path, *drafted(**state(3)))
        landed(saver)
    with pytest.raises(OSError, match=r"No space left on device, saving step 3 .*manifest\.json") as caught:
        CALLS[call](saver, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    saver.check()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    saver.save(tmp_path, *drafted(**state(4)))
    saver.close()
    assert whole_step(tmp_path) == 4


def full(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def landed(saver: Saver) -> None:
    """Wait until the save in flight has ended, without hearing how."""
    assert saver._flight is not None
    assert saver._flight.wait(30)


def test_closing_waits_no_longer_than_told_and_can_be_tried_again(
    tmp_path: Path, gate: threading.Event
) -> None:
    saver = Saver(timeout_s=0.01)
    saver.save(tmp_path, *drafted(**state(1)))
    saver.check()  # has not ended: nothing to tell
    for call in (saver.close, lambda: saver.save(tmp_path, *drafted(**state(2)))):
        with pytest.raises(TimeoutError, match=r"expected the save of step 1 to end within 0\.01 s"):
            call()
    gate.set()
    saver.close(30)
    saver.close()
    assert whole_step(tmp_path) == 1


def test_a_rank_that_is_gone_ends_the_wait_for_its_part_at_once(tmp_path: Path) -> None:
    # Killed in the summary with a divided state, it was waited for until the deadline, and the disk blamed.
    table = own_peer(0), own_peer(1)
    group = SimpleNamespace(size=2, peers=SimpleNamespace(table=table, dead=lambda: [1]))
    saver, over = Saver(timeout_s=30), threading.Event()

    def write(flight: background._Flight) -> Path:
        assert over.wait(60)
        return tmp_path

    saver._start(background._Flight(tmp_path, 24, write, cast(Group, group)))
    try:
        with pytest.raises(PeerLost, match=r"rank 1 \(pid .* died before its part of the save of step 24"):
            saver.close()
    finally:
        over.set()
    saver.close()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, float]]:
    """What would be called at the exit of the interpreter; the process ends by raising ``Killed``."""
    registered: list[tuple[Any, float]] = []

    def end(code: int) -> None:
        assert code == 1
        raise Killed

    monkeypatch.setattr(background.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(background.os, "_exit", end)
    return registered


def test_at_exit_what_is_in_flight_may_end_and_what_hangs_is_left(
    tmp_path: Path,
    gate: threading.Event,
    at_exit: list[tuple[Any, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    saver = Saver()
    saver.save(tmp_path, *drafted(**state(1)))
    ((leave, grace_s),) = at_exit
    with pytest.raises(Killed):
        leave(0.01)
    assert capsys.readouterr().err == f"{tmp_path}: the save of step 1: still writes after 0.01 s\n"
    gate.set()
    leave(grace_s)
    assert whole_step(tmp_path) == 1
    assert capsys.readouterr().err == ""
    saver.close()
