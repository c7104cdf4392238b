"""What ``instep run`` takes for itself of its arguments, and what it leaves to the script."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.cli.exit_codes import DONE
from instep.cli.run import RunFlags, main
from instep.launch import launch
from instep.run import start
from instep.run.script import ScriptCall


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The calls that were made, in place of running them, in a folder with a script and a package."""
    found = SimpleNamespace(calls=[])

    def run(call: ScriptCall, config: RunFlags) -> int:
        found.calls.append(call)
        return DONE

    monkeypatch.setattr(launch, "warm", lambda *modules: None)
    monkeypatch.setattr(start, "launch_script", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mine").mkdir()
    for name in ("__init__", "__main__", "fit"):
        (tmp_path / "mine" / f"{name}.py").write_text("")
    yield found
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("args", "given", "arguments"),
    [
        ("-n 2 train.py", {"ranks": 2}, ""),
                ("-n 2 train.py -h 8", {"ranks": 2}, "-h 8"),
        ("train.py --help -n 3 --resume", {}, "--help -n 3 --resume"),
        ("--resume --run_dir some/where train.py", {"resume": True, "run_dir": Path("some/where")}, ""),
        ("--no-resume --timeout-s=7 train.py x", {"resume": False, "timeout_s": 7.0}, "x"),
        ("--checkpoint.every 100 train.py", {"checkpoint": {"every": 100}}, ""),  # which is the default
        ("--record.leaves --parallel.pp 2 train.py", {"record": {"leaves": True}, "parallel": {"pp": 2}}, ""),
        ("--checks.skip-steps 3 4 train.py 5", {"checks": {"skip_steps": (3, 4)}}, "5"),
        ("--fault kill:step=3 --fault stop train.py", {"fault": ("kill:step=3", "stop")}, ""),
        ("-- train.py -- -n 3", {}, "-- -n 3"),
    ],
)  # fmt: skip
def test_everything_after_the_script_belongs_to_it(args, given, arguments, runs):
    """A script's own -h made one rank of it, without a word."""
    assert main(args.split()) == DONE
    call = runs.calls[0]
    assert (call.path, call.module, call.arguments) == (Path("train.py"), "", tuple(arguments.split()))
    assert call.given == given


@pytest.mark.parametrize(("module", "file"), [("mine.fit", "fit"), ("mine", "__main__")])
def test_a_module_is_run_as_python_runs_it(module, file, runs, tmp_path):
    assert main(["-n", "2", "-m", module, "-n", "3"]) == DONE
    call = runs.calls[0]
    assert (call.path, call.module) == (tmp_path / "mine" / f"{file}.py", module)
    assert call.arguments == ("-n", "3")
