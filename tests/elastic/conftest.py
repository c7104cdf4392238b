"""A heartbeat page for the test, as a supervisor makes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from instep.elastic.heartbeat import HeartbeatPage


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    made = HeartbeatPage.create()
    yield made
    made.file.close()
