"""Faults in a run of the command: it goes on by itself, to the bits of the run that nothing disturbed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.run.folder import FAULTS, SUMMARY, WORKERS
from instep.run.jsonl import read_lines
from instep.run.ledger import LEDGER
from tests.launched.command import TORCHRUN, instep, read_until, run, started_warm, steps_of, train
from tests.launched.conftest import LONG, SLOWLY, STEPS


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / SUMMARY).read_text())


def faults(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--fault", spec)]


def events(run_dir: Path, event: str, file: str = FAULTS) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir / file) if line.get("event") == event]


def assert_same_run(run_dir: Path, reference: Path, global_size: int = 16) -> None:
    """The same steps, each once, from data that nobody else has read, to the same weights and moments."""
    for field in ("state_sha256", "fingerprint", "loss_first", "loss_last", "held_out_loss"):
        assert summary(run_dir)[field] == summary(reference)[field], field
    lines = steps_of(run_dir)
    assert lines == steps_of(reference)
    assert [(line["step"], line["cursor"]) for line in lines] == [
        (step, step * global_size) for step in range(1, len(lines) + 1)
    ]
    assert not (run_dir / WORKERS).exists()


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
    flags = (*recipe, "--ledger.leaves", "--timeout-s", 20, "-n", 2, "--run-dir", "run")
    ended = train(*flags, *faults("kill:rank=1,step=2,phase=gather"), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "never came" not in ended.err
    assert len(events(tmp_path / "run", "failure")) == 1
    assert_same_run(tmp_path / "run", undisturbed)


def test_four_faults_in_one_run_do_not_move_a_bit(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    specs = [
        "kill:rank=1,step=2,phase=exchange",
        "kill:rank=0,step=4,phase=update",
        "raise:rank=1,step=5,phase=backward",
        "kill:rank=0,step=6,phase=save",
    ]
    flags = (*recipe, "--checkpoint.every", 2, "-n", 2, "--run-dir", "run")
    ended = train(*flags, *faults(*specs), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert summary(tmp_path / "run")["world_size"] == 2
    failures = events(tmp_path / "run", "failure")
    # A rank may raise before the death of another, one step earlier, is noticed.
    assert sorted((line["step"], line["rank"], line["phase"]) for line in failures) == [
        (2, 1, "exchange"),
        (4, 0, "update"),
        (5, 1, "backward"),
        (6, 0, "save"),
    ]
    recoveries = events(tmp_path / "run", "recovery")
    assert 1 <= len(recoveries) <= len(failures)
    assert all(line["source"] in ("a survivor", "the snapshot") for line in recoveries)
    assert ended.err.count("was killed by SIGKILL") == 3
    assert ended.out.count("state  sha256") == 1
    compared = instep("compare", "run", undisturbed, cwd=tmp_path)
    assert compared.code == 0, compared.out
    assert f"the same bits in all {STEPS} steps" in compared.out


@pytest.mark.slow
def test_two_ranks_four_one_three_in_one_run_give_the_bits_of_one(
    longer: tuple[tuple[object, ...], Path], tmp_path: Path
) -> None:
    flags, reference = longer
    specs = ["resize:step=4,ranks=4", "resize:step=16,ranks=1", "resize:step=28,ranks=3"]
    ended = train(*flags, *SLOWLY, *faults(*specs), "-n", 2, "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", reference)
    starts = events(tmp_path / "run", "started", LEDGER)
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
        read_until(process, "held out")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 75, err
    assert "SIGTERM: ending after this step, with a checkpoint; once more ends at once\n" in err
    done = summary(path)["steps"]
    assert 0 < done < LONG
    assert f"stopped after step {done} of {LONG}; --resume goes on\n" in err
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
