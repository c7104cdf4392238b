"""The command that makes a recorded run once more: a recipe's, a script's, and none of a notebook's."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.recipes import text_config
from instep.record.directory import CONFIG, command_again, flag_of
from instep.run.settings import ScriptSettings
from instep.run.toml import to_toml

LEAVES = ("--stop-after", "3", "--ledger.leaves")
SCRIPT = ScriptSettings(script="my train.py", arguments=("--lr", "1e-3"))


@pytest.mark.parametrize(
    ("settings", "command", "leaves"),
    [
        (
            text_config.tiny(),
            "instep train --config {path}/config.toml --run-dir again --no-resume " + " ".join(LEAVES),
            "--ledger.leaves",
        ),
        (
            SCRIPT,
            "instep run --run-dir again --stop-after 3 --leaves 'my train.py' --lr 1e-3",
            "--leaves",
        ),
        (ScriptSettings(), "", "--leaves"),
    ],
    ids=["recipe", "script", "notebook"],
)
def test_it_is_in_the_words_of_what_has_made_the_run(
    settings: object, command: str, leaves: str, tmp_path: Path
) -> None:
    (tmp_path / CONFIG).write_text(to_toml(settings))
    assert command_again(tmp_path, Path("again"), LEAVES) == command.format(path=tmp_path)
    assert flag_of(tmp_path, "--ledger.leaves") == leaves
