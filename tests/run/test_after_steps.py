"""What follows the steps of a run: evaluations and checkpoints at their steps, and the lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

from instep.recipes.text_config import Config
from instep.record.directory import RECORD
from instep.record.display import Display
from instep.record.jsonl import read_lines
from instep.record.step_lines import steps_recorded
from instep.run.generation import AfterSteps
from instep.run.writer import RunWriter
from tests.parity import world_of_one
from tests.run.text_training import TextTraining, tiny


def run(path: Path, config: Config) -> tuple[list[int], TextTraining]:
    """Run the steps of ``config``: those that were saved, and what was trained."""
    mine, saved = TextTraining(config, world_of_one()), list[int]()
    training = mine.training
    books = RunWriter(path, training, min(steps_recorded(path), training.steps_done))
    books.started(0, [])
    checkpoints = mock.Mock(save=lambda training: saved.append(training.steps_done))
    after = AfterSteps(training, books, Display(1, config.steps), checkpoints)
    after.begin(is_saved=False)
    while after.ending is None:
        mine.step()
        after.follow_up()
    books.close()
    return saved, mine


def test_saving_and_evaluating_fall_due_at_their_steps_and_at_the_last(data: Path, tmp_path: Path) -> None:
    config = tiny(data, steps=5)
    config = replace(
        config, checkpoint=replace(config.checkpoint, every=2), eval=replace(config.eval, every=3)
    )
    assert run(tmp_path, config)[0] == [2, 4, 5]
    held_out = [line["step"] for line in read_lines(tmp_path / RECORD) if "held_out_loss" in line]
    assert held_out == [0, 2, 4]


def test_evaluating_does_not_move_a_bit_and_every_step_has_its_line(data: Path, tmp_path: Path) -> None:
    found = []
    for name, every in (("often", 1), ("never", 0)):
        (tmp_path / name).mkdir()
        config = tiny(data)
        _, mine = run(tmp_path / name, replace(config, eval=replace(config.eval, every=every)))
        started, _, *steps = read_lines(tmp_path / name / RECORD)
        assert (started["event"], started["step"], started["restarts"]) == ("started", 0, 0)
        assert [line["cursor"] for line in steps] == [16, 32, 48]
        found.append(mine.training.state_sha256())
    assert found[0] == found[1]
