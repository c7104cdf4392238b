"""Which errors mean that a process has lost its group, and which are its own; who may take part in a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.elastic.rendezvous import Assignment
from instep.errors import ContractBroken, Desync, PeerLost, ReplicasDiffer
from instep.launch.memory_file import MemoryFile
from instep.record.directory import RECORD
from instep.run.membership import Membership, require_contract


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
