"""The figures of a run come from its own record."""

import pytest

from instep.record.directory import SUMMARY
from instep.record.summary import figures, finished, show

LOSSES = [5.5, 5.0, 4.0, 3.0, 2.5, 2.0]


def line(step: int, step_ms: float = 10.0, exposed_ms: float = 1.0, **more: float) -> dict:
    made = {"step": step, "loss": LOSSES[step], "step_ms": step_ms, "exposed_ms": exposed_ms}
    return {**made, "tokens_per_s": 1e5 / step_ms, **more}


START = {"event": "evaluated", "step": 0, "held_out_loss": 5.6}


def test_losses_are_those_of_the_whole_run_and_speed_is_that_of_its_last_part():
    before = [START, line(0, 900), line(1, 900), line(2, 900, held_out_loss=4.1)]
    after = [line(3, 70), line(4, 60), line(5, 20, 5, held_out_loss=2.1)]
    assert figures([*before, *after], first_step=3, items_per_step=100) == {
        "loss_first": 5.5,
        "loss_last": 2.0,
        "held_out_loss_first": 5.6,
        "held_out_loss": 2.1,
        "step_ms_median": 20,
        "tokens_per_s": 5000,
        "exposed_comm_share": 0.25,
        "logged": {},
    }


def test_the_first_two_steps_of_a_part_warm_up():
    lines = [line(0, 1000), line(1, 1000), line(2, 10), line(3, 12), line(4, 50)]
    assert figures(lines, 0, 1)["step_ms_median"] == 12
    assert figures([line(0, 30), line(1, 40)], 0, 1)["step_ms_median"] == 35  # better than nothing


@pytest.mark.parametrize(
    ("lines", "rate"),
    [([], "samples_per_s"), ([START], "samples_per_s"), ([START, line(0), line(1)], "tokens_per_s")],
)
def test_a_part_without_a_step_has_no_speed(lines, rate):
    found = figures(lines, 2, 100)
    assert found["step_ms_median"] is found[rate] is found["exposed_comm_share"] is None


def test_what_is_counted_by_the_second_has_the_name_that_the_steps_give_it(tmp_path, capsys):
    lines = [{**line(step), "images_per_s": 7.0} for step in (0, 1, 2)]
    for each in lines:
        del each["tokens_per_s"]
    found = figures(lines, 0, 64)
    assert found["images_per_s"] == 6400 and "tokens_per_s" not in found
    show({**found, **PART, "first_step": 0}, tmp_path)
    said = capsys.readouterr().out
    assert "speed  6,400 images/s, 10 ms a step" in said and "in the last step" in said


def test_what_is_shown_is_the_summary(tmp_path, capsys):
    rest = {"steps": 6, "world_size": 2, "strategy": "flat", "state_sha256": "abc"}
    found = figures([START, *map(line, range(6))], 0, 100)
    show({**found, **rest}, tmp_path, loss_unit="nats per byte")
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        f"run    {tmp_path}",
        "steps  6 on 2 ranks, flat",
        "loss   5.600 nats per byte on held-out data, 5.600 at the start; 2.000 in the last training step",
        "speed  10,000 tokens/s, 10 ms a step (median), 10.0% of it waiting for communication",
        f"more   {tmp_path / SUMMARY}; instep report {tmp_path}",
        "state  sha256 abc",
    ]


def test_a_loss_that_a_script_has_not_logged_is_not_told(tmp_path, capsys):
    rest = {"steps": 6, "world_size": 1, "strategy": "flat", "state_sha256": "abc"}
    show({"held_out_loss": 0.5, "held_out_loss_first": 1.0, "loss_last": None, **rest}, tmp_path)
    assert "loss   0.500 on held-out data, 1.000 at the start\n" in capsys.readouterr().out


PART = {"steps": 6, "world_size": 1, "strategy": "flat", "state_sha256": "abc", "first_step": 3}


def test_after_a_resume_it_is_said_which_steps_the_figures_are_of(tmp_path, capsys):
    lines = [START, *(line(step, 900) for step in range(3)), line(3), line(4), line(5)]
    show({**figures(lines, 3, 100), **PART, "parallel": {"shard_stage": 2}}, tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        "steps  6; the last 3 on 1 rank, flat, stage 2 of sharding: speed, memory and time are of these"
    )
    assert said[3].startswith("speed  10,000 tokens/s, 10 ms a step")


def test_a_run_that_was_finished_says_so_and_how_to_train_longer():
    assert finished(30).startswith("already finished: 30 of 30 steps; to train longer, pass --steps 60 --acc")
    assert "raise the number in run.steps()" in finished(30, command="instep run")
