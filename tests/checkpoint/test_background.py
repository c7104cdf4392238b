"""Saving in the background: of the moment at which it was asked for, one at a time, with every error told."""

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

from instep.checkpoint import background, load
from instep.checkpoint import save as saving
from instep.checkpoint.background import Saver
from instep.checkpoint.save import MODEL_FILE
from instep.errors import PeerLost
from instep.net.peers import own_peer
from instep.net.process_group import Group
from tests.checkpoint.disk import Disk, Killed
from tests.checkpoint.nets import made, train
from tests.checkpoint.states import (
    OPTIONS,
    all_bits,
    bits,
    drafted,
    layout_of,
    read_tensors,
    save_steps,
    state,
    whole_step,
)
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state


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


def test_the_state_hash_is_that_of_the_copy(tmp_path: Path, gate: threading.Event) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(2))
    now = state_sha256(state_entries(model, optimizer), 2)
    _, draft = drafted(**state(2))
    saver = Saver()
    saver.save(tmp_path, training_state(model, optimizer), draft)
    train(model, optimizer, range(2, 4))
    gate.set()
    saver.close()
    assert saver.last is not None
    assert load.verify(saver.last).state_sha256 == now
    assert load.tensors.contents(saver.last / MODEL_FILE).ties == {"second.weight": "first.weight"}


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
    saver.close()
    assert seen[0] == seen[1] == seen[2]
    assert {address % 64 for address in seen[0]} == {0}
    assert whole_step(tmp_path) == 3


def test_copies_have_the_bits_of_what_was_given_whatever_its_strides(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    model = {"a": shared, "tied": shared, "t": torch.randn(3, 4).t(), "empty": torch.empty(0, 2)}
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


def test_a_step_that_is_there_with_another_state_is_told_by_the_call(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    saver = Saver()
    with pytest.raises(FileExistsError, match=r"exists already .*step-00000001"):
        saver.save(tmp_path, *drafted(**{**state(1), "data_cursor": 9}))
    saver.close()
    assert saver.last is None


def test_a_step_that_is_there_with_this_state_counts_as_saved(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 1)
    written = (path / "manifest.json").stat().st_mtime_ns
    saver = Saver()
    saver.save(tmp_path, *drafted(**state(1)))
    assert saver.last == path  # nothing is in flight
    assert (path / "manifest.json").stat().st_mtime_ns == written
    saver.close()


def test_an_error_without_a_system_code_gets_the_step_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(shards: Any, beat: Any) -> bytes:
        raise ValueError("no hash today")

    monkeypatch.setattr(saving, "own_digests", broken)
    saver = Saver()
    saver.save(tmp_path, *drafted(**state(1)))
    with pytest.raises(ValueError, match="saving step 1 in the background: no hash today"):
        saver.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"keep": 1}, "expected keep of at least 2"),
        ({"step": -1}, "step: expected"),
        ({"extra": {"x": object()}}, r"extra\.x: expected"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, "w: expected a dense tensor"),
    ],
)
def test_a_mistake_in_the_call_is_raised_by_the_call(
    tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    saver = Saver()
    given = {**state(1), **change}
    keep = given.pop("keep", 3)
    with pytest.raises(ValueError, match=error):
        saver.save(tmp_path, *drafted(**given), keep)
    saver.close()
    assert os.listdir(tmp_path) == []


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


def test_a_save_begun_before_ranks_met_anew_and_one_begun_since_both_count(
    tmp_path: Path, gate: threading.Event
) -> None:
    # A rank was added after step 1, whose save went on; the new ranks saw no checkpoint, and saved it too.
    savers = Saver(), Saver()
    for saver in savers:
        saver.save(tmp_path, *drafted(**state(1)))
    gate.set()
    for saver in savers:
        saver.close(30)
        assert saver.last == tmp_path / "step-00000001"
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_save_that_another_state_has_forestalled_is_refused(tmp_path: Path, gate: threading.Event) -> None:
    first, second = Saver(), Saver()
    first.save(tmp_path, *drafted(**state(1)))
    second.save(tmp_path, *drafted(**{**state(1), "data_cursor": 9}))
    gate.set()
    failed = 0
    for saver in (first, second):
        try:
            saver.close(30)
        except FileExistsError:
            failed += 1
    assert failed == 1


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


def test_the_wait_for_the_save_before_beats_while_that_goes_on(tmp_path: Path, gate: threading.Event) -> None:
    """A disk may need minutes for it; and a thread that hangs must not look as if it went on."""
    beats: list[int] = []
    flight = background._Flight(tmp_path, 1, lambda own: _beat_twice(own, gate))
    flight.start()
    while flight.beats < 1:
        os.sched_yield()
    assert not flight.wait(0.01, lambda: beats.append(1))
    assert beats == []  # nothing has happened meanwhile
    gate.set()
    assert flight.wait(30, lambda: beats.append(1))
    assert beats == [1]


def _beat_twice(flight: background._Flight, gate: threading.Event) -> Path:
    flight.beat()
    gate.wait()
    flight.beat()
    return Path()


def test_a_kill_at_any_operation_of_the_thread_leaves_a_whole_state(tmp_path: Path) -> None:
    counting = tmp_path / "counting"
    save_steps(counting, 1, 2)
    with Disk(counting).mounted() as counted:
        saver = Saver()
        saver.save(counting, *drafted(**state(3)), keep=2)
        saver.close()
    for number in range(0, len(counted.story), 3):
        copy = tmp_path / str(number)
        save_steps(copy, 1, 2)
        saver, live = Saver(), state(3)
        with Disk(copy, fail_at=number, killed=True).mounted():
            saver.save(copy, *drafted(**live), keep=2)
            live["model"]["weight"].fill_(99.0)
            with pytest.raises(Killed):
                saver.close()
        assert whole_step(copy) in (2, 3)
        saver.save(copy, *drafted(**state(3)), keep=2)
        saver.close()
        assert sorted(os.listdir(copy)) == ["step-00000002", "step-00000003"]


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


def test_at_exit_an_error_that_nobody_asked_for_is_said(
    tmp_path: Path,
    at_exit: list[tuple[Any, float]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "write", full)
    saver = Saver()
    saver.save(tmp_path, *drafted(**state(1)))
    landed(saver)
    monkeypatch.undo()
    ((leave, grace_s),) = at_exit
    leave(grace_s)
    assert "the save of step 1: " in (said := capsys.readouterr().err)
    assert "No space left on device" in said


def test_the_thread_is_one_that_an_ending_interpreter_does_not_wait_for(
    tmp_path: Path, gate: threading.Event
) -> None:
    saver = Saver()
    saver.save(tmp_path, *drafted(**state(1)))
    (thread,) = [t for t in threading.enumerate() if t.name == "saving step 1"]
    assert thread.daemon
    gate.set()
    saver.close()
    assert not thread.is_alive()


def test_bits_of_a_copy_do_not_pass_through_another_dtype(tmp_path: Path) -> None:
    odd = {"nan": torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32), "b": torch.tensor(True)}
    saver = Saver()
    saver.save(tmp_path, *drafted(**{**state(1), "model": odd}))
    saver.close()
    assert saver.last is not None
    read = read_tensors(saver.last, MODEL_FILE, layout_of(odd))
    assert [bits(read[name]) for name in odd] == [bits(odd[name]) for name in odd]
