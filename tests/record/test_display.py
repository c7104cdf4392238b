"""What a run shows while it goes on: some plain lines, or a bar where there is a terminal."""

from dataclasses import replace

import pytest

from instep.record.display import LINES_PER_RUN, Display
from instep.record.step_lines import Made

MADE = Made(
    loss=2.3456,
    rate=1e-3,
    norm=0.5,
    step_ms=12.3,
    exposed_ms=4.5,
    waiting_ms=0.2,
    logged={"tokens_per_s": 12345.6},
)


def shown(capsys, num_steps: int, rank: int = 0) -> list[str]:
    display = Display(rank, num_steps)
    for step in range(num_steps):
        display.step(step, MADE)
    display.say("it is done, [not] a tag")
    display.close()
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


@pytest.mark.parametrize("num_steps", [1, 7, LINES_PER_RUN, 101, 1000])
def test_without_a_terminal_there_are_some_twenty_lines_and_the_last_step_is_among_them(capsys, num_steps):
    *lines, said = shown(capsys, num_steps)
    steps = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert len(steps) == len(set(steps)) <= 2 * LINES_PER_RUN
    assert len(steps) >= min(num_steps, LINES_PER_RUN)
    assert (steps[0], steps[-1]) == (0, num_steps - 1)
    assert said == "it is done, [not] a tag"


def test_a_line_has_the_figures_of_its_step(capsys):
    (line, _) = shown(capsys, 1)
    assert line == "step 0/1  loss 2.346  norm 0.50  lr 1.0e-03  12 ms (4 exposed)  12,346 tokens/s"


def test_numbers_stand_below_each_other(capsys):
    *lines, _ = shown(capsys, 20)
    assert len({line.index("loss") for line in lines}) == 1


def test_other_ranks_are_silent(capsys):
    assert shown(capsys, 20, rank=1) == []


def test_a_line_is_as_long_as_it_is(capsys):
    display = Display(0, 1)
    display.say("long " * 100)
    assert capsys.readouterr().err == "long " * 100 + "\n"


def test_on_a_terminal_there_is_a_bar_that_is_gone_in_the_end(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich believe in a terminal
    monkeypatch.setenv("COLUMNS", "200")
    display = Display(0, 40)
    display.step(19, MADE)
    display.say("a line above it")
    display.close()
    err = capsys.readouterr().err
    assert "20/40" in err
    assert "12,346 tokens/s" in err
    assert "a line above it\n" in err
    assert err.endswith("\x1b[2K")  # the bar's line is erased


def test_a_step_that_was_skipped_says_why(capsys):
    display = Display(0, 100)
    display.step(3, replace(MADE, skipped="gradient norm is nan"))
    assert capsys.readouterr().err == "step 3 was skipped: gradient norm is nan\n"
