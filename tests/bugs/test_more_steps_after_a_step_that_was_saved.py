"""A run that had ended with a checkpoint that was due anyway did not go on with more steps.

Its state was to be saved again where it had come from, under the new contract, and the checkpoint was refused
as one of another run: "exists already and is never overwritten".
"""

from __future__ import annotations

from pathlib import Path

import pytest

import instep
from instep.record.directory import CHECKPOINTS, RECORD
from tests.run.loops import Loop


def run_on(path: Path, num_steps: int, *, fails_at: int = -1, **words: object) -> list[int]:
    run = instep.Run(path, checkpoint={"every": 2}, **words)

    def fail(step: instep.Step) -> None:
        if step == fails_at:
            raise KeyError("on purpose")

    try:
        return Loop(run).train(num_steps, before=fail)
    finally:
        run.close()


def test_more_steps_that_were_accepted_are_made_from_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    assert run_on(tmp_path, 4) == [0, 1, 2, 3]
    saved = tmp_path / CHECKPOINTS / "step-00000004"
    before = saved.stat().st_ino, saved.stat().st_mtime_ns
    assert run_on(tmp_path, 6, resume=True) == [4, 5]
    assert (saved.stat().st_ino, saved.stat().st_mtime_ns) == before


def test_so_they_are_if_the_first_of_them_failed(tmp_path: Path) -> None:
    run_on(tmp_path, 4)
    for _ in range(2):
        with pytest.raises(KeyError):
            run_on(tmp_path, 6, fails_at=4, resume=True)
    assert (tmp_path / RECORD).read_text().count('"contract accepted"') == 2
    assert run_on(tmp_path, 6, resume=True) == [4, 5]
