"""The word after ``instep``, help without torch, the doctor's flags, and the end of every error."""

import errno
import json
import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from instep import __version__
from instep.cli.doctor import DoctorOptions
from instep.cli.doctor import main as doctor_main
from instep.cli.exit_codes import DONE, FAILED, INTERRUPTED, REJECTED, USAGE, exit_code, report_error
from instep.cli.main import COMMANDS, main
from instep.errors import CheckpointRejected, ContractBroken, Desync, PeerLost
from instep.launch.rank_exit import ErrorRecord, Exit, RankFailed
from instep.replicate.strategies import STRATEGIES
from tests.cli.quick import assert_quick

HELPS = [[], ["--help"], ["--version"], ["--completion"], *([word, "--help"] for word in COMMANDS)]


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(args, capsys):
    assert main(args) == DONE
    out = capsys.readouterr().out
    width = max(map(len, COMMANDS))
    assert all(f"  {word:{width}}  {line}\n" in out for word, line in COMMANDS.items())


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == DONE
    assert capsys.readouterr().out == f"instep {__version__}\n"


@pytest.mark.parametrize(
    ("word", "fix"),
    [("trian", "did you mean 'train'?"), ("xyz", "expected one of train"), ("-x", "expected")],
)
def test_an_unknown_command_is_a_usage_error(word, fix, capsys):
    assert main([word]) == USAGE
    said = capsys.readouterr()
    assert f"instep: error: unknown command {word!r}: {fix}" in said.err
    assert said.out == ""


@pytest.mark.parametrize("args", HELPS, ids=" ".join)
def test_help_imports_nothing_that_is_slow(args):
    assert_quick(*args)


COMPLETE = """
source <(instep --completion)
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_instep instep "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s ' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["instep", "tr"], {"train"}),
        (["instep", ""], set(COMMANDS)),
        (["instep", "train", "--parallel.str"], {"--parallel.strategy"}),
        (["instep", "train", "--parallel.strategy", ""], set(STRATEGIES)),
        (["instep", "bench", "sc"], {"scaling"}),
        (["instep", "plan", "memory", "llama3-8b", "--device.k"], {"--device.kind"}),
        (["instep", "run", "train.py", "--re"], set()),  # the script's own flags
    ],
)
def test_bash_completes_commands_flags_and_choices(line, expected, tmp_path):
    command = tmp_path / "instep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m instep "$@"\n')
    command.chmod(0o755)
    search = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    bash = ["bash", "--norc", "-c", COMPLETE, "complete", *line]
    said = subprocess.run(bash, capture_output=True, text=True, check=True, env=os.environ | search)
    assert (set(said.stdout.split()), said.stderr) == (expected, "")


@pytest.fixture
def doctor(monkeypatch):
    """A doctor that only writes down what it was asked; ``doctor.code`` is its answer."""
    module = ModuleType("instep.bench.doctor")
    module.asked, module.code = [], DONE

    def run(**options):
        module.asked.append(options)
        return module.code

    module.run = run
    monkeypatch.setitem(sys.modules, "instep.bench.doctor", module)
    return module


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", DoctorOptions()),
        ("--json", DoctorOptions(json=True)),
        ("--verify", DoctorOptions(verify=True)),
        ("--json --verify", DoctorOptions(json=True, verify=True)),
    ],
)
def test_flags_become_options(words, options, doctor):
    assert doctor_main(words.split()) == DONE
    assert doctor.asked == [{"json_wanted": options.json, "verify": options.verify}]


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "instep.bench.doctor", None)
    assert doctor_main([]) == FAILED
    said = capsys.readouterr()
    assert said.err.startswith("instep doctor: error: ") and "-m pip install" in said.err and said.out == ""


@pytest.mark.slow
def test_the_command_proves_the_gradients_and_prints_json_alone(capsys):
    assert doctor_main(["--verify", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    ways = {(report["strategy"], report["ordered"]) for report in found["verify"]}
    assert ways == {(name, True) for name in STRATEGIES} | {("bucketed", False)}
    for report in found["verify"]:
        assert report["ok"] and report["world_size"] == 2 and len(report["rows"]) > 20
        assert max(row["error"] for row in report["rows"]) < 1e-6


def failed(kind: str, message: str = "why", code: int = 1) -> RankFailed:
    """What the launcher raises when rank 1 of 2 has raised ``kind``, or none if that is empty."""
    record = ErrorRecord(kind, message, f"Traceback of rank 1\n{kind}: {message}\n", 0) if kind else None
    return RankFailed(Exit(1, 77, code, record), 2)


DENIED = ErrorRecord.of(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "Text")).message
RANK = "rank 1 of 2 (pid 77)"
# What a user can act on is one line, also where a rank has raised it.
ENDS = [
    (ValueError("steps: expected a number above 0, got 0"), USAGE, "steps: expected a number above 0, got 0"),
    (ValueError(), USAGE, "ValueError"),
    (FileNotFoundError("data"), USAGE, "data"),
    (FileExistsError("runs/a holds another run"), USAGE, "runs/a holds another run"),
    (PermissionError("run directory"), USAGE, "run directory"),
    (NotADirectoryError("run directory"), USAGE, "run directory"),
    (CheckpointRejected("truncated"), REJECTED, "truncated"),
    (PeerLost("rank 1"), FAILED, "rank 1"),
    (Desync("plans"), FAILED, "plans"),
    (ContractBroken("fields"), FAILED, "fields"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.jsonl"), FAILED, "a.jsonl: no space left on device"),
    (OSError(errno.EPIPE, os.strerror(errno.EPIPE)), FAILED, "broken pipe"),
    (failed("ValueError"), USAGE, "why"),
    (failed("FileNotFoundError"), USAGE, "why"),
    (failed("json.decoder.JSONDecodeError"), USAGE, "why"),
    (failed("PermissionError", DENIED), USAGE, "Text: permission denied"),
    (failed("instep.errors.CheckpointRejected"), REJECTED, "why"),
    (failed("instep.errors.ContractBroken"), FAILED, "why"),
    (failed("instep.errors.PeerLost"), FAILED, f"{RANK} failed with instep.errors.PeerLost: why"),
    (failed("OSError"), FAILED, f"{RANK} failed: why"),
    (failed("", code=-signal.SIGTERM), FAILED, f"{RANK} was killed by SIGTERM"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS, ids=[f"{error!r}"[:40] for error, _, _ in ENDS])
def test_every_error_has_its_code_and_one_line(error, code, line, capsys):
    assert exit_code(error) == report_error("instep train", error) == code
    assert capsys.readouterr().err == f"instep train: error: {line}\n"


@pytest.mark.parametrize("said", ["", "after 3 steps"])
def test_an_interrupt_is_no_error(said, capsys):
    assert report_error("instep train", KeyboardInterrupt(*[said] * bool(said))) == INTERRUPTED
    assert capsys.readouterr().err == f"instep train: interrupted {said}".rstrip() + "\n"


@pytest.mark.parametrize(
    ("error", "traceback", "line"),
    [
        (KeyError("a bug"), "KeyError: 'a bug'", "'a bug'"),
        (TypeError("ours"), "TypeError: ours", "ours"),
        (RuntimeError("torch's"), "RuntimeError: torch's", "torch's"),
        (failed("KeyError"), "Traceback of rank 1\nKeyError: why", f"{RANK} failed with KeyError: why"),
        (
            failed("un.heard.Of"),
            "Traceback of rank 1\nun.heard.Of: why",
            f"{RANK} failed with un.heard.Of: why",
        ),
    ],
)
def test_what_nobody_expected_comes_with_its_traceback(error, traceback, line, capsys):
    assert report_error("instep train", error) == FAILED
    assert capsys.readouterr().err.endswith(f"{traceback}\ninstep train: error: {line}\n")


@pytest.mark.parametrize(
    ("error", "first"), [(ValueError("no"), "ValueError: no"), (failed("ValueError"), "Traceback of rank 1")]
)
def test_a_traceback_can_be_asked_for(error, first, monkeypatch, capsys):
    monkeypatch.setenv("INSTEP_DEBUG", "1")
    report_error("instep train", error)
    assert capsys.readouterr().err.startswith(f"{first}\n")


@pytest.mark.parametrize(("error", "code"), [(ValueError("no"), USAGE), (CheckpointRejected("no"), REJECTED)])
def test_what_another_rank_tells_is_not_told_again(error, code, capsys):
    error.told = True
    assert report_error("instep train", error) == code
    assert capsys.readouterr().err == ""
