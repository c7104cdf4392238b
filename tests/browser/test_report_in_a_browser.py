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
from tests.timeline.report_example import IMAGE, SCRIPT, SLOW, STEPS, example, killed

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


def test_the_window_never_leaves_the_step(opened):
    report = opened()
    whole = report.window()
    report.press("+", *["ArrowRight"] * 30)
    assert report.window()[1] == pytest.approx(whole[1], abs=1)
    report.press(*["-"] * 30)
    assert report.window() == pytest.approx(whole, abs=1)
    report.press(*["+"] * 60)
    assert report.window()[1] - report.window()[0] >= 1.9


def test_the_wheel_scrolls_the_page_until_the_timeline_is_clicked(opened):
    report = opened()
    whole = report.window()
    x, y = report.at(0.25)
    report.page.mouse.move(x, y)
    report.page.mouse.wheel(0, -10)
    assert report.window() == whole
    report.page.mouse.move(*report.at(0.25))
    report.page.mouse.click(*report.at(0.25))
    under = whole[0] + 0.25 * (whole[1] - whole[0])
    report.page.mouse.wheel(0, -200)
    report.page.wait_for_function(f"{SHOWN}.to < {whole[1] - 1}")
    low, high = report.window()
    assert high - low < whole[1] - whole[0]
    assert low + 0.25 * (high - low) == pytest.approx(under, abs=200), "zooms around the pointer"


def test_dragging_moves(opened):
    report = opened()
    report.press("+", "+")
    low, high = report.window()
    report.page.mouse.move(*report.at(0.6))
    report.page.mouse.down()
    report.page.mouse.move(*report.at(0.4), steps=4)
    report.page.mouse.up()
    assert report.window()[0] - low == pytest.approx(0.2 * (high - low), rel=0.05)


def test_two_fingers_zoom(opened):
    report = opened(**PHONE)
    low, high = report.window()
    report.canvas.scroll_into_view_if_needed()
    box = report.canvas.bounding_box()
    touch = report.context.new_cdp_session(report.page)
    for kind, reach in (("touchStart", 30), ("touchMove", 60), ("touchMove", 90)):
        points = [
            {"x": box["x"] + 190 + side * reach, "y": box["y"] + 60, "id": side + 1} for side in (-1, 1)
        ]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    now = report.window()
    assert now[1] - now[0] == pytest.approx((high - low) / 3, rel=0.15)


def test_hovering_tells_what_is_there(opened):
    report = opened()
    tip = report.page.locator("#tip")
    assert tip.is_hidden()
    report.page.mouse.move(*report.at(0.2))
    tip.wait_for()
    assert "backward" in tip.inner_text() and "rank 0, compute" in tip.inner_text()
    report.page.mouse.move(*report.at(0.5, y=86))
    playwright.expect(tip).to_contain_text("bucket 0")
    assert f"for rank {SLOW}" in tip.inner_text()
    report.page.mouse.move(*report.at(0.72))
    playwright.expect(tip).to_contain_text("while messages travelled")
    report.page.mouse.move(5, 5)
    playwright.expect(tip).to_be_hidden()


def test_compute_inside_a_span_of_the_host_is_on_top_and_the_span_below(opened):
    told = example()
    rank = told["timeline"]["steps"][0]["ranks"][0]
    told["timeline"]["names"].append("micro-batch")
    rank["events"].append([3, len(told["timeline"]["names"]) - 1, 0, 49000, 0, 0, -1, -1])
    report = opened(told)
    tip = report.page.locator("#tip")
    report.page.mouse.move(*report.at(0.2))
    playwright.expect(tip).to_contain_text("backward")
    report.page.mouse.move(*report.at(0.2, y=70))
    playwright.expect(tip).to_contain_text("micro-batch")


def test_keys_read_the_events_of_a_rank(opened):
    report = opened()
    report.press("ArrowDown", "ArrowDown", "n", "n")
    assert report.shown("focused") == "1"
    assert report.shown("picked") == "forward"
    assert "rank 1" in report.page.locator("#tip").inner_text()
    assert "forward" in report.page.locator("#said").inner_text()
    report.press("p")
    assert report.shown("picked") == "data"
    report.press("Escape")
    assert report.shown("picked") == "" and report.page.locator("#tip").is_hidden()


def test_a_double_click_fills_the_width_with_an_event(opened):
    report = opened()
    event = next(e for e in example()["timeline"]["steps"][0]["ranks"][0]["events"] if e[1] == 2)
    report.page.mouse.dblclick(*report.at(0.2))
    low, high = report.window()
    assert low < event[2] < event[2] + event[3] < high < low + 1.3 * event[3]


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


def test_ranks_are_hidden_and_shown(opened):
    report = opened()
    assert report.shown("ranks") == "0,1,2,3"
    tall = report.canvas.bounding_box()["height"]
    report.page.get_by_role("button", name="Show rank 1").click()
    assert report.shown("ranks") == "0,2,3"
    assert report.canvas.bounding_box()["height"] < tall
    report.page.get_by_role("button", name="All").click()
    assert report.shown("ranks") == "0,1,2,3"


def test_the_table_has_what_the_timeline_shows(opened):
    report = opened()
    report.page.locator("#table summary").click()
    report.page.locator("#table-rank").select_option("1")
    rank = example()["timeline"]["steps"][0]["ranks"][1]
    rows = report.page.locator("#table tbody tr")
    playwright.expect(rows).to_have_count(len(rank["events"]) + len(rank["bubbles"]))
    backward = next(event for event in rank["events"] if event[1] == 2)
    assert f"{backward[3] / 1000:.1f}" in rows.filter(has_text="backward").first.inner_text()


def test_the_parts_over_time_are_of_the_chosen_rank(opened):
    report = opened()
    chart = report.page.locator("#over-time")
    report.page.locator("#over-rank").select_option(str(SLOW))
    chart.locator("svg").focus()
    report.page.keyboard.press("End")
    told = example()["over_time"]["ranks"][SLOW]["parts"]
    assert f"step 199: compute {told['compute'][-1]:.1f}" in chart.locator(".read").inner_text()
    report.page.keyboard.press("ArrowLeft")
    assert "step 198" in chart.locator(".read").inner_text()
    report.page.locator("#over-rank").select_option("mean")
    assert chart.get_attribute("data-rank") == "mean"


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


def test_what_is_outside_the_window_or_smaller_than_a_pixel_is_not_painted(opened):
    told = example(ranks=64, leaves=95)
    events = sum(len(rank["events"]) for rank in told["timeline"]["steps"][0]["ranks"])
    tiny = [0, 0, 20.0, 0.001, 0, -1, -1, -1]
    told["timeline"]["steps"][0]["ranks"][0]["events"] += [tiny] * 5000
    told["timeline"]["steps"] = told["timeline"]["steps"][:1]
    report = opened(told)
    whole = int(report.shown("painted"))
    bubbles = sum(len(rank["bubbles"]) for rank in told["timeline"]["steps"][0]["ranks"])
    assert 15_000 < whole <= events + bubbles + 100
    report.press(*["+"] * 7)
    assert int(report.shown("painted")) < whole / 4


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
