"""The command that makes one plain file of a checkpoint: what it says of what is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.checkpoint import convert


@pytest.mark.parametrize(
    ("names", "code", "message"),
    [
        (["step-00000003"], 2, r"holds several checkpoints: name one, such as .*step-00000003"),
        ([], 3, r"manifest\.json: cannot be read"),
    ],
)
def test_the_command_says_in_a_sentence_what_is_no_checkpoint(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    code: int,
    message: str,
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("sys.argv", ["convert", str(tmp_path), str(tmp_path / "out.safetensors")])
    with pytest.raises(SystemExit) as ended:
        convert.main()
    assert ended.value.code == code
    assert re.search(message, capsys.readouterr().err)
