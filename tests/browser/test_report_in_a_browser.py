"""The report in headless Chromium: it moves, zooms, reads and switches, and asks for nothing.

With INSTEP_SHOTS=1 the screenshots in shots/ are made anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.timeline.report import render
from tests.timeline.report_example import IMAGE, SCRIPT, STEPS, example, killed

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("there is no chromium on this machine", allow_module_level=True)

SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
SHOTS = Path(__file__).parent / "shots"
SHOWN = "document.getElementById('canvas').dataset"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        page = chromium.new_page()  # the first page starts what all others share
        page.goto("about:blank")
        yield chromium
        chromium.close()


class Report:
    """A report in a page of its own, and what the page has asked for and complained of."""

    def __init__(self, browser, file: Path, **options) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.address = file.as_uri()
        self.canvas = self.page.locator("#canvas")

    def drawn(self) -> None:
        """Wait until everything that was asked for has been painted."""
        self.page.evaluate("new Promise(then => requestAnimationFrame(() => requestAnimationFrame(then)))")

    def shown(self, name: str) -> str:
        self.drawn()
        return self.page.evaluate(f"{SHOWN}.{name}")

    def window(self) -> tuple[float, float]:
        return float(self.shown("from")), float(self.shown("to"))

    def press(self, *keys: str) -> None:
        self.canvas.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def at(self, share: float, y: float = 55) -> tuple[float, float]:
        """Where in the page the canvas is at ``share`` of its time axis; y is within rank 0."""
        self.canvas.scroll_into_view_if_needed()
        box = self.canvas.bounding_box()
        return box["x"] + 76 + share * (box["width"] - 76), box["y"] + y

    def wide(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth")

    def pixels(self) -> str:
        self.drawn()
        return self.page.evaluate("document.getElementById('canvas').toDataURL()")


@pytest.fixture
def opened(browser, tmp_path) -> Iterator:
    reports = []

    def open_report(told: dict | None = None, **options) -> Report:
        file = tmp_path / f"report{len(reports)}.html"
        file.write_text(render(example() if told is None else told))
        reports.append(Report(browser, file, **options))
        return reports[-1]

    yield open_report
    for report in reports:
        asked, complaints = report.requests, report.complaints
        report.context.close()
        assert asked == [report.address], "the page asked for something else"
        assert complaints == []


def test_names_with_scripts_in_them_do_nothing(opened):
    report = opened()
    report.press("n", "n", "n")
    report.page.locator("#table summary").click()
    playwright.expect(report.page.locator("#table td", has_text=IMAGE)).to_have_count(1)
    assert report.page.evaluate("window.hacked") is None
    assert report.page.locator(".name").inner_text() == SCRIPT
    assert report.page.locator("img").count() == 0


def test_keys_zoom_move_and_reset(opened):
    report = opened()
    whole = report.window()
    report.press("+")
    closer = report.window()
    assert whole[0] < closer[0] < closer[1] < whole[1]
    report.press("ArrowRight")
    right = report.window()
    assert right[0] > closer[0] and right[1] - right[0] == pytest.approx(closer[1] - closer[0], abs=1)
    report.press("ArrowLeft")
    assert report.window() == pytest.approx(closer, abs=1)
    report.press("-")
    assert report.window() == pytest.approx(whole, abs=1)
    report.press("+", "+", "0")
    assert report.window() == pytest.approx(whole, abs=1)


def test_steps_are_switched(opened):
    report = opened()
    numbers = [str(step) for step in STEPS]
    before, first = report.shown("step"), report.pixels()
    report.page.keyboard.press("]")
    after, second = report.shown("step"), report.pixels()
    assert [before, after] == numbers[:2] and first != second
    report.page.locator("#after").click()
    assert report.shown("step") == numbers[2]
    report.page.locator("#step").select_option("3")
    assert report.shown("step") == numbers[3] and report.page.locator("#after").is_disabled()
    report.page.locator("#step").focus()
    report.page.keyboard.press("[")
    assert report.shown("step") == numbers[3], "keys in a list belong to the list"


def test_dark_follows_the_system_until_the_button_is_pressed(opened):
    report = opened(color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark, painted = report.page.evaluate(paper), report.pixels()
    report.page.locator("#theme").click()
    light = report.page.evaluate(paper)
    assert sum(map(int, dark[4:-1].split(","))) < 100 < 700 < sum(map(int, light[4:-1].split(",")))
    assert report.pixels() != painted
    assert opened().page.evaluate(paper) == light


def test_a_phone_never_scrolls_sideways(opened):
    report = opened(**PHONE)
    assert report.wide() == 390
    for summary in report.page.locator("summary").all():
        summary.click()
    assert report.wide() == 390


def test_everything_is_reached_by_tab_and_seen_in_focus(opened):
    report = opened()
    reached = set()
    for _ in range(60):
        report.page.keyboard.press("Tab")
        inside = report.page.evaluate(
            "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(inside[0])
        assert inside[1] != "none" or report.page.evaluate("document.activeElement === document.body")
    assert {"theme", "step", "in", "out", "fit", "canvas", "over-rank"} <= reached


@pytest.mark.parametrize("told", [{}, killed(), example(ranks=1)], ids=["nothing", "killed", "one rank"])
def test_less_than_everything_is_shown_without_complaint(opened, told):
    report = opened(told)
    report.drawn()
    assert report.page.locator("h1").inner_text()


@pytest.mark.skipif("INSTEP_SHOTS" not in os.environ, reason="screenshots are made when INSTEP_SHOTS is set")
def test_screenshots(opened):
    for name in ("light", "dark", "zoomed", "phone"):
        size = {"viewport": {"width": 1280, "height": 1500}}
        if name == "phone":
            size = {**PHONE, "viewport": {"width": 390, "height": 2400}}
        report = opened(**size, color_scheme="dark" if name == "dark" else "light")
        if name == "zoomed":
            report.page.mouse.dblclick(*report.at(0.72))
            report.press("-", "-")
            report.page.mouse.move(*report.at(0.42))
        report.drawn()
        shot = SHOTS / f"{name}.png"
        shown = report.page.locator("#timeline") if name == "zoomed" else report.page
        shot.write_bytes(shown.screenshot())
        assert shot.stat().st_size < 250_000
