"""A process that would compute other bits than the ranks says so before it is ready for a seat among them.

Where it had one, the comparison of configurations raised on all ranks: a file of data that was replaced under
a run ended it at the next death.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path

import pytest

import instep
from instep.elastic.heartbeat import HeartbeatPage
from instep.elastic.rendezvous import ControlChannel, WorkerSpec
from instep.errors import ContractBroken
from instep.run import script_training
from instep.run.script import ScriptCall, Started
from tests.run.loops import Loop

Come = Callable[[str, int], str]


@pytest.fixture
def number(tmp_path: Path) -> int:
    """That of the contract on which the ranks of the run in ``tmp_path / "run"`` have agreed."""
    run = instep.Run(tmp_path / "run", contract={"data.sha256": "these"})
    with closing(run):
        Loop(run).train(1)
        return run._steps.training.contract_number


@pytest.fixture
def come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Come]:
    """A new process that reads some data, of a run whose ranks have agreed on a number: its phase then."""
    page = HeartbeatPage.create()
    ours, theirs = Pipe()
    begun = Started(
        ControlChannel(WorkerSpec(0, page.file, theirs)),
        ScriptCall(Path(), given={"run_dir": str(tmp_path / "run")}),
    )

    def new(data: str, contract: int) -> str:
        page.contract = contract
        with closing(instep.Run(contract={"data.sha256": data})) as run:
            loop = Loop(run)
            run.steps(1, model=loop.model, optimizer=loop.optimizer)
        return page.position(0).phase

    monkeypatch.setattr("instep.run.run.started", lambda: begun)
    with closing(page.file), ours, theirs:
        yield new


def test_one_that_computes_as_the_ranks_do_is_ready(number: int, come: Come) -> None:
    assert number > 0
    assert come("these", number) == "built"


def test_as_long_as_the_ranks_have_not_agreed_all_are_ready(number: int, come: Come) -> None:
    assert come("others", 0) == "built"


def test_one_that_reads_other_data_is_never_ready_and_names_them(number: int, come: Come) -> None:
    with pytest.raises(ContractBroken, match=r"^not admitted: .* make these the same: data\.sha256: "):
        come("others", number)


def test_one_that_computes_other_numbers_is_never_ready(
    number: int, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_training, "canary", lambda device: "0" * 16)
    with pytest.raises(
        ContractBroken, match="of one fixed micro-batch: suspect that rank's hardware: canary"
    ):
        come("these", number)
