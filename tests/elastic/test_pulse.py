"""The pulse is that of the main thread alone, and runs without a page."""

from __future__ import annotations

import threading
from pathlib import Path

from instep.elastic.page import Page
from instep.elastic.pulse import Pulse


def test_it_leaves_phase_and_step_in_its_own_place(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", create=True)
    pulse, other = Pulse(page, 2), Pulse(page, 3)
    other.enter("join")
    pulse.enter("backward")
    pulse.has(8)
    assert (page.position(2).phase, page.position(2).step) == ("backward", 8)
    assert (page.position(3).phase, page.position(3).step) == ("join", 0)


def test_whoever_listens_is_told_the_phase_and_the_steps_that_are_done() -> None:
    pulse, heard = Pulse(), []
    pulse.on_enter = lambda phase, step: heard.append((phase, step))
    pulse.enter("start")
    pulse.has(3)
    pulse.enter("forward")
    assert heard == [("start", -1), ("forward", 3)]


def test_other_threads_leave_nothing(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", create=True)
    pulse, heard = Pulse(page, 0), []
    pulse.on_enter = lambda phase, step: heard.append(phase)
    pulse.enter("forward")
    thread = threading.Thread(target=pulse.enter, args=("save",))
    thread.start()
    thread.join()
    assert heard == ["forward"]
    assert page.position(0).phase == "forward"


def test_the_page_is_written_before_anybody_is_told(tmp_path: Path) -> None:
    """Who is told may die of it, and the page must say where."""
    page = Page(tmp_path / "page", create=True)
    pulse, seen = Pulse(page, 0), []
    pulse.on_enter = lambda phase, step: seen.append(page.position(0).phase)
    pulse.enter("exchange")
    assert seen == ["exchange"]
