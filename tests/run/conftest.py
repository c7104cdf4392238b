"""What several tests of training read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A text of 13 kB."""
    path = tmp_path / "text"
    path.write_bytes(b"".join(hashlib.sha256(bytes([i])).hexdigest().encode() for i in range(200)))
    return path
