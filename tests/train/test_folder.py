"""The run directory: who may claim it, and what of its records survives a run that was torn off."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from instep.mesh.peers import Peer, myself
from instep.train import folder, recipes
from instep.train.config import Config
from instep.train.folder import (
    CONFIG,
    SUMMARY,
    WORKERS,
    Lines,
    begin,
    claim,
    end,
    read_lines,
    release,
)
from instep.train.ledger import LEDGER
from instep.train.toml import load_toml, merge


def config(run_dir: Path | None, *, resume: bool = False) -> Config:
    return replace(recipes.tiny(), run_dir=run_dir, resume=resume)


def a_run(path: Path, *workers: Peer) -> Path:
    """A directory that a run has begun in."""
    path.mkdir()
    begin(path, config(path), workers)
    return path


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
    assert claim(config(path)) == path
    assert list(path.iterdir()) == []


def test_an_empty_directory_is_taken(tmp_path):
    assert claim(config(tmp_path)) == tmp_path


def test_without_a_name_every_run_has_a_new_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "train-now")
    claimed = [claim(config(None)) for _ in range(3)]
    assert claimed == [Path("runs", name) for name in ("train-now", "train-now-2", "train-now-3")]


@pytest.mark.parametrize(
    ("name", "message"),
    [(CONFIG, "holds another run: pass --resume to continue it"), ("thesis.tex", "holds other files: pass")],
)
def test_a_directory_that_holds_something_is_refused_and_left_as_it_was(tmp_path, name, message):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path} {message}')}"):
        claim(config(tmp_path))
    assert tree(tmp_path) == {str(tmp_path / name): b"precious"}


def test_a_run_is_resumed_in_the_directory_that_it_has(tmp_path):
    path = a_run(tmp_path / "a")
    before = tree(path)
    assert claim(config(path, resume=True)) == path
    assert tree(path) == before


def test_to_resume_one_must_say_where():
    with pytest.raises(ValueError, match=r"^--resume needs --run-dir"):
        claim(config(None, resume=True))


def test_a_mistyped_directory_is_not_resumed_from_the_beginning(tmp_path):
    with pytest.raises(ValueError, match="does not exist, so there is no run to resume"):
        claim(config(tmp_path / "typo", resume=True))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_other_files_is_not_resumed_into(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other files and no run to resume"):
        claim(config(tmp_path, resume=True))


def test_a_run_that_was_stopped_before_it_began_is_resumed(tmp_path):
    assert claim(config(tmp_path, resume=True)) == tmp_path


def test_a_run_that_is_still_going_on_is_not_resumed(tmp_path):
    with another_process() as pid:
        alive = replace(myself(1), pid=pid, start_time=start_time(pid))
        path = a_run(tmp_path / "a", replace(myself(0), start_time=1), alive)
        with pytest.raises(ValueError, match=rf"still going on in rank 1 \(pid {pid}\): wait for it"):
            claim(config(path, resume=True))
    assert claim(config(path, resume=True)) == path


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"0": {"who": 1}}', '{"0": 3}'])
def test_workers_that_cannot_be_read_do_not_keep_a_run_from_going_on(tmp_path, text):
    path = a_run(tmp_path / "a")
    (path / WORKERS).write_text(text)
    assert claim(config(path, resume=True)) == path


@pytest.mark.parametrize(
    ("below", "message"),
    [("file", "is a file, expected a directory"), ("file/run", r"cannot be made \(Not a directory\)")],
)
def test_a_path_that_cannot_be_a_directory_is_refused_by_name(tmp_path, below, message):
    (tmp_path / "file").write_text("precious")
    with pytest.raises((ValueError, PermissionError), match=f"{re.escape(str(tmp_path / below))} {message}"):
        claim(config(tmp_path / below))
    assert tree(tmp_path) == {str(tmp_path / "file"): b"precious"}


def test_a_system_that_makes_no_directories_is_named():
    with pytest.raises(PermissionError, match=r"run directory /proc/nope cannot be made .*: pass another"):
        claim(config(Path("/proc/nope")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot be written to"):
        claim(config(tmp_path))


def test_a_run_s_config_and_workers_are_on_disk_while_it_goes_on(tmp_path):
    peers = [myself(0), replace(myself(1), pid=7)]
    path = a_run(tmp_path / "a", *peers)
    assert merge(recipes.default(), load_toml(path / CONFIG), source="") == config(path)
    workers = json.loads((path / WORKERS).read_text())
    assert workers == {"0": asdict(peers[0]), "1": asdict(peers[1])}
    release(path)
    assert sorted(file.name for file in path.iterdir()) == [CONFIG]


def test_a_run_that_never_began_leaves_no_directory(tmp_path):
    path = claim(config(tmp_path / "a"))
    release(path)
    assert not path.exists()
    release(path)


def test_no_figure_of_an_earlier_part_stays(tmp_path):
    for figures in ({"steps": 8, "speed": 5.0, "gone": 1}, {"steps": 9, "speed": None}):
        end(tmp_path, figures)
        assert json.loads((tmp_path / SUMMARY).read_text()) == figures


def written(path: Path, *steps: int) -> Path:
    lines = Lines(path, until_step=0)
    for step in steps:
        lines.write(step=step, loss=0.5)
    lines.close()
    return path


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_lines_are_read_back(tmp_path):
    path = written(tmp_path / LEDGER, 1, 2)
    assert read_lines(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]
    assert read_lines(tmp_path / "none") == []


def test_a_line_is_on_disk_before_the_next_is_written(tmp_path):
    lines = Lines(tmp_path / LEDGER, until_step=0)
    lines.write(step=1)
    assert steps_in(tmp_path / LEDGER) == [1]
    lines.close()


@pytest.mark.parametrize(
    "torn", [b"{", b'{"step"', b'{"step": 3, "loss": 0.', b"\0\0\0\n", b'{"step\xff\xfe']
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = written(tmp_path / LEDGER, 1, 2, 3)
    whole = path.read_text()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole.removesuffix(last).encode() + torn)
    assert steps_in(path) == [1, 2]
    resumed = Lines(path, until_step=2)
    resumed.write(step=3, loss=0.5)
    resumed.close()
    assert path.read_text() == whole


def test_a_last_line_that_only_lacks_its_end_is_kept_and_ended(tmp_path):
    path = written(tmp_path / LEDGER, 1, 2)
    path.write_text(path.read_text().removesuffix("\n"))
    resumed = Lines(path, until_step=2)
    resumed.write(step=3)
    resumed.close()
    assert steps_in(path) == [1, 2, 3]


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = written(tmp_path / LEDGER, 0, 1, 2, 3, 4)
    resumed = Lines(path, until_step=2)
    resumed.write(step=3)
    resumed.close()
    assert steps_in(path) == [0, 1, 2, 3]
