"""Messages reach the rank and the tag that they are for, and letters stay while a tensor of theirs lives."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from instep.errors import Desync, PeerLost
from instep.shm.mailboxes import MOST_SLOTS, SMALLEST_SLOT
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
from tests.shm.numbers import MOVED, same_bits, values
from tests.world import world


@world(2, backend="shm")
def test_words_and_tensors_of_every_dtype_length_and_layout_arrive(mesh):
    boxes = group_of(mesh).mailboxes
    x = values(1, 24, torch.float32).view(4, 6)
    sent = [x.t(), x[:, 2:3], torch.empty(0, 3), torch.tensor(5.0), torch.ones(()).expand(2, 2)]
    sent += [values(6, length, dtype) for dtype in MOVED for length in (1, 77, 70_001)]
    if mesh.rank == 0:
        boxes.send(1, 0, [7, -1, 1 << 62], sent)
        boxes.send(1, 0, [], [])
        boxes.flush("the end")
    else:
        words, parts = boxes.take(0, 0, "a message")
        assert words == [7, -1, 1 << 62]
        assert boxes.take(0, 0, "one of nothing") == ([], [])
        for part, expected in zip(parts, sent, strict=True):
            assert part.data_ptr() % 64 == 0 or not part.numel()
            assert same_bits(part.view(expected.dtype).view(expected.shape), expected.contiguous())


@world(2, backend="shm")
def test_what_was_sent_may_change_at_once_and_what_has_come_stays(mesh):
    pg = group_of(mesh)
    x = torch.zeros(1000)
    if mesh.rank == 0:
        for value in range(20):
            pg.mailboxes.send(1, 0, [value], [x.fill_(value)])
        pg.monitored_barrier()
        return
    kept = []
    for value in range(20):
        words, (part,) = pg.mailboxes.take(0, 0, "a message")
        kept.append(part.view(torch.float32)[10:20])  # a part of it, in the end
        assert words == [value]
    pg.monitored_barrier()
    assert [part.tolist() for part in kept] == [[float(value)] * 10 for value in range(20)]


@world(2, backend="shm")
def test_memory_serves_again_when_the_last_tensor_in_it_is_gone(mesh):
    pg = group_of(mesh)
    x = torch.arange(SMALLEST_SLOT, dtype=torch.uint8)

    def places(count):
        """Where messages lie whose tensors are let go one after the other."""
        found = set()
        for _ in range(count):
            if mesh.rank == 0:
                pg.mailboxes.send(1, 0, [], [x, x])
            else:
                (_, part) = pg.mailboxes.take(0, 0, "a message").parts
                found.add(part.data_ptr())
                assert torch.equal(part, x)
                del _, part
            pg.monitored_barrier()
        return found

    first = places(30)
    assert len(first) <= 1
    if mesh.rank == 0:
        pg.mailboxes.send(1, 0, [], [x, x])
    else:
        kept = pg.mailboxes.take(0, 0, "a message").parts[0]
    second = places(30)
    assert len(second) <= 1
    if mesh.rank == 1:
        assert first.isdisjoint(second), "the first place is in use"
        assert torch.equal(kept, x)


@world(2, backend="shm")
def test_letters_of_another_tag_wait_until_they_are_asked_for(mesh):
    boxes = group_of(mesh).mailboxes
    if mesh.rank == 0:
        for tag in (0, 1, 0, 2):
            boxes.send(1, tag, [tag], [])
        boxes.flush("the end")
    else:
        assert [boxes.take(0, tag, "a message").words for tag in (2, 0, 1, 0)] == [[2], [0], [1], [0]]


@world(2, backend="shm")
def test_more_letters_than_a_box_holds_are_refused(mesh):
    boxes = group_of(mesh).mailboxes
    if mesh.rank == 0:
        boxes.send(1, 0, [], [])
        boxes._to[1].num_slots = MOST_SLOTS
        with pytest.raises(ValueError, match=rf"at most {MOST_SLOTS} messages from one rank to another"):
            boxes.send(1, 0, [], [torch.zeros(2 * SMALLEST_SLOT)])
        boxes.flush("the end")
    else:
        boxes.take(0, 0, "a letter")


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
