"""The run directory: which run may claim it, and what is in it while the run goes on."""

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

from instep.mesh.peers import Peer, own_peer
from instep.recipes import text_config
from instep.recipes.text_config import Config, merge
from instep.run import folder
from instep.run.folder import CONFIG, SUMMARY, WORKERS, begin, claim, end, release
from instep.run.toml import load_toml


def config(run_dir: Path | None, *, resume: bool = False) -> Config:
    return replace(text_config.tiny(), run_dir=run_dir, resume=resume)


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
        alive = replace(own_peer(1), pid=pid, start_time=start_time(pid))
        path = a_run(tmp_path / "a", replace(own_peer(0), start_time=1), alive)
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
    peers = [own_peer(0), replace(own_peer(1), pid=7)]
    path = a_run(tmp_path / "a", *peers)
    assert merge(text_config.default(), load_toml(path / CONFIG), source="") == config(path)
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
