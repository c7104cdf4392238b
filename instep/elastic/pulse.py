"""What a worker's main thread leaves behind at each phase of a step, and where faults are injected."""

from __future__ import annotations

import threading
from collections.abc import Callable

from instep.elastic.page import PHASES, Page

_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


class Pulse:
    """A main thread says in which phase it is; without a ``page``, as outside of a supervisor, to nobody.

    ``on_enter(phase, step)`` is called at each phase. What other threads say is left out.
    """

    def __init__(self, page: Page | None = None, worker: int = 0) -> None:
        self.page = page
        self.worker = worker
        self.on_enter: Callable[[str, int], None] | None = None
        self._thread = threading.get_ident()
        self._step = -1

    def enter(self, phase: str) -> None:
        """The main thread begins ``phase``."""
        if threading.get_ident() != self._thread:
            return
        if self.page is not None:
            self.page.enter(self.worker, _NUMBERS[phase])
        if self.on_enter is not None:
            self.on_enter(phase, self._step)

    def has(self, step: int) -> None:
        """This worker has the state after ``step`` steps."""
        self._step = step
        if self.page is not None:
            self.page.set_step(self.worker, step)
