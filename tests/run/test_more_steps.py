"""A run that ended with a checkpoint that was due anyway goes on with more steps, from that checkpoint."""

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


@pytest.mark.parametrize("num_failures", [0, 2])
def test_more_steps_are_made_also_if_the_first_of_them_failed(tmp_path: Path, num_failures: int) -> None:
    """The checkpoint was to be saved again under the new contract, and was refused as another run's."""
    assert run_on(tmp_path, 4) == [0, 1, 2, 3]
    saved = tmp_path / CHECKPOINTS / "step-00000004"
    before = saved.stat().st_ino, saved.stat().st_mtime_ns
    for _ in range(num_failures):
        with pytest.raises(KeyError):
            run_on(tmp_path, 6, fails_at=4, resume=True)
    assert (tmp_path / RECORD).read_text().count('"contract accepted"') == num_failures
    assert run_on(tmp_path, 6, resume=True) == [4, 5]
    assert (saved.stat().st_ino, saved.stat().st_mtime_ns) == before
