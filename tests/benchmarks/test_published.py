"""The plan beside published figures: within what the page promises, and the page is of today's plan."""

import json

import pytest

from benchmarks.pages import README
from benchmarks.published import run, sailor


@pytest.fixture(scope="module")
def tables():
    return run.published(sailor.predictions())


def test_every_figure_is_as_near_to_the_published_one_as_promised(tables):
    assert not list(run.beyond(tables))


def test_the_page_has_what_the_plan_says_today(tables):
    written = json.loads((run.HERE / "results.json").read_text())["tables"]
    assert written == json.loads(json.dumps(tables)), "run benchmarks/published/run.py"
    best = tables["sailor summary"][0]
    words = f"{best['median error']}\nin the median and {best['worst']} at worst"
    assert words in (run.HERE / README).read_text()


def test_a_figure_that_is_too_far_is_named(tables):
    wrong = [{**row, "stage 1": "1"} for row in tables["zero states"][:1]]
    assert next(run.beyond({**tables, "zero states": wrong})).startswith("zero states: expected 1, got 120")


def test_step_times_of_measured_runs_are_near(tables):
    rows = {(row["prediction"], row["runs"]): row for row in tables["sailor summary"]}
    steps = rows["step, block times by profile", "all"]
    assert float(steps["median error"].rstrip("%")) < 10 and steps["number"] >= 36
