"""What a test leaves behind fails that test, by name; children receive all signals; --fifth selects."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import one_fifth

pytest_plugins = ["pytester"]

LEAKS = """
import os, pathlib, subprocess, sys, threading, types
import pytest

kept = {}
segment = pathlib.Path("shared", f"instep-test-{os.getpid()}").absolute()

def test_variable(): os.environ["LEFT"] = "behind"
def test_variable_was_restored(): assert "LEFT" not in os.environ

def test_thread():
    kept["end"] = threading.Event()
    kept["thread"] = threading.Thread(target=kept["end"].wait, name="forgotten")
    kept["thread"].start()
def test_thread_of_another_test_is_not_blamed(): kept["end"].set()

def test_process(): kept["process"] = subprocess.Popen(["sleep", "1000"])
def test_process_of_another_test_is_not_blamed(): kept["process"].kill(), kept["process"].wait()

def test_segment(): segment.touch()
def test_segment_of_another_test_is_not_blamed(): segment.unlink()

class Distributed(types.ModuleType):
    def is_initialized(self): return True
    def destroy_process_group(self): del sys.modules["torch.distributed"]

def test_group(): sys.modules["torch.distributed"] = Distributed("torch.distributed")
def test_group_was_destroyed(): assert "torch.distributed" not in sys.modules

def test_monkeypatch_is_in_time(monkeypatch): monkeypatch.setenv("LEFT", "for a while")

@pytest.mark.parametrize("number", [1, 2, 3])
def test_signal(number): assert subprocess.run(["sh", "-c", f"kill -{number} $$"]).returncode == -number
"""

EXPECTED = {
    "test_variable": "environment variable LEFT",
    "test_thread": "thread 'forgotten'",
    "test_process": "process * (*sleep 1000*)",
    "test_segment": "shared memory instep-test-*",
    "test_group": "torch's default process group",
}


def test_what_is_left_behind_is_named_and_blamed_on_its_test(pytester: pytest.Pytester) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    # In a folder of its own: whoever tests beside this one would be blamed for a segment without an owner.
    shared = pytester.mkdir("shared")
    changes = {"PATIENCE_S = 20.0": "PATIENCE_S = 0.1", 'Path("/dev/shm")': f"Path({str(shared)!r})"}
    for old, new in changes.items():
        assert conftest.count(old) == 1
        conftest = conftest.replace(old, new)
    pytester.makeconftest(conftest)
    pytester.makepyfile(LEAKS)
    terminal = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = [signal.signal(number, signal.SIG_IGN) for number in terminal]
    try:  # as under nohup, in the background of a shell
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    finally:
        for number, handler in zip(terminal, before, strict=True):
            signal.signal(number, handler)
    result.assert_outcomes(passed=14, errors=len(EXPECTED))
    for test, left in EXPECTED.items():
        pattern = f"_ ERROR at teardown of {test} _"
        result.stdout.fnmatch_lines([f"*{pattern}*", f"the test left behind {left}"])


def test_five_fifths_are_every_test_once_and_equally_many() -> None:
    names = [f"test_{family}[{i}]" for family in "ab" for i in range(10)]
    fifths = [one_fifth(reversed(names), number) for number in range(5)]
    assert sorted(name for chosen in fifths for name in chosen) == sorted(names)
    for family in "ab":
        assert [sum(f"_{family}" in name for name in chosen) for chosen in fifths] == [2] * 5


def test_a_commit_chooses_the_fifth(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('i', range(12))\ndef test_one(i): pass")
    for commit, passed in (("0a6b6cd1", 2), ("5", 3)):  # 0x0a6b6cd1 % 5 = 4
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--fifth", commit)
        result.assert_outcomes(passed=passed, deselected=12 - passed)
