"""Messages in mailboxes are what was sent, as long as a tensor of theirs lives; then memory serves again."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from instep.errors import PeerLost
from instep.shm.mailboxes import MOST_SLOTS, SMALLEST_SLOT
from tests.shm.calls import group_of
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
def test_a_rank_that_has_left_is_named_by_the_one_that_waits_for_its_letter(mesh):
    pg = group_of(mesh)
    if mesh.rank == 0:
        pg.mailboxes.send(1, 0, [1], [])
        pg.mailboxes.flush("the end")
        pg.shutdown()
        return
    assert pg.mailboxes.take(0, 0, "the first letter").words == [1]
    with pytest.raises(PeerLost, match=r"in the second letter for rank 0, which left the group"):
        pg.mailboxes.take(0, 0, "the second letter")


@world(2, backend="shm")
def test_a_letter_that_never_comes_ends_at_the_deadline(mesh):
    pg = group_of(mesh)
    if mesh.rank == 1:
        pg.peers.timeout_s = 0.3
        with pytest.raises(PeerLost, match=r"rank 1 waited \d+\.\d s in the letter, and never came: rank 0"):
            pg.mailboxes.take(0, 0, "the letter")
    pg.monitored_barrier(timedelta(seconds=10))


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
