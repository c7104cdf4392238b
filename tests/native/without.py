"""A process without the native core, for tests of what Python does then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from instep.native import library


@contextmanager
def without_core() -> Iterator[None]:
    """No core is found in the block."""
    library.core()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found", lambda: (None, "it was not compiled"))
        yield
