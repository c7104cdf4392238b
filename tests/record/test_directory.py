"""The command that makes a recorded run once more: a recipe's, a script's, and none of a notebook's."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.recipes import text_config
from instep.record.directory import CONFIG, command_again
from instep.run.settings import ScriptConfig
from instep.run.toml import to_toml

LEAVES = ("--stop-after", "3", "--record.leaves")
SCRIPT = ScriptConfig(script="my train.py", arguments=("--lr", "1e-3"))


MODULE = ScriptConfig(script="/a/mine/train.py", module="mine.train")


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (text_config.tiny(), "instep train --config {path}/config.toml --run-dir again {leaves}"),
        (SCRIPT, "instep run --run-dir again {leaves} 'my train.py' --lr 1e-3"),
        (MODULE, "instep run --run-dir again {leaves} -m mine.train"),
        (ScriptConfig(), ""),
    ],
    ids=["recipe", "script", "module", "notebook"],
)
def test_it_is_in_the_words_of_what_has_made_the_run(settings: object, command: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(to_toml(settings))
    leaves = " ".join(LEAVES)
    assert command_again(tmp_path, Path("again"), LEAVES) == command.format(path=tmp_path, leaves=leaves)
