"""The word after ``instep``: found or suggested, and never at the price of importing torch."""

import pytest

from instep import __version__
from instep.cli.exit_codes import DONE, USAGE
from instep.cli.main import COMMANDS, main
from tests.cli.quick import assert_quick

HELPS = [[], ["--help"], ["--version"], *([word, "--help"] for word in COMMANDS)]


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
