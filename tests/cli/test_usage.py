"""What cannot be done ends in exit code 2 with a line on stderr, before anything is started."""

import importlib
import sys

import pytest

from instep.cli.exit_codes import USAGE

# A command, its words, and how the one line on stderr goes on.
REFUSED = [
    ("bench", "collectives --sizes 1TB", "expected a size such as 512, 64KB, 1MiB or 1GB, got '1TB'"),
    ("bench", "collectives -n 4 1", "expected at least 2 ranks, got 1"),
    ("bench", "collectives --samples 1", "expected at least 2 samples, got 1"),
    ("bench", "collectives --rate 10mbit", "rate '10mbit' is that of a link, of which"),
    ("bench", "buckets --rate 10gbit", "rate '10gbit' is that of a link, of which"),
    ("bench", "buckets --sizes 1 -1", "expected positive bucket sizes in MiB"),
    ("bench", "buckets --params many", "expected a number such as 512, 64K or 1.5M, got 'many'"),
    ("bench", "data-parallel -n 1", "expected at least 2 ranks, got 1"),
    ("bench", "memory-savers --batch 0", "expected at least 1 window"),
    ("bench", "pipeline --schedules gpipe,2f2b", "expected a schedule of naive, gpipe, 1f1b, interleaved"),
    ("bench", "pipeline --layers 6", "6 blocks cannot be shared out alike among the 4 stages of interleaved"),
    ("bench", "pipeline --micro-batches 1,none", "expected a number such as 512, 64K or 1.5M, got 'none'"),
    ("bench", "pipeline --micro-size 0", "expected at least 1 window"),
    ("bench", "data-parallel --samples=-1", "expected --samples of at least 0"),
    ("run", "", "no script: expected a Python file, or -m and a module"),
    ("run", "-n 2", "no script: expected"),
    ("run", "-m", "no script: expected"),
    ("run", "absent.py", "absent.py is not there: expected a Python script"),
    ("run", "mine", "mine is a folder: expected a Python script"),
    ("run", "-m nowhere", "-m nowhere: expected a module"),
    ("run", "-m nowhere.fit", "-m nowhere.fit: No module named 'nowhere'"),
    ("run", "-m mine.absent", "-m mine.absent: expected a module"),
    ("run", "-n -1 train.py", "ranks: expected 0 or more, got -1"),
    ("run", "--checkpoint.keep 1 train.py", "checkpoint.keep: expected 2 or more, got 1"),
    ("show", "rign", "unknown algorithm 'rign': did you mean 'ring'?"),
    ("show", "xyz", "unknown algorithm 'xyz': expected one of naive, "),
    ("show", "ring -n 1", "expected 2 to 16 ranks, got 1"),
    ("show", "ring -n 17", "expected 2 to 16 ranks, got 17"),
    ("train", "--batch.global-size 30", "batch.global_size 30 is no multiple of batch.micro_size 4"),
    ("train", "-n 9", "9 ranks, but only 8 micro-batches"),
    ("train", "--model.preset huge", "command line: model.preset: expected a size among small"),
    ("train", "--config absent.toml", "absent.toml: no such file or directory"),
]
# What is no word of the command, and what stands among its lines on stderr.
MISTYPED = [
    ("bench", "colectives", ""),
    ("bench", "collectives --sise 1KB", "--sise"),
    ("bench", "buckets --samples many", "many"),
    ("doctor", "--jsno", "--json"),
    ("doctor", "--verify yes", "yes"),
    ("report", "r --stesp 3", "--steps"),
    ("report", "r --steps three", "three"),
    ("run", "--rank 2 train.py", "--ranks"),
    ("train", "--parallel.stratgy flat", "--parallel.strategy"),
    ("train", "--model.layer 3", "--model.layers"),
    ("train", "--parallel.strategy flatt", "bucketed"),
    ("train", "--steps many", "many"),
    ("train", "--steps", "--steps"),
    ("train", "--config", "--config"),
    ("train", "--model.preset", "--model.preset"),
    ("train", "train", "train"),
]


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Calls a command in a folder with a script and a package, and returns its code; it starts nothing."""
    for started in ("instep.launch.launch.warm", "instep.run.start.launch_script"):
        monkeypatch.setattr(started, lambda *_: pytest.fail("something was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()

    def call(command, words):
        try:
            return importlib.import_module(f"instep.cli.{command}").main(words.split())
        except SystemExit as end:
            return end.code

    yield call
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(("command", "words", "line"), REFUSED)
def test_what_cannot_be_done_is_one_line(command, words, line, ended, capsys):
    assert ended(command, words) == USAGE
    said = capsys.readouterr()
    assert said.err.startswith(f"instep {command}: error: {line}") and said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(("command", "words", "line"), MISTYPED)
def test_what_is_no_word_of_the_command_is_named(command, words, line, ended, capsys):
    assert ended(command, words) == USAGE
    said = capsys.readouterr()
    assert line in said.err and said.err and said.out == ""
