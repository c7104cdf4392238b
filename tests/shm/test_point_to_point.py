"""Messages reach the rank and the tag that they are for, in any order, of any length."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from instep.errors import Desync, PeerLost
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
from tests.world import world

LONG = 1 << 20


@world(2, backend="shm")
def test_messages_of_one_tag_come_in_the_order_in_which_they_were_sent(mesh):
    pg = group_of(mesh)
    if mesh.rank == 0:
        for work in [pg.send([torch.tensor([n])], 1, n % 2) for n in range(40)]:
            work.wait()
        return
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(40)]
    order = [*range(1, 40, 2), *range(0, 40, 2)]  # all of tag 1, then all of tag 0, which were kept
    for work in [pg.recv([found[n]], 0, n % 2) for n in order]:
        work.wait()
    assert [x.item() for x in found] == list(range(40))


@world(4, backend="shm")
def test_a_message_from_anybody_tells_who_sent_it(mesh):
    pg = group_of(mesh)
    if mesh.rank:
        for n in range(5):
            pg.send([torch.tensor([10 * mesh.rank + n])], 0, 4).wait()
        return
    found = []
    for _ in range(15):
        x = torch.zeros(1, dtype=torch.int64)
        work = pg.recv_anysource([x], 4)
        work.wait()
        assert x.item() // 10 == work._source_rank()
        found.append(x.item())
    assert sorted(found) == [10 * rank + n for rank in (1, 2, 3) for n in range(5)]
    for rank in (1, 2, 3):
        own = [x for x in found if x // 10 == rank]
        assert own == sorted(own)


@world(3, backend="shm")
def test_receives_from_anybody_and_from_one_share_what_comes(mesh):
    pg = group_of(mesh)
    if mesh.rank:
        for work in [pg.send([torch.tensor([mesh.rank])], 0, 0) for _ in range(4)]:
            work.wait()
        return
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(8)]
    works = [pg.recv([x], 1 + n // 2, 0) for n, x in enumerate(found[:4])]
    works += [pg.recv_anysource([x], 0) for x in found[4:]]
    for work in reversed(works):
        work.wait()
    assert [x.item() for x in found[:4]] == [1, 1, 2, 2]
    assert sorted(x.item() for x in found[4:]) == [1, 1, 2, 2]
    assert [work._source_rank() for work in works] == [x.item() for x in found]


@world(2, backend="shm")
def test_a_message_goes_to_the_oldest_receive_though_it_arrives_while_these_are_looked_through(mesh):
    pg = group_of(mesh)
    if mesh.rank == 1:
        pg.send([torch.ones(1)], 0, 0).wait()
    calls.barrier(pg).wait()
    if mesh.rank == 0:
        xs = torch.zeros(2, 1)
        first, second = pg.recv([xs[0]], 1, 0), pg.recv_anysource([xs[1]], 0)
        poll = pg._messages.boxes.poll
        pg._messages.boxes.poll = lambda *args: setattr(
            pg._messages.boxes, "poll", poll
        )  # the first time None
        assert not second.is_completed() and first.is_completed()
    calls.barrier(pg).wait()


@pytest.fixture
def left() -> threading.Event:
    return threading.Event()


@world(3, backend="shm")
def test_a_rank_that_has_left_is_not_missed_while_another_may_send(mesh, left):
    pg = group_of(mesh)
    if mesh.rank == 2:
        pg.shutdown()
        left.set()
    elif mesh.rank == 1:
        x = torch.zeros(1)
        pg.recv([x], 0, 1).wait()  # rank 0 waits for anybody now, and has seen that rank 2 is gone
        pg.send([x], 0, 0).wait()
    else:
        assert left.wait(PATIENCE_S)
        x = torch.zeros(1)
        work = pg.recv_anysource([x], 0)
        with pytest.raises(RuntimeError, match="did not end within"):
            work.wait(timedelta(seconds=0.5))
        pg.send([torch.ones(1)], 1, 1).wait()
        work.wait()
        assert x.item() == 1 and work._source_rank() == 1


@world(2, backend="shm")
@pytest.mark.parametrize("expected", [torch.zeros(2), torch.zeros(0), torch.zeros(3).int()])
@pytest.mark.parametrize("kept", [False, True])
def test_a_message_that_does_not_fit_is_an_error_that_names_both_sides(mesh, expected, kept):
    pg, x, other = group_of(mesh), expected.clone(), torch.zeros(1)
    if mesh.rank == 0:
        pg.send([torch.ones(3)], 1, 8).wait()
        pg.send([other], 1, 9).wait()
        with pytest.raises(PeerLost, match="rank 1, which failed: Desync"):
            calls.barrier(pg).wait()
        return
    if kept:  # it has arrived when it is asked for
        pg.recv([other], 0, 9).wait()
    words = f"rank 0 sends 3 torch.float32 with tag 8, rank 1 receives {x.numel()} {x.dtype} "
    for use in (lambda: pg.recv([x], 0, 8), lambda: pg.recv([x], 0, 8), lambda: calls.barrier(pg)):
        with pytest.raises(Desync, match=words):
            use().wait()
    assert x.tolist() == expected.tolist()


@world(2, backend="shm")
def test_after_a_collective_has_failed_messages_raise_what_it_raised(mesh):
    pg = group_of(mesh)
    with pytest.raises(Desync) as first:
        calls.all_reduce(pg, torch.ones(1 + mesh.rank)).wait()
    for call in (pg.send, pg.recv):
        with pytest.raises(Desync) as again:
            call([torch.ones(1)], 1 - mesh.rank, 0)
        assert str(again.value) == str(first.value)


@world(2, backend="shm")
def test_what_is_under_way_when_a_rank_leaves_ends_there(mesh):
    pg = group_of(mesh)
    works = [pg.recv([torch.zeros(1)], 1 - mesh.rank, 0), pg.recv_anysource([torch.zeros(1)], 1)]
    pg.shutdown()
    for work in works:
        with pytest.raises(PeerLost):
            work.wait()
    with pytest.raises(PeerLost, match="this rank left the group"):
        pg.recv([torch.zeros(1)], 1 - mesh.rank, 2)


@world(2, backend="shm")
def test_ranks_that_are_none_or_oneself_are_refused(mesh):
    pg = group_of(mesh)
    for rank in (mesh.rank, 2, -1):
        with pytest.raises(
            ValueError, match=f"rank {mesh.rank} of a group of 2: expected another rank, got {rank}"
        ):
            pg.send([torch.ones(1)], rank, 0)
        with pytest.raises(ValueError, match="expected another rank"):
            pg.recv([torch.ones(1)], rank, 0)
    calls.barrier(pg).wait()


@world(3, by="process", backend="shm")
def test_torch_s_functions_send_and_receive(mesh):
    me = mesh.rank
    successor, predecessor = (me + 1) % 3, (me - 1) % 3
    found, ring = torch.zeros(2), torch.zeros(3 * LONG)
    mine = torch.full((3 * LONG,), float(me))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2,), float(me)), successor, tag=1),
            dist.P2POp(dist.irecv, found, predecessor, tag=1),
            dist.P2POp(dist.irecv, ring, predecessor, tag=2),
            dist.P2POp(dist.isend, mine, successor, tag=2),
        ]
    )
    for work in works:
        work.wait()
    assert set(found.tolist()) == set(ring.tolist()) == {float(predecessor)}
    if me == 0:
        sources = sorted(dist.recv(found) for _ in range(2))
        assert sources == [1, 2]
        dist.send(found, 1, tag=5)
    else:
        dist.send(torch.ones(2), 0)
    if me == 1:
        assert dist.recv(found, src=0, tag=5) == 0
    # Ranks of a subgroup are known by their global numbers.
    pair = dist.new_group([1, 2], backend="shm")
    if me == 1:
        dist.send(torch.full((2,), 7.0), 2, group=pair)
    elif me == 2:
        assert dist.recv(found, group=pair) == 1
        assert found.tolist() == [7, 7]
