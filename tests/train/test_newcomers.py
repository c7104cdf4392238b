"""A process that would compute other bits than the ranks says so before it is ready for a seat among them.

Where it had one, the comparison of configurations raised on all ranks: a file of data that was replaced under
a run ended it at the next death.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from instep.elastic.heartbeat import HeartbeatPage
from instep.elastic.rendezvous import ControlChannel, WorkerSpec
from instep.errors import ContractBroken
from instep.recipes.text import TextRecipe
from instep.run import membership
from instep.run.writer import RunWriter
from instep.train import worker
from instep.train.trainer import Trainer
from tests.train.test_trainer import config, world_of_one

Said = list[str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What workers say to their supervisor; the test's process keeps its signals, and does not end."""
    heard: Said = []
    monkeypatch.setattr(ControlChannel, "say", lambda self, what, **fields: heard.append(what))
    monkeypatch.setattr(membership, "listen_for_preemption", lambda stop: None)
    monkeypatch.setattr(worker, "exit_now", lambda code: None)
    return heard


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Trainer:
    """A rank of the run in ``tmp_path / "run"``."""
    trainer = Trainer(TextRecipe(config(data)), world_of_one())
    (tmp_path / "run").mkdir()
    with closing(RunWriter(tmp_path / "run", trainer, -1)) as writer:
        writer.started(0, [])
    return trainer


def come(data: Path, run_dir: Path, contract: int) -> None:
    """A new worker, which is sent home when it is ready; the ranks have agreed on number ``contract``."""
    recipe, page = TextRecipe(replace(config(data), run_dir=run_dir)), HeartbeatPage.create()
    page.contract = contract
    ours, theirs = Pipe()
    with closing(page.file), ours, theirs:
        ours.send_bytes(b"")
        worker.work(WorkerSpec(0, page.file, theirs), recipe)


def test_one_that_computes_as_the_ranks_do_is_ready(
    run: Trainer, said: Said, data: Path, tmp_path: Path
) -> None:
    assert run.contract_number > 0
    come(data, tmp_path / "run", run.contract_number)
    assert said == ["ready"]


def test_as_long_as_the_ranks_have_not_agreed_all_are_ready(
    run: Trainer, said: Said, data: Path, tmp_path: Path
) -> None:
    data.write_bytes(data.read_bytes()[::-1])
    come(data, tmp_path / "run", 0)
    assert said == ["ready"]


def test_one_that_reads_other_data_is_never_ready_and_names_them(
    run: Trainer, said: Said, data: Path, tmp_path: Path
) -> None:
    data.write_bytes(data.read_bytes()[::-1])
    with pytest.raises(
        ContractBroken, match=r"^it would compute other bits than the ranks .*: data\.sha256: "
    ):
        come(data, tmp_path / "run", run.contract_number)
    assert said == []


def test_one_that_computes_other_numbers_is_never_ready(
    run: Trainer, said: Said, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = run.contract_number
    monkeypatch.setattr(Trainer, "canary", "0" * 64)
    with pytest.raises(ContractBroken, match="the same numbers"):
        come(data, tmp_path / "run", number)
    assert said == []
