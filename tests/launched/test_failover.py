"""Faults in a run of the command: it goes on by itself, to the bits of the run that nothing disturbed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.record.directory import RECORD, SUMMARY, WORKERS
from tests.launched.command import (
    TORCHRUN,
    assert_same_run,
    events,
    faults,
    read_until,
    run,
    started_warm,
    summary,
    train,
)
from tests.launched.conftest import LONG, SLOWLY


@pytest.fixture(autouse=True)
def nothing_on_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever fails or not: of the command's own files in the temporary directory none is left."""
    with tempfile.TemporaryDirectory() as directory:  # short, because a socket's path goes into it
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert list(Path(directory).glob("instep-*")) == []


def test_a_rank_that_takes_a_lost_ones_place_has_no_hashes_and_none_waits_for_them(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """Survivors gathered those of the step before, without it, until the deadline; twice ended the run."""
    flags = (*recipe, "--record.leaves", "--timeout-s", 20, "-n", 2, "--run-dir", "run")
    ended = train(*flags, *faults("kill:rank=1,step=2,phase=gather"), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "never came" not in ended.err
    assert len(events(tmp_path / "run", "failure")) == 1
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_two_ranks_four_one_three_in_one_run_give_the_bits_of_one(
    longer: tuple[tuple[object, ...], Path], tmp_path: Path
) -> None:
    flags, reference = longer
    specs = ["resize:step=4,ranks=4", "resize:step=16,ranks=1", "resize:step=28,ranks=3"]
    ended = train(*flags, *SLOWLY, *faults(*specs), "-n", 2, "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", reference)
    starts = events(tmp_path / "run", "started", RECORD)
    assert [line["world_size"] for line in starts] == [2, 4, 1, 3]
    assert [line["generation"] for line in starts] == [1, 2, 3, 4]
    assert events(tmp_path / "run", "failure") == []


@pytest.mark.slow
def test_a_command_that_is_asked_to_end_is_resumed_on_other_ranks(
    longer: tuple[tuple[object, ...], Path], tmp_path: Path
) -> None:
    flags, reference = longer
    path = tmp_path / "run"
    with started_warm("train", *flags, *SLOWLY, "-n", 2, "--run-dir", path, cwd=tmp_path) as process:
        read_until(process, "held-out")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 75, err
    assert "SIGTERM: stopping after this step, with a checkpoint; a second signal stops at once\n" in err
    done = summary(path)["steps"]
    assert 0 < done < LONG
    assert f"stopped after {done} of {LONG} steps; --resume continues\n" in err
    resumed = train(*flags, "-n", 3, "--run-dir", path, "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_run(path, reference)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_finds_its_place_by_itself(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """The directory's name is made up, with what tells this start by torchrun from any other in it.

    One run stands for all under torchrun, for it imports torch five times.
    """
    launcher = [*TORCHRUN[:-1], "--nproc-per-node", 2, "--max-restarts", 1, TORCHRUN[-1]]
    flags = (*recipe, "--checkpoint.every", 2, *faults("kill:rank=1,step=5,phase=exchange"))
    env = {"TMPDIR": os.environ["TMPDIR"]}
    ended = run(*launcher, "instep", "train", *flags, cwd=tmp_path, env=env)
    assert ended.code == 0, ended.err
    (path,) = (tmp_path / "runs").iterdir()
    assert_same_run(path, undisturbed)
    shown = path.relative_to(tmp_path)
    assert f"resumed from {shown / 'checkpoints' / 'step-00000004'}, step 4" in ended.err
    assert (summary(path)["restarts"], summary(path)["world_size"]) == (1, 2)
    assert ended.out.count("state  sha256") == 1


def test_an_exception_that_comes_back_ends_the_run_with_both_in_its_words(
    recipe: tuple[str, ...], tmp_path: Path
) -> None:
    twice = faults(*["raise:rank=1,step=3"] * 2)
    ended = train(*recipe, *twice, "-n", 2, "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 1, ended.err
    _, _, last_words = ended.err.rpartition("instep train: error: ")
    first, *both = last_words.splitlines()
    assert first == "the same exception came twice at the same step:"
    assert len(both) == 2
    for line in both:
        assert "rank 1 (pid " in line
        assert "failed with RuntimeError: fault injected at step 3 in forward" in line
    assert ended.out == ""
    assert not (tmp_path / "run" / WORKERS).exists()
    assert not (tmp_path / "run" / SUMMARY).exists()
