"""Every operation and message does what it says on a few ranks, and ends when a rank does not come."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import instep
from instep.comm import ring
from instep.comm.perform import perform
from instep.errors import PeerLost
from instep.launch.launch import launch
from instep.launch.rank_exit import RankFailed
from instep.mesh.mesh import Mesh
from instep.net import device
from instep.net.hang_report import Problem
from instep.net.host_group import num_on_each_host
from instep.net.messages import Messages, flat
from instep.net.peers import own_peer
from instep.net.process_group import SHORT_BYTES
from tests.comm.inputs import CountingMessages, bits, drawn
from tests.far import evenly, host_group, hosts
from tests.world import world

PATIENCE_S = 20
OPERATION = "the gathering of a test"
PROBLEM = Problem("this has happened", "this, in short", "Do that")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_moves_or_adds_what_it_says(size):
    world(size)(operates)()


def lengths(size: int) -> list[list[int]]:
    """How many elements row r sends to column d; some nothing, some ranks nothing at all."""
    return [[(3 * sender + receiver * sender) % 4 for receiver in range(size)] for sender in range(size)]


def parts(sender: int, receiver: int, length: int) -> list[int]:
    return [100 * sender + 10 * receiver + i for i in range(length)]


def operates(mesh):
    group, me, size = mesh.world.group, mesh.rank, mesh.world.size
    table = lengths(size)
    for dtype in DTYPES:
        out = torch.zeros(3 * size, dtype=dtype)
        group.all_gather(out, torch.tensor([10, 11, 12], dtype=dtype) + 20 * me, OPERATION)
        assert out.tolist() == [20 * rank + x for rank in range(size) for x in (10, 11, 12)]
    for dtype in (torch.float32, torch.int64):
        message = [x for receiver in range(size) for x in parts(me, receiver, table[me][receiver])]
        expected = [x for sender in range(size) for x in parts(sender, me, table[sender][me])]
        out, sizes = torch.zeros(len(expected), dtype=dtype), [row[me] for row in table]
        group.all_to_all(out, torch.tensor(message, dtype=dtype), sizes, table[me], OPERATION)
        assert out.tolist() == expected
    for root in range(size):
        x = torch.full((2, 3), float(me))
        group.broadcast(x, OPERATION, root=root)
        assert set(x.flatten().tolist()) == {float(root)}
    x = torch.tensor([1, me, 1 << me])
    group.all_reduce(x, OPERATION)
    assert x.tolist() == [size, sum(range(size)), (1 << size) - 1]
    for sent in ([b"a", b"bcd", b""], [b""] * 3, [b"  blanks  ", b"\0\xff", b"x" * 1000]):
        assert group.all_gather_bytes(sent[me], OPERATION) == sent[:size]


@world(3)
def test_too_many_bytes_are_an_error_on_every_rank_that_names_the_one(mesh):
    group = mesh.world.group
    sent = b"x" * (10 if mesh.rank == 1 else 3)
    with pytest.raises(
        ValueError, match=f"{OPERATION}: rank 1 has 10 bytes, more than the 9 that a rank may"
    ):
        group.all_gather_bytes(sent, OPERATION, limit=9)
    assert group.all_gather_bytes(sent, OPERATION, limit=10) == [b"xxx", b"x" * 10, b"xxx"]


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


@world(2)
def test_a_rank_that_leaves_turns_the_backend_s_error_into_a_lost_peer(mesh):
    if mesh.rank == 1:
        return
    with pytest.raises(PeerLost, match=f"a rank left {OPERATION}: .* then the backend said: ") as lost:
        mesh.world.group.all_gather(torch.ones(2), torch.ones(1), OPERATION)
    assert lost.value.operation == OPERATION
    assert isinstance(lost.value.__context__, RuntimeError)


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


@world(2)
def test_two_ranks_send_to_each_other_at_once_and_in_order(mesh):
    messages = CountingMessages(mesh.world.pg)
    other = 1 - messages.rank
    for num_elements in (0, 1, 1000, 1 << 20):
        found = torch.empty(num_elements)
        messages.together([(drawn(messages.rank, num_elements), other)], [(found, other)])
        assert bits(found) == bits(drawn(other, num_elements))
    assert (messages.num_messages, messages.bytes_sent) == (3, 4 * (1 + 1000 + (1 << 20)))
    received = [torch.empty(1, dtype=torch.int64) for _ in range(5)]
    if messages.rank == 0:
        messages.together([(torch.tensor([k]), 1) for k in range(5)], [])
    else:
        messages.together([], [(x, 0) for x in received])
        assert torch.cat(received).tolist() == list(range(5))


@world(4, dp=2, pp=2)
def test_an_error_names_global_ranks(mesh):
    """Rank 3 leaves without a message."""
    axis = mesh.along["dp"]
    messages = Messages(axis.pg, axis.ranks)
    assert (messages.rank, messages.size, messages.ranks) == (axis.rank, 2, axis.ranks)
    if mesh.rank == 2:
        operation = "a message from rank 3"
        with pytest.raises(
            PeerLost, match=f"rank 2 waited for {operation}, which failed; the backend reports: "
        ) as caught:
            messages.together([], [(torch.empty(3), 1)])
        assert caught.value.ranks == (3,) and caught.value.operation == operation


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(2, 3).t(), r"shape \(3, 2\) with strides \(1, 3\): pass x.contiguous\(\)"),
        (torch.ones(1).expand(3), r"pass x.contiguous\(\)"),
        (torch.ones(3, dtype=torch.complex64).conj(), r"pass x.resolve_conj\(\)"),
        (torch.ones(3, device="meta"), "got one on meta"),
    ],
)
def test_memory_that_is_not_the_tensor_is_refused(x, words):
    messages = Messages(None)
    uses = (
        flat,
        lambda x: perform(ring.all_reduce, x, messages),
        lambda x: messages.together([(x, 1)], []),
        lambda x: messages.together([], [(x, 1)]),
    )
    for use in uses:
        with pytest.raises(ValueError, match=words):
            use(x)


def test_one_rank_has_nobody_to_send_to():
    messages = Messages(None)
    messages.together([], [])
    with pytest.raises(ValueError, match="between two ranks, got one to rank 0 itself"):
        messages.together([(torch.ones(1), 0)], [])


@pytest.mark.parametrize(
    ("of_rank", "expected"),
    [
        ("a", 1),
        ("aaa", 3),
        ("aabb", 2),
        ("abc", 1),
        ("aabbcc", 2),
        ("aab", None),
        ("abab", None),
        ("abba", None),
    ],
)
def test_hosts_count_where_they_have_as_many_ranks_each_with_numbers_in_a_row(of_rank, expected):
    table = [replace(own_peer(rank), host=host) for rank, host in enumerate(of_rank)]
    assert num_on_each_host(table) == expected


@pytest.mark.parametrize(("num_hosts", "num_local"), [(2, 2), (2, 3), (3, 2)])
def test_ranks_of_one_host_share_memory(num_hosts, num_local):
    with hosts(*evenly(num_hosts, num_local)):
        world(num_hosts * num_local)(shares_memory_on_its_host)(num_hosts=num_hosts, num_local=num_local)


def shares_memory_on_its_host(mesh: Mesh, num_hosts: int, num_local: int) -> None:
    group = host_group(mesh)
    assert group.near is not None and group.near.backend == "shm"
    assert (group.num_hosts, group.num_local) == (num_hosts, num_local)
    assert (group.host, group.place) == divmod(mesh.rank, num_local)
    assert group.near.ranks == tuple(range(group.host * num_local, (group.host + 1) * num_local))
    on_each = f"on {num_hosts} hosts, over shm on each and gloo between them"
    assert repr(group) == f"<group of {mesh.world_size} ranks {on_each}; this is rank {mesh.rank}>"
    mine = group.allocate(8, 64, torch.device("cpu")).elements(torch.int64).fill_(mesh.rank)
    shown = group.near.map_all([mine], "the test")
    assert shown is not None and [int(of_rank[0]) for of_rank in shown] == list(group.near.ranks)
    group.near.barrier("the test")


@pytest.mark.parametrize("of_rank", [[0, 0, 1], [0, 1, 0, 1], [0, 1, 2], [0, 0, 0]])
def test_other_ranks_send_to_all_as_ever(of_rank):
    with hosts(*of_rank):
        world(len(of_rank))(shares_nothing)()


def test_ranks_share_nothing_where_those_of_one_host_cannot(monkeypatch):
    share = device.share_memory

    def not_on_host_one(store, rank, ranks, timeout):
        return share(store, rank, ranks, timeout) if 0 in ranks else None

    monkeypatch.setattr(device, "share_memory", not_on_host_one)
    with hosts(*evenly(2, 2)):
        world(4)(shares_nothing)()


def shares_nothing(mesh: Mesh) -> None:
    group = host_group(mesh)
    assert group.near is None
    assert repr(group) == f"<group of {mesh.world_size} ranks over gloo; this is rank {mesh.rank}>"
    group.barrier("the test")
    assert group.allocate(8, 64, torch.device("cpu")).fd is None
