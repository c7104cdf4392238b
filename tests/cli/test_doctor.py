"""What ``instep doctor`` makes of its arguments, and how it ends."""

import json
import sys
from types import ModuleType

import pytest

from instep.cli.doctor import DoctorOptions, main
from instep.cli.exit_codes import DONE, FAILED, USAGE
from instep.replicate.strategies import STRATEGIES


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
    assert main(words.split()) == DONE
    assert doctor.asked == [{"json_wanted": options.json, "verify": options.verify}]


@pytest.mark.parametrize("words", ["--jsno", "--verify yes", "now"])
def test_what_is_no_option_is_a_usage_error(words, doctor):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == USAGE and doctor.asked == []


def test_an_error_that_was_found_is_the_exit_code(doctor):
    doctor.code = FAILED
    assert main([]) == FAILED


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "instep.bench.doctor", None)
    assert main([]) == FAILED
    said = capsys.readouterr()
    assert said.err.startswith("instep doctor: error: ") and "-m pip install" in said.err and said.out == ""


@pytest.mark.slow
def test_the_command_proves_the_gradients_and_prints_json_alone(capsys):
    assert main(["--verify", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    ways = {(report["strategy"], report["ordered"]) for report in found["verify"]}
    assert ways == {(name, True) for name in STRATEGIES} | {("bucketed", False)}
    for report in found["verify"]:
        assert report["ok"] and report["world_size"] == 2 and len(report["rows"]) > 20
        assert max(row["error"] for row in report["rows"]) < 1e-6
