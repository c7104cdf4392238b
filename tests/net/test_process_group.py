"""Every operation does what it says on one, two and three ranks, and ends when a rank does not come."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import instep
from instep.errors import PeerLost
from instep.launch.launch import launch
from instep.launch.rank_exit import RankFailed
from instep.net.hang_report import AFTER, Problem
from instep.net.messages import Messages
from instep.net.process_group import SHORT_BYTES, Group
from tests.world import world

PATIENCE_S = 20
OPERATION = "the gathering of a test"
PROBLEM = Problem("this has happened", "this, in short", "Do that")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


@pytest.fixture(params=[1, 2, 3])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_brings_everybody_s_part_in_group_order(size, dtype):
    world(size)(gathers)(dtype=dtype)


def gathers(mesh, dtype):
    out = torch.zeros(3 * mesh.world.size, dtype=dtype)
    mine = torch.tensor([10, 11, 12], dtype=dtype) + 20 * mesh.rank
    mesh.world.group.all_gather(out, mine, OPERATION)
    assert out.tolist() == [20 * rank + x for rank in range(mesh.world.size) for x in (10, 11, 12)]


def lengths(size: int) -> list[list[int]]:
    """How many elements row r sends to column d; some nothing, some ranks nothing at all."""
    return [[(3 * sender + receiver * sender) % 4 for receiver in range(size)] for sender in range(size)]


def parts(sender: int, receiver: int, length: int) -> list[int]:
    return [100 * sender + 10 * receiver + i for i in range(length)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_every_rank_gets_its_part_of_everybody_however_uneven(size, dtype):
    world(size)(sends_uneven_parts)(dtype=dtype)


def sends_uneven_parts(mesh, dtype):
    me, size = mesh.rank, mesh.world.size
    table = lengths(size)
    message = [x for receiver in range(size) for x in parts(me, receiver, table[me][receiver])]
    expected = [x for sender in range(size) for x in parts(sender, me, table[sender][me])]
    out = torch.zeros(len(expected), dtype=dtype)
    mesh.world.group.all_to_all(
        out,
        torch.tensor(message, dtype=dtype),
        [table[sender][me] for sender in range(size)],
        table[me],
        OPERATION,
    )
    assert out.tolist() == expected


def test_every_rank_may_be_the_root_of_a_broadcast(size):
    world(size)(broadcasts_from_each)()


def broadcasts_from_each(mesh):
    for root in range(mesh.world.size):
        x = torch.full((2, 3), float(mesh.rank))
        mesh.world.group.broadcast(x, OPERATION, root=root)
        assert set(x.flatten().tolist()) == {float(root)}


def test_reducing_sums(size):
    world(size)(reduces)()


def reduces(mesh):
    x = torch.tensor([1, mesh.rank, 1 << mesh.rank])
    mesh.world.group.all_reduce(x, OPERATION)
    size = mesh.world.size
    assert x.tolist() == [size, sum(range(size)), (1 << size) - 1]


@pytest.mark.parametrize(
    "sent",
    [
        [b"a", b"bcd", b""],
        [b"", b"", b""],
        [b"  blanks  ", b"\0\xff", b"x" * 1000],
    ],
    ids=["uneven", "empty", "any bytes"],
)
def test_bytes_of_any_length_arrive_whole(size, sent):
    world(size)(gathers_bytes)(sent=sent)


def gathers_bytes(mesh, sent):
    found = mesh.world.group.all_gather_bytes(sent[mesh.rank], OPERATION)
    assert found == sent[: mesh.world.size]


@world(3)
def test_too_many_bytes_are_an_error_on_every_rank_that_names_the_one(mesh):
    group = mesh.world.group
    sent = b"x" * (10 if mesh.rank == 1 else 3)
    with pytest.raises(
        ValueError, match=f"{OPERATION}: rank 1 has 10 bytes, more than the 9 that a rank may"
    ):
        group.all_gather_bytes(sent, OPERATION, limit=9)
    assert group.all_gather_bytes(sent, OPERATION, limit=10) == [b"xxx", b"x" * 10, b"xxx"]


@world(4, dp=2, tp=2)
def test_a_group_speaks_of_ranks_by_their_global_numbers(mesh):
    group = mesh.along["dp"].group
    dp, tp = divmod(mesh.rank, 2)
    assert (group.ranks, group.rank, group.size, group.global_rank) == ((tp, tp + 2), dp, 2, mesh.rank)
    assert [peer.rank for peer in group.peers.table] == [tp, tp + 2]
    assert {peer.pid for peer in group.peers.table} == {os.getpid()}


def test_a_world_of_one_copies_and_waits_for_nobody():
    group = Group(None, [7], 7, timeout_s=0.0)
    x, out = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    group.all_gather(out, x, OPERATION)
    assert out.tolist() == [0, 1, 2]
    group.all_to_all(out, x + 1, [3], [3], OPERATION)
    assert out.tolist() == [1, 2, 3]
    group.broadcast(x, OPERATION)
    group.all_reduce(x, OPERATION)
    assert x.tolist() == [0, 1, 2]
    assert group.all_gather_bytes(b"ab", OPERATION) == [b"ab"]
    assert (group.global_rank, group.peers.dead()) == (7, [])


class Meeting:
    """Ranks that are threads begin together, and one stays away, but there, until the others are done."""

    def __init__(self, num_others: int) -> None:
        self.together = threading.Barrier(num_others + 1)
        self.num_others = num_others
        self.done = threading.Semaphore(0)

    def stay_away(self) -> None:
        self.together.wait(PATIENCE_S)
        for _ in range(self.num_others):
            assert self.done.acquire(timeout=PATIENCE_S)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting(2)


@world(3, timeout_s=1.0)
@pytest.mark.parametrize("operation", ["all_to_all", "broadcast", "bytes"])
def test_a_rank_that_never_comes_is_named_by_the_deadline(mesh, meeting, operation):
    group = mesh.world.group
    if mesh.rank == 1:
        meeting.stay_away()
        return
    x = torch.ones(3)
    calls = {
        "all_to_all": lambda: group.all_to_all(x.clone(), x, [1, 1, 1], [1, 1, 1], OPERATION),
        "broadcast": lambda: group.broadcast(x, OPERATION, root=1),
        "bytes": lambda: group.all_gather_bytes(b"abc", OPERATION),
    }
    began = time.monotonic()
    meeting.together.wait(PATIENCE_S)
    try:
        with pytest.raises(PeerLost) as lost:
            calls[operation]()
    finally:
        meeting.done.release()
    assert time.monotonic() - began >= 1.0
    assert (lost.value.ranks, lost.value.operation) == ((1,), OPERATION)
    sentence, *table = str(lost.value).splitlines()
    assert re.search(rf"rank {mesh.rank} waited [\d.]+ s in {OPERATION}, and never came: rank 1 \(", sentence)
    if not table:
        assert sentence.endswith(f". Rank {2 - mesh.rank} shows where each rank stands")
        return
    _, first, *lines, last = table
    assert first.split()[:3] == ["1", "never", "came;"]
    assert last.startswith(f"rank 1 never came to {OPERATION}. Look there for other code")
    assert {line.split()[0] for line in lines[:2]} == {"0", "2"}
    mine = next(line for line in lines if line.split()[0] == str(mesh.rank))
    assert f" in {OPERATION} " in mine and " net/test_process_group.py:" in mine
    assert any(line.startswith("    net/test_process_group.py:") and " stay_away" in line for line in lines)


@world(3)
def test_ranks_that_disagree_compare_where_they_stand(mesh):
    group = mesh.world.group
    label = "the first way" if mesh.rank < 2 else "the second way"
    group.barrier(label)
    error = group.out_of_step(PROBLEM, OPERATION)
    if mesh.rank:
        assert str(error) == f"{PROBLEM}. Rank 0 shows where each rank stands" and error.told
        return
    sentence, head, *lines, last = str(error).splitlines()
    assert (sentence, last) == (str(PROBLEM), "this, in short. Do that")
    assert head.startswith("rank  where")
    assert [line.split()[0] for line in lines] == ["2", "0", "1"]
    assert " after the second way " in lines[0] and " after the first way " in lines[1]
    assert all("net/test_process_group.py:" in line for line in lines)


@world(3)
def test_notes_that_cannot_be_compared_are_left_out(mesh):
    if mesh.rank != 1:
        error = mesh.world.group.out_of_step(PROBLEM, OPERATION)
        assert str(error) == "this has happened. Do that"


@world(2)
def test_a_rank_that_leaves_turns_the_backend_s_error_into_a_lost_peer(mesh):
    if mesh.rank == 1:
        return
    with pytest.raises(PeerLost, match=f"a rank left {OPERATION}: .* then the backend said: ") as lost:
        mesh.world.group.all_gather(torch.ones(2), torch.ones(1), OPERATION)
    assert lost.value.operation == OPERATION
    assert isinstance(lost.value.__context__, RuntimeError)


@world(2, by="process", backend="shm")
def test_a_rank_of_a_group_that_met_in_another_thread_knows_its_own_line(mesh):
    group = mesh.world.duplicate()
    group.barrier(OPERATION)
    row = group.peers.flight.row()
    assert (row.status, row.operation) == (AFTER, OPERATION)
    assert " test_a_rank_of_a_group_that_met" in row.site and row.stack
    group.close()


@world(2, by="process")
def test_processes_know_each_other(mesh):
    group = mesh.world.group
    pids = [int(pid) for pid in group.all_gather_bytes(str(os.getpid()).encode(), OPERATION)]
    assert [peer.pid for peer in group.peers.table] == pids
    assert len(set(pids)) == 2
    assert group.peers.dead() == []


def meet_and_be_killed(directory: Path) -> None:
    mesh = instep.init(backend="gloo", timeout_s=PATIENCE_S)
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mesh.world.group.all_gather(torch.ones(2), torch.ones(1), OPERATION)
    except PeerLost as lost:
        facts = {"message": str(lost), "ranks": lost.ranks, "operation": lost.operation}
        (directory / "lost").write_text(json.dumps(facts))


def test_a_killed_process_is_named_with_its_id(tmp_path):
    pids: list[int] = []
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(meet_and_be_killed, (tmp_path,), ranks=2, on_start=pids.extend, grace_s=PATIENCE_S)
    lost = json.loads((tmp_path / "lost").read_text())
    assert lost["ranks"] == [1]
    assert lost["operation"] == OPERATION
    assert lost["message"].startswith(f"rank 1 (pid {pids[1]} on ")
    assert " died: rank 0 waited " in lost["message"]
    assert not dist.is_initialized()


@world(2)
def test_what_is_short_comes_with_its_length_in_one_message(mesh):
    group = mesh.world.group
    for length, messages in ((0, 1), (1, 1), (SHORT_BYTES, 1), (SHORT_BYTES + 1, 2), (100_000, 2)):
        before = group.peers.flight.number
        mine = bytes(range(256)) * 400 if mesh.rank else b""
        told = group.all_gather_bytes(mine[:length], "a test")
        assert told == [b"", (bytes(range(256)) * 400)[:length]]
        assert group.peers.flight.number == before + messages


@world(2)
def test_what_fails_in_this_process_is_no_lost_peer_here_and_one_elsewhere(mesh):
    group = mesh.world.group
    messages = Messages(group.pg, group.ranks)
    x, other = torch.ones(3), 1 - group.rank

    def exchange() -> None:
        if group.rank == 0:
            raise RuntimeError("can't allocate memory") from ValueError("as it is asked for too much")
        messages.together([], [(x, other)])

    if group.rank == 0:
        with pytest.raises(RuntimeError, match=r"^can't allocate memory$") as caught:
            group.run(exchange, "the test")
        assert not isinstance(caught.value, PeerLost)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "exchange" in [entry.name for entry in caught.traceback], "where it failed"
    else:
        began = time.monotonic()
        with pytest.raises(PeerLost, match="a rank left the test"):
            group.run(exchange, "the test")
        assert time.monotonic() - began < group.timeout_s / 2, "told at once"
