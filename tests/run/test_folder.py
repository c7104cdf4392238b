"""The run directory: which run may claim it, and what is in it while the run goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from instep.net.peers import Peer, own_peer
from instep.recipes import text_config
from instep.recipes.text_config import Config, merge
from instep.record.directory import CHECKPOINTS, CONFIG, RECORD, WORKERS
from instep.record.step_lines import STARTED
from instep.regular_files import try_lock
from instep.run import folder
from instep.run.folder import LOCK, Claimed, begin
from instep.run.toml import load_toml, to_toml


def config(run_dir: Path | None, *, resume: bool = False) -> Config:
    return replace(text_config.tiny(), run_dir=run_dir, resume=resume)


def a_run(path: Path, *workers: Peer) -> Path:
    """A directory that a run has begun in."""
    path.mkdir(parents=True)
    begin(path, to_toml(config(path)), workers)
    return path


def claim(config: Config) -> Claimed:
    return folder.claim(config.run_dir, config.resume)


def claimed(config: Config) -> Path:
    """Where it may be, after a command that has claimed it and ended."""
    with claim(config) as held:
        return held.path


def tree(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@contextmanager
def another_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with process:
        yield process.pid
        process.send_signal(signal.SIGKILL)


def test_a_new_directory_is_made_with_those_above_it(tmp_path):
    path = tmp_path / "runs" / "a"
    with claim(config(path)) as held:
        assert held.path == path
        assert [file.name for file in path.iterdir()] == [LOCK]
    assert not path.exists()  # the run never began
    for resume in (False, True):  # empty, or of a run that was stopped before it began
        path.mkdir()
        assert claimed(config(path, resume=resume)) == path


@pytest.mark.parametrize(
    ("holds", "path", "resume", "message"),
    [
        (CONFIG, "", False, "has another run: pass --resume to resume it"),
        ("thesis.tex", "", False, "has other files: pass"),
        ("thesis.tex", "", True, "has other files and no run to resume"),
        ("", "typo", True, "does not exist, so there is no run to resume"),
        ("", os.fsdecode(b"a\xffb"), False, r"a\udcffb is not valid UTF-8: pass another --run-dir"),
        ("file", "file", False, "is a file, expected a directory"),
        ("file", "file/run", False, "cannot be made (Not a directory)"),
        ("", "/proc/nope", False, "run directory /proc/nope cannot be made"),
        ("", "gone", False, "is a link to nothing, expected a directory"),
    ],
)
def test_what_cannot_be_claimed_is_refused_and_left_as_it_was(tmp_path, holds, path, resume, message):
    if holds:
        (tmp_path / holds).write_text("precious")
    if path == "gone":
        (tmp_path / path).symlink_to("unmounted")
    before = tree(tmp_path)
    with pytest.raises((ValueError, PermissionError), match=re.escape(message)):
        claimed(config(tmp_path / path, resume=resume))
    assert tree(tmp_path) == before and not (tmp_path / "typo").exists()


def test_without_a_name_every_run_has_a_new_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "train-now")
    with claim(config(None)) as a, claim(config(None)) as b, claim(config(None)) as c:
        paths = [held.path for held in (a, b, c)]
    assert paths == [Path("runs", name) for name in ("train-now", "train-now-2", "train-now-3")]


def test_a_run_is_resumed_in_the_directory_that_it_has(tmp_path):
    path = a_run(tmp_path / "a")
    before = tree(path)
    with claim(config(path, resume=True)) as held:
        (path / LOCK).rename(tmp_path / LOCK)
        assert held.path == path and tree(path) == before


@pytest.mark.parametrize(
    ("start", "step", "saved"), [(0, None, 0), (0, 0, 0), (0, None, 5), (5, None, 0)], ids=str
)
def test_only_a_run_that_never_made_a_step_is_begun_again(start, step, saved, tmp_path):
    """A script with a mistake in its first step blocked its own run directory."""
    path = a_run(tmp_path / "a")
    (path / "mine.txt").write_text("precious")
    (path / CHECKPOINTS / f"step-{saved:08}").mkdir(parents=True)
    lines = [{"event": STARTED, "step": start, "fingerprint": "", "numerical": {}}]
    lines += [{"step": step}] if step is not None else []
    (path / RECORD).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    before = tree(path)
    if (start, step, saved) == (0, None, 0):
        with claim(config(path)):
            assert tree(path).keys() == {str(path / name) for name in ("mine.txt", LOCK, WORKERS)}
            assert not any((path / CHECKPOINTS).iterdir())
    else:
        with pytest.raises(ValueError, match="has another run: pass --resume"):
            claimed(config(path))
        assert tree(path) == before


def test_to_resume_one_must_say_where_and_the_newest_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^--resume needs --run-dir: which run shall go on\?$"):
        claimed(config(None, resume=True))
    for age, name in enumerate(["train-2", "train-1"]):
        os.utime(a_run(tmp_path / "runs" / name) / CONFIG, (100 - age, 100 - age))
    with pytest.raises(ValueError, match=r"go on\? The newest is --run-dir runs/train-2$"):
        claimed(config(None, resume=True))


def test_a_run_that_is_still_going_on_is_not_resumed(tmp_path):
    with another_process() as pid:
        alive = replace(own_peer(1), pid=pid, start_time=start_time(pid))
        path = a_run(tmp_path / "a", replace(own_peer(0), start_time=1), alive)
        with pytest.raises(ValueError, match=rf"still alive, rank 1 \(pid {pid}\): wait for them"):
            claimed(config(path, resume=True))
        assert sorted(file.name for file in path.iterdir()) == [CONFIG, WORKERS]
    assert claimed(config(path, resume=True)) == path


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"0": {"who": 1}}', '{"0": 3}'])
def test_workers_that_cannot_be_read_do_not_keep_a_run_from_going_on(tmp_path, text):
    path = a_run(tmp_path / "a")
    (path / WORKERS).write_text(text)
    assert claimed(config(path, resume=True)) == path


def test_a_run_s_config_and_workers_are_on_disk_while_it_goes_on(tmp_path):
    peers = [own_peer(0), replace(own_peer(1), pid=7)]
    path = a_run(tmp_path / "a", *peers)
    assert merge(text_config.default(), load_toml(path / CONFIG), source="") == config(path)
    workers = json.loads((path / WORKERS).read_text())
    assert workers == {"0": asdict(peers[0]), "1": asdict(peers[1])}
    (path / WORKERS).write_text("{}")
    claimed(config(path, resume=True))
    assert sorted(file.name for file in path.iterdir()) == [CONFIG]


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_another_command_works_in_is_refused_with_its_process_and_host(tmp_path, resume):
    path = tmp_path / "a"
    with claim(config(path)):
        begin(path, to_toml(config(path)), [])
        before = tree(path)
        here = f"pid {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(ValueError, match=re.escape(f"{path}: directory in use by {here}")):
            claimed(config(path, resume=resume))
        assert tree(path) == before
    assert claimed(config(path, resume=True)) == path


HOLD = """
import os, sys
from pathlib import Path
from instep.regular_files import open_regular, try_lock
assert try_lock(open_regular(Path(sys.argv[1], "run.lock"), os.O_RDWR | os.O_CREAT))
print(flush=True)
sys.stdin.read()
"""


def test_a_lock_goes_with_a_holder_that_was_killed_and_what_it_said_does_not_count(tmp_path):
    a_run(tmp_path / "a")
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        with pytest.raises(ValueError, match="directory in use by another process"):
            claimed(config(tmp_path / "a", resume=True))
        process.kill()
    (tmp_path / "a" / LOCK).write_bytes(own_peer(0).to_bytes())  # of a process that lives, and holds no lock
    assert claimed(config(tmp_path / "a", resume=True)) == tmp_path / "a"


def test_a_lock_that_was_released_between_opening_and_locking_it_is_taken_anew(tmp_path, monkeypatch):
    gone = []

    def released_meanwhile(fd):
        if not gone:
            (tmp_path / LOCK).unlink()
        gone.append(fd)
        return try_lock(fd)

    monkeypatch.setattr(folder, "try_lock", released_meanwhile)
    with claim(config(tmp_path)):
        assert (tmp_path / LOCK).exists() and len(gone) == 2


def test_without_locks_one_is_told_and_a_holder_that_can_be_seen_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "try_lock", lambda fd: None)
    said: list[str] = []
    monkeypatch.setattr(folder, "say", said.append)
    with claim(config(tmp_path)):
        assert said == [
            f"{tmp_path}: this file system has no locks: do not start another command in this directory "
            "meanwhile"
        ]
        with pytest.raises(ValueError, match=f"directory in use by pid {os.getpid()}"):
            claim(config(tmp_path))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_what_lies_in_the_place_of_the_lock_and_is_no_file_is_named(tmp_path, make):
    make(tmp_path / LOCK)
    with pytest.raises(OSError, match=LOCK):
        claimed(config(tmp_path))


def test_a_directory_that_was_removed_or_replaced_is_noticed_and_left_alone(tmp_path):
    path = tmp_path / "a"
    with claim(config(path)) as held:
        held.require_in_place()
        path.rename(tmp_path / "b")
        with pytest.raises(OSError, match="removed or replaced while it was in use"):
            held.require_in_place()
        path.mkdir(parents=True)
        with pytest.raises(OSError, match="removed or replaced"):
            held.require_in_place()
    assert path.exists()  # it is another command's


def test_a_link_to_a_directory_is_claimed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with claim(config(tmp_path / "link")) as held:
        assert held.path == tmp_path / "link" and (tmp_path / "disk" / LOCK).exists()
        with pytest.raises(ValueError, match="directory in use by"):
            claimed(config(tmp_path / "disk"))


def test_a_directory_that_cannot_be_opened_or_locked_leaves_no_descriptor(tmp_path, monkeypatch):
    before = os.listdir("/proc/self/fd")
    for name in ("_lock", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(folder if name == "_lock" else os, name, lambda *args, **options: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                Claimed(tmp_path)
    assert os.listdir("/proc/self/fd") == before
