"""An exchange that the training thread made itself was interrupted (Ctrl-C, an alarm), and a program that
caught it made another step: the header of that one was paired with what the other rank still sent for the
first, and gloo ended the process with SIGABRT. The group is lost then, on all ranks, and at once."""

import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import PeerLost
from instep.mesh.mesh import Mesh
from instep.net import peers, process_group
from instep.net.lane import Handle, Work
from tests.far import evenly, hosts
from tests.world import world


@world(2)
@pytest.mark.parametrize(("kind", "at_wait"), [(TimeoutError, 1), (KeyboardInterrupt, 2)])
def test_no_later_exchange_is_paired_with_one_that_was_interrupted(
    mesh: Mesh, kind: type[BaseException], at_wait: int
) -> None:
    model = instep.DataParallel(nn.Linear(300, 300), process_group=mesh, strategy="flat")
    model._reducer.exchange.transport.at_once_bytes = 0  # ranks meet, and then exchange slices
    train(model)
    if mesh.rank == 0:
        interrupt(model.group.peers, "wait", kind, at_wait)
        with pytest.raises(kind):
            train(model)
        with pytest.raises(PeerLost, match="rank 0 was interrupted during the exchange of bucket 0"):
            train(model)
    else:
        # All of the first exchange may have come by then. gloo does not end the wait for a message begun.
        with pytest.raises(PeerLost, match=r"^after .*: .* left the exchange of bucket 0: ") as lost:
            train(model, steps=2)
        assert "then the backend said" in str(lost.value) or lost.value.ranks == (0,)
    with pytest.raises(PeerLost, match=r"This group is lost: .* wrap model.module"):
        train(model)
    model.close()


@world(2)
def test_none_is_paired_with_one_that_ended_between_two_messages(mesh: Mesh) -> None:
    model = instep.DataParallel(nn.Linear(300, 300), process_group=mesh, strategy="flat")
    model._reducer.exchange.transport.at_once_bytes = 0
    train(model)
    if mesh.rank == 0:
        interrupt(model._reducer.exchange.transport, "reduce", MemoryError, 1)
        with pytest.raises(MemoryError):
            train(model)
    with pytest.raises(PeerLost, match=r"rank 0 was interrupted|a rank left the exchange of bucket 0"):
        train(model)
    model.close()


@pytest.mark.parametrize(("between_hosts", "at_wait"), [(False, 2), (True, 1), (True, 2)])
def test_none_is_paired_where_ranks_of_several_hosts_share_memory_on_each(
    between_hosts: bool, at_wait: int
) -> None:
    with hosts(*evenly(2, 2)):
        world(4)(loses_its_group)(
            between_hosts=between_hosts, at_wait=at_wait, have_ended=threading.Barrier(4)
        )


def loses_its_group(mesh: Mesh, between_hosts: bool, at_wait: int, have_ended: threading.Barrier) -> None:
    model = instep.DataParallel(nn.Linear(300, 300), process_group=mesh, strategy="flat")
    train(model)
    if mesh.rank == 0:
        if between_hosts:
            interrupt(model.group.peers, "wait", KeyboardInterrupt, at_wait)
        else:
            interrupt(model.group.near.pg._rounds, "synchronize", KeyboardInterrupt, at_wait)
        with pytest.raises(KeyboardInterrupt):
            train(model)
    with pytest.raises(PeerLost, match="rank 0") as lost:
        train(model, steps=2)
    assert ("rank 0 was interrupted during the exchange of bucket 0" in str(lost.value)) == (mesh.rank == 0)
    have_ended.wait(30)
    model.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_rank_finds_out_whose_message_gloo_had_begun_when_it_closed_the_connection(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo does not end the wait for such a message (``Peers._look``): it was the deadline."""
    monkeypatch.setattr(peers, "LOOK_S", 0.2)
    monkeypatch.setattr(peers, "CONFIRM_S", 0.1)
    with hosts(*evenly(2, 1)) if far else nullcontext():
        world(2)(waits_for_what_gloo_does_not_end)()


def waits_for_what_gloo_does_not_end(mesh: Mesh) -> None:
    group, ended = mesh.world.duplicate(), threading.Event()
    if mesh.rank == 0:
        interrupt(group.peers, "wait", KeyboardInterrupt, 1)
        with pytest.raises(KeyboardInterrupt):
            group.run(lambda: None, "an exchange")
    else:
        with pytest.raises(PeerLost, match=r"^rank 0 \(pid .*\) left an exchange: rank 1 waited ") as lost:
            group.run(ended.wait, "an exchange")
        assert lost.value.ranks == (0,)
    ended.set()
    group.close()


def test_the_end_of_a_process_does_not_wait_for_such_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of its group would, until the backend's deadline."""
    group, never = object(), Handle(Work("a message"))
    count = sys.getrefcount(group)
    monkeypatch.setattr(process_group, "_lost", [(group, [never])])
    monkeypatch.setattr(process_group, "_with_pending", ())
    monkeypatch.setattr(process_group, "EXIT_S", 0.0)
    process_group._end_pending_operations()
    process_group._lost.clear()
    assert sys.getrefcount(group) == count + 1


def train(model: instep.DataParallel, steps: int = 1) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 300)).sum().backward()


def interrupt(owner: Any, method: str, kind: type[BaseException], at_call: int) -> None:
    """Call number ``at_call`` of a method from now on raises. Of waits the first is for headers."""
    original, calls = getattr(owner, method), [0]

    def called(*args: object, **named: object) -> None:
        calls[0] += 1
        if calls[0] == at_call:
            raise kind
        original(*args, **named)

    setattr(owner, method, called)
