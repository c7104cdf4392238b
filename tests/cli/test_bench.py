"""What ``instep bench`` makes of its arguments, and how it ends."""

import sys
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
from instep.cli.bench import LINK, MODULES, main, parse
from instep.cli.exit_codes import DONE
from tests.cli.quick import assert_quick

COMMANDS = ("collectives", "steps", "buckets", "scaling", "data-parallel", "memory-savers", "pipeline")
FLAGS = [
    ("collectives", CollectivesOptions()),
    ("collectives -n 3 --sizes 1KB,1MB", CollectivesOptions(ranks=(3,), sizes=("1KB,1MB",))),
    ("collectives --collective all_to_all --full", CollectivesOptions(collective="all_to_all", full=True)),
    ("collectives --ranks 2 4 --samples 5", CollectivesOptions(ranks=(2, 4), samples=5)),
    ("collectives --link --rate 200mbit", CollectivesOptions(link=True, rate="200mbit")),
    ("collectives --json a --csv b", CollectivesOptions(json=Path("a"), csv=Path("b"))),
    ("steps -n 3 --setting compute --samples 4", StepsOptions(ranks=3, setting="compute", samples=4)),
    ("steps --strategies naive,flat --link", StepsOptions(strategies=("naive,flat",), link=True)),
    ("steps --preset medium --vocab 50257", StepsOptions(preset="medium", vocab=50257)),
    ("buckets -n 3 --sizes 1 2.5 --no-ordered", BucketsOptions(ranks=3, sizes=(1.0, 2.5), ordered=False)),
    ("buckets --tokens 8 --params 10M", BucketsOptions(context=8, params="10M")),
    ("scaling -n 1 2 --work strong --batch 4", ScalingOptions(ranks=(1, 2), work="strong", batch=4)),
    ("data-parallel -n 4 --setting python", DataParallelOptions(ranks=4, setting="python")),
    ("memory-savers -n 3 --params 2M --steps 0", MemorySaversOptions(ranks=3, params="2M", steps=0)),
    (
        "pipeline --schedules gpipe,1f1b --backend shm",
        PipelineOptions(schedules=("gpipe,1f1b",), backend="shm"),
    ),
]


def module_of(command):
    """The module whose ``run`` a command calls."""
    return f"instep.bench.{command.replace('-', '_')}"


@pytest.fixture
def runs(monkeypatch):
    """The options that were run, in place of running them, and by which module."""
    runs = []
    for name in (*MODULES.values(), LINK):
        module = ModuleType(name)
        module.run = lambda options, name=name: runs.append((options, name))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("instep.launch.launch.warm", lambda: None)
    return runs


@pytest.mark.parametrize(("words", "options"), FLAGS, ids=[words for words, _ in FLAGS])
def test_flags_become_options(words, options, runs):
    assert parse(words.split()) == options
    assert main(words.split()) == DONE
    word = words.split()[0]
    assert runs == [(options, LINK if word == "steps" and "--link" in words else module_of(word))]


@pytest.mark.parametrize("word", COMMANDS)
def test_help_of_each_measurement_imports_nothing_that_is_slow(word):
    assert_quick("bench", word, "--help")
