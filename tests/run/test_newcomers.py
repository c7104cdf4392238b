"""Which errors mean that a process has lost its group, and which are its own; who may take part in a run.

A process that would compute other bits than the ranks says so before it is ready for a seat.
When it had one, a file of data that was replaced under a run ended the run at the next death.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import instep
from instep.elastic.heartbeat import HeartbeatPage
from instep.elastic.rendezvous import Assignment, ControlChannel, WorkerSpec
from instep.errors import ContractBroken, Desync, PeerLost, ReplicasDiffer
from instep.launch.memory_file import MemoryFile
from instep.record.directory import RECORD
from instep.run import script_training
from instep.run.membership import Membership, require_contract
from instep.run.script import ScriptCall, Started
from tests.run.loops import Loop


def member(*, phase: str = "forward", over: bool = True) -> Membership:
    """Rank 1 of 2, which has made four steps; ``over``: whether the supervisor says that its group is."""
    heartbeat = SimpleNamespace(worker=5, enter=lambda phase: None)
    page = SimpleNamespace(position=lambda worker: SimpleNamespace(phase=phase))
    channel: Any = SimpleNamespace(heartbeat=heartbeat, page=page, is_over_soon=lambda: over)
    training: Any = SimpleNamespace(heartbeat=heartbeat, steps_done=4)
    found = Membership(channel, training)
    found.take(Assignment(2, 1, 2, MemoryFile(0, 0, 0)))
    return found


def of_torch() -> RuntimeError:
    """What a collective of torch raises, here because there is no group."""
    try:
        dist.all_reduce(torch.zeros(1), group=object())
    except AttributeError as error:
        return RuntimeError("Connection reset by peer").with_traceback(error.__traceback__)
    raise AssertionError


@pytest.mark.parametrize("error", [PeerLost("rank 0 has ended", ranks=(0,)), Desync("out of step")])
def test_the_loss_of_a_rank_is_told_to_the_supervisor(error: RuntimeError) -> None:
    told = member(over=False).parted(error)
    assert (told["rank"], told["step"], told["phase"]) == (1, 4, "forward")
    assert told["error"] == f"{type(error).__name__}: {error}"
    assert told["ranks"] == list(getattr(error, "ranks", ()))


def test_what_a_collective_of_torch_raises_is_a_loss_if_the_supervisor_says_so() -> None:
    assert member().parted(of_torch())["error"] == "RuntimeError: Connection reset by peer"
    with pytest.raises(RuntimeError, match="Connection reset"):
        member(over=False).parted(of_torch())


def test_what_meeting_ranks_raise_is_a_loss_if_the_supervisor_says_so() -> None:
    assert member(phase="join").parted(RuntimeError("connect"))["phase"] == "join"
    with pytest.raises(RuntimeError, match="connect"):
        member(phase="join", over=False).parted(RuntimeError("connect"))


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ReplicasDiffer("other bits")])
def test_an_error_of_its_own_is_raised(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError) as raised:
        member().parted(error)
    assert raised.value is error


def test_a_process_of_another_contract_takes_no_part(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text("")
    require_contract({"seed": 0}, 7, 7, tmp_path)
    require_contract({"seed": 0}, 7, 0, tmp_path)  # the others have not agreed yet
    with pytest.raises(ContractBroken, match="not admitted: its numerical configuration"):
        require_contract({"seed": 1}, 8, 7, tmp_path)


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
