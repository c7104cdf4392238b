"""What ``instep bench`` makes of its arguments, and how it ends."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from instep.bench.options import Buckets, Collectives, Steps
from instep.cli import bench
from instep.cli.bench import MODULES, main, parse
from instep.cli.exits import DONE, FAILED, USAGE
from instep.errors import PeerLost
from tests.cli.quick import assert_quick

COMMANDS = ("collectives", "steps", "buckets")
FLAGS = [
    ("collectives", Collectives()),
    ("collectives -n 3", Collectives(ranks=(3,))),
    ("collectives --ranks 2 4", Collectives(ranks=(2, 4))),
    ("collectives --sizes 1KB,1MB", Collectives(sizes=("1KB,1MB",))),
    ("collectives --collective all_to_all --full", Collectives(collective="all_to_all", full=True)),
    ("collectives --backends gloo,shm --samples 5", Collectives(backends=("gloo,shm",), samples=5)),
    (
        "collectives --json a --csv b --chart c.svg",
        Collectives(json=Path("a"), csv=Path("b"), chart=Path("c.svg")),
    ),
    ("steps", Steps()),
    ("steps -n 3 --setting compute --samples 4", Steps(ranks=3, setting="compute", samples=4)),
    ("steps --strategies naive,flat --link", Steps(strategies=("naive,flat",), link=True)),
    ("buckets", Buckets()),
    ("buckets -n 3 --sizes 1 2.5", Buckets(ranks=3, sizes=(1.0, 2.5))),
    ("buckets --params 10M --no-ordered --backend shm", Buckets(params="10M", ordered=False, backend="shm")),
]


@pytest.fixture
def runs(monkeypatch):
    """The options that were run, in place of running them; ``runs.ends_with`` is what the run raises."""

    class Runs(list):
        ends_with = None

    runs = Runs()

    def run(options):
        runs.append(options)
        if runs.ends_with is not None:
            raise runs.ends_with

    for name in MODULES.values():
        module = ModuleType(name)
        module.run = run
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("instep.mesh.launch.warm", lambda: None)
    return runs


@pytest.mark.parametrize(("words", "options"), FLAGS, ids=[words for words, _ in FLAGS])
def test_flags_become_options(words, options, runs):
    assert parse(words.split()) == options
    assert main(words.split()) == DONE
    assert runs == [options]


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no"), USAGE), (PeerLost("gone", operation="x"), FAILED)]
)
def test_an_error_becomes_a_line_and_a_code(error, code, runs, capsys):
    runs.ends_with = error
    assert main(["collectives"]) == code
    assert capsys.readouterr().err == f"instep bench: error: {error}\n"


@pytest.mark.parametrize("words", ["colectives", "collectives --sise 1KB", "buckets --samples many"])
def test_what_is_no_option_is_a_usage_error(words):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == USAGE


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("collectives --sizes 1TB", "expected a size such as 512, 64KB, 1MiB or 1GB, got '1TB'"),
        ("collectives -n 4 1", "expected at least 2 ranks, got 1"),
        ("collectives --samples 1", "expected at least 2 samples, got 1"),
        ("buckets --samples 1", "expected at least 2 samples"),
        ("buckets --sizes 1 -1", "expected positive bucket sizes in MiB"),
        ("buckets --params many", "expected a number such as 512, 64K or 1.5M, got 'many'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, line, runs, capsys):
    assert main(words.split()) == USAGE
    said = capsys.readouterr()
    assert said.err.startswith(f"instep bench: error: {line}")
    assert said.out == ""
    assert runs == []


def test_every_measurement_has_its_module():
    assert {module.rpartition(".")[2] for module in MODULES.values()} == set(COMMANDS)
    assert bench.PROGRAM == "instep bench"


@pytest.mark.parametrize("word", COMMANDS)
def test_help_of_each_measurement_is_fast(word):
    assert_quick("bench", word, "--help")
