"""A run that resumed where nothing can be written ended as a wrong use, and with "Permission denied".

The checkpoint that it had resumed from was there already, so there was nothing to write yet; and the disk was
mounted read-only, which no permission changes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from instep.checkpoint.shorthand import save
from tests.parity import filled


@pytest.mark.parametrize(("flag", "code"), [(os.ST_RDONLY, errno.EROFS), (0, errno.EACCES)])
def test_what_is_there_needs_no_writing_and_the_next_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, code: int
) -> None:
    model = filled(nn.Linear(2, 2))
    save(tmp_path, step=1, model=model)
    monkeypatch.setattr(os, "access", lambda *args: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flag))
    assert save(tmp_path, step=1, model=model) == tmp_path / "step-00000001"
    with pytest.raises(OSError, match=str(tmp_path)) as failed:
        save(tmp_path, step=2, model=model)
    assert failed.value.errno == code
