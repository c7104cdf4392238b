"""Fixtures of the tests of shared memory."""

from __future__ import annotations

import pytest

from instep.shm import collectives, group_segment

SMALL_BYTES = 16 << 10


@pytest.fixture
def small_halves(monkeypatch: pytest.MonkeyPatch) -> int:
    """Halves of 16 KiB for groups of threads, so that messages of many rounds are short."""
    for module in (group_segment, collectives):
        assert module.HALF_BYTES > SMALL_BYTES
        monkeypatch.setattr(module, "HALF_BYTES", SMALL_BYTES)
    return SMALL_BYTES
