"""Fixtures of the tests of shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from instep.native.library import core, switched_off
from instep.shm import collectives, group_segment

SMALL_BYTES = 16 << 10


@pytest.fixture(autouse=True, params=["native", "python"] if core() is not None else ["python"])
def waits_and_adds(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test twice: with the native core, and with what stands for it where there is none."""
    if request.param == "native":
        yield request.param
        return
    with switched_off():
        yield request.param


@pytest.fixture
def small_halves(monkeypatch: pytest.MonkeyPatch) -> int:
    """Halves of 16 KiB for groups of threads, so that messages of many rounds are short."""
    for module in (group_segment, collectives):
        assert module.HALF_BYTES > SMALL_BYTES
        monkeypatch.setattr(module, "HALF_BYTES", SMALL_BYTES)
    return SMALL_BYTES
