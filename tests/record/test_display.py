"""What a run shows while it goes on: some plain lines, or a bar where there is a terminal."""

from dataclasses import replace

import pytest

from instep.record.display import LINES_PER_RUN, Display, LongWork, follow, live
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


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> list[float]:
    """The time, in the place of ``time.monotonic()``."""
    now = [1000.0]
    monkeypatch.setattr("instep.record.display.time.monotonic", lambda: now[0])
    live.cache_clear()
    return now


def shown(capsys, num_steps: int, rank: int = 0, *, clock: list[float] | None = None) -> list[str]:
    """The lines of a run of so many steps, of a second each where there is a ``clock``."""
    display = Display(rank, num_steps)
    for step in range(num_steps):
        display.step(step, MADE)
        if clock is not None:
            clock[0] += 1
    display.say("it is done, [not] a tag")
    display.close()
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_without_a_terminal_one_rank_says_at_least_every_ten_seconds_how_much_time_is_left(capsys, clock):
    *lines, said = shown(capsys, 1000, clock=clock)
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == [*range(0, 1000, 10), 999]
    assert [line.partition("tokens/s  ")[2] for line in lines[1:3]] == ["16:29 left", "16:19 left"]
    assert len({line.index("loss") for line in lines}) == 1
    assert said == "it is done, [not] a tag"
    assert shown(capsys, 100, rank=1, clock=clock) == []


def test_a_short_run_has_twenty_lines(capsys):
    assert len(shown(capsys, 100)) == 1 + LINES_PER_RUN + 1


def test_a_part_of_a_command_knows_how_much_time_the_whole_takes(capsys, clock):
    work = LongWork(part=(0.5, 1.0), began=clock[0] - 60)
    work.at(0.5, "round 1 of 2")
    assert capsys.readouterr().err == "round 1 of 2  00:20 left\n"


def test_what_is_soon_done_shows_nothing(capsys, clock):
    for _ in follow(range(4), "part"):
        clock[0] += 1
    assert capsys.readouterr().err == ""


def test_a_line_has_the_figures_of_its_step(capsys):
    (line, _) = shown(capsys, 1)
    assert line == "step 0/1  loss 2.346  norm 0.50  lr 1.0e-03  12 ms (4 exposed)  12,346 tokens/s"


def test_a_figure_that_the_script_logs_by_a_known_name_is_shown_once(capsys):
    Display(0, 1).step(0, replace(MADE, logged=MADE.logged | {"lr": 0.002}))
    assert capsys.readouterr().err.count("lr ") == 1


def test_on_a_terminal_there_is_a_bar_that_is_gone_in_the_end(capsys, monkeypatch, clock):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich believe in a terminal
    monkeypatch.setenv("COLUMNS", "200")
    display = Display(0, 40)
    display.step(0, MADE)
    clock[0] += 20
    display.step(20, MADE)
    display.say("a line above it")
    display.close()
    err = capsys.readouterr().err
    assert "20/40" in err
    assert "00:19 left" in err
    assert "12,346 tokens/s" in err
    assert "a line above it\n" in err
    assert err.endswith("\x1b[2K")  # the bar's line is erased


def test_a_step_that_was_skipped_says_why(capsys):
    display = Display(0, 100)
    display.step(3, replace(MADE, skipped="gradient norm is nan"))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "step 3 was skipped: gradient norm is nan"
