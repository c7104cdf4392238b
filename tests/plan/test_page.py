"""The commands of docs/plan.md print what the page shows; "..." stands for other lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.cli.exit_codes import DONE
from instep.cli.plan import main

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
COMMANDS = re.findall(r"^```console\n\$ instep plan (?!fit)(.*?)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = dict(re.findall(r"`(\w+\.toml)`:\n\n```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_a_command_prints_what_its_page_shows(command, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main(command.split()) == DONE
    printed = capsys.readouterr().out
    for part in filter(None, shown.split("...\n")):
        assert part in printed
        printed = printed.partition(part)[2]
