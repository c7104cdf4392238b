"""Messages arrive, and end in an error that says what to do."""

from __future__ import annotations

import threading

import pytest
import torch

from instep.comm import ring
from instep.comm.perform import perform
from instep.errors import PeerLost
from instep.net.messages import Messages, flat
from tests.comm.inputs import CountingMessages, bits, drawn
from tests.world import world


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


@world(2, backend="shm")
def test_an_error_of_a_backend_of_ours_stays_as_it_is(mesh):
    messages = Messages(mesh.world.pg)
    if messages.rank == 0:
        with pytest.raises(PeerLost, match="rank 1, which left the group"):
            messages.together([], [(torch.empty(3), 1)])


def test_a_message_that_never_comes_ends_at_the_deadline():
    world(2, timeout_s=1)(waits_in_vain)(gave_up=threading.Event())


def waits_in_vain(mesh, gave_up: threading.Event):
    messages = Messages(mesh.world.pg)
    if messages.rank == 1:
        assert gave_up.wait(20)
        return
    try:
        with pytest.raises(PeerLost, match="rank 0 waited for a message from rank 1, which failed"):
            messages.together([], [(torch.empty(1), 1)])
    finally:
        gave_up.set()


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
