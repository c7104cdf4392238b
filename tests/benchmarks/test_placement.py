"""The benchmark's table goes into a README between two lines, and nowhere else."""

import pytest

from benchmarks.placement.run import BEGIN, END, replaced

BEFORE = "# A title\n\ntext\n\n"
AFTER = "\n\nmore text\n"


@pytest.mark.parametrize("old", ["", "an old table\nof two lines\n"])
def test_what_stands_between_the_markers_is_replaced_and_the_rest_stays(old):
    text = f"{BEFORE}{BEGIN}\n{old}{END}{AFTER}"
    assert replaced(text, "a new\ntable") == f"{BEFORE}{BEGIN}\na new\ntable\n{END}{AFTER}"


def test_replacing_twice_is_replacing_once():
    once = replaced(f"{BEFORE}{BEGIN}\n{END}{AFTER}", "table")
    assert replaced(once, "table") == once


@pytest.mark.parametrize(
    "text",
    ["", BEFORE, f"{BEGIN}\n", f"{END}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n"],
)
def test_a_text_without_exactly_one_such_place_is_refused(text):
    with pytest.raises(ValueError, match="expected one line '<!-- placement table -->'"):
        replaced(text, "table")
