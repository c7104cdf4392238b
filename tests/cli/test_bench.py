"""What ``instep bench`` makes of its arguments, and how it ends."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from instep.bench.options import (
    BucketsOptions,
    CollectivesOptions,
    DataParallelOptions,
    MemorySaversOptions,
    PipelineOptions,
    ScalingOptions,
    StepsOptions,
)
from instep.cli import bench
from instep.cli.bench import LINK, MODULES, main, parse
from instep.cli.exit_codes import DONE, FAILED, USAGE
from instep.errors import PeerLost
from tests.cli.quick import assert_quick

COMMANDS = ("collectives", "steps", "buckets", "scaling", "data-parallel", "memory-savers", "pipeline")
FLAGS = [
    ("collectives", CollectivesOptions()),
    ("collectives -n 3", CollectivesOptions(ranks=(3,))),
    ("collectives --ranks 2 4", CollectivesOptions(ranks=(2, 4))),
    ("collectives --sizes 1KB,1MB", CollectivesOptions(sizes=("1KB,1MB",))),
    ("collectives --collective all_to_all --full", CollectivesOptions(collective="all_to_all", full=True)),
    ("collectives --backends gloo,shm --samples 5", CollectivesOptions(backends=("gloo,shm",), samples=5)),
    (
        "collectives -n 4 --collective broadcast --link --rate 200mbit",
        CollectivesOptions(ranks=(4,), collective="broadcast", link=True, rate="200mbit"),
    ),
    (
        "collectives --json a --csv b --chart c.svg",
        CollectivesOptions(json=Path("a"), csv=Path("b"), chart=Path("c.svg")),
    ),
    ("steps", StepsOptions()),
    ("steps -n 3 --setting compute --samples 4", StepsOptions(ranks=3, setting="compute", samples=4)),
    ("steps --strategies naive,flat --link", StepsOptions(strategies=("naive,flat",), link=True)),
    (
        "steps --preset medium --batch 32 --context 64 --vocab 50257",
        StepsOptions(preset="medium", batch=32, context=64, vocab=50257),
    ),
    ("steps --backend nccl", StepsOptions(backend="nccl")),
    ("buckets", BucketsOptions()),
    ("buckets --tokens 8 --link", BucketsOptions(context=8, link=True)),
    ("buckets -n 3 --sizes 1 2.5", BucketsOptions(ranks=3, sizes=(1.0, 2.5))),
    (
        "buckets --params 10M --no-ordered --backend shm",
        BucketsOptions(params="10M", ordered=False, backend="shm"),
    ),
    ("scaling", ScalingOptions()),
    ("scaling -n 1 2 --work strong --batch 4", ScalingOptions(ranks=(1, 2), work="strong", batch=4)),
    ("scaling --strategies bucketed,DDP --link", ScalingOptions(strategies=("bucketed,DDP",), link=True)),
    ("data-parallel", DataParallelOptions()),
    ("data-parallel -n 4 --setting python", DataParallelOptions(ranks=4, setting="python")),
    ("memory-savers", MemorySaversOptions()),
    ("memory-savers -n 3 --params 2M --steps 0", MemorySaversOptions(ranks=3, params="2M", steps=0)),
    ("pipeline", PipelineOptions()),
    (
        "pipeline -n 4 --schedules gpipe,1f1b --micro-batches 1,8 --backend shm",
        PipelineOptions(ranks=4, schedules=("gpipe,1f1b",), micro_batches=("1,8",), backend="shm"),
    ),
]


def module_of(command):
    """The module whose ``run`` a command calls."""
    return f"instep.bench.{command.replace('-', '_')}"


@pytest.fixture
def runs(monkeypatch):
    """The options that were run, in place of running them, and by which module; what the run raises."""

    class Runs(list):
        module, ends_with = None, None

    runs = Runs()

    def run(options, name):
        runs.append(options)
        runs.module = name
        if runs.ends_with is not None:
            raise runs.ends_with

    for name in (*MODULES.values(), LINK):
        module = ModuleType(name)
        module.run = partial(run, name=name)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("instep.launch.launch.warm", lambda: None)
    return runs


@pytest.mark.parametrize(("words", "options"), FLAGS, ids=[words for words, _ in FLAGS])
def test_flags_become_options(words, options, runs):
    assert parse(words.split()) == options
    assert main(words.split()) == DONE
    assert runs == [options]
    word = words.split()[0]
    assert runs.module == (LINK if word == "steps" and "--link" in words else module_of(word))


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
        ("collectives --rate 10mbit", "rate '10mbit' is that of a link, of which"),
        ("buckets --samples 1", "expected at least 2 samples"),
        ("buckets --sizes 1 -1", "expected positive bucket sizes in MiB"),
        ("steps --preset tiny", "expected a size among small, medium, large, xl, 2.7B, got 'tiny'"),
        ("scaling -n 2", "expected at least two numbers of ranks to compare"),
        ("buckets --params many", "expected a number such as 512, 64K or 1.5M, got 'many'"),
        ("data-parallel -n 1", "expected at least 2 ranks, got 1"),
        ("data-parallel --samples=-1", "expected 0 samples, which are as many as fit, or more, got -1"),
        ("memory-savers --batch 0", "expected at least 1 window"),
        ("pipeline --schedules gpipe,2f2b", "expected a schedule of naive, gpipe, 1f1b, interleaved"),
        ("pipeline --layers 6", "6 blocks cannot be shared out alike among the 4 stages of interleaved"),
        ("pipeline --micro-batches 1,none", "expected a number such as 512, 64K or 1.5M, got 'none'"),
        ("pipeline --micro-size 0", "expected at least 1 window"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, line, runs, capsys):
    assert main(words.split()) == USAGE
    said = capsys.readouterr()
    assert said.err.startswith(f"instep bench: error: {line}")
    assert said.out == ""
    assert runs == []


def test_every_measurement_has_its_module():
    assert set(MODULES.values()) == set(map(module_of, COMMANDS))
    assert bench.PROGRAM == "instep bench"


@pytest.mark.parametrize("word", COMMANDS)
def test_help_of_each_measurement_imports_nothing_that_is_slow(word):
    assert_quick("bench", word, "--help")
