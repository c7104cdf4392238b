"""An exchange that the training thread made itself was interrupted (Ctrl-C, an alarm), and a program that
caught it made another step: the header of that one was paired with what the other rank still sent for the
first, and gloo ended the process with SIGABRT. The group is lost then, on all ranks, and at once."""

import pytest
import torch
from torch import nn

import instep
from instep.errors import PeerLost
from instep.mesh.mesh import Mesh
from tests.world import world


@world(2)
@pytest.mark.parametrize("at_wait", [1, 2])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_no_later_exchange_is_paired_with_one_that_was_interrupted(
    mesh: Mesh, kind: type[BaseException], at_wait: int
) -> None:
    model = instep.DataParallel(nn.Linear(300, 300), process_group=mesh, strategy="flat")
    train(model)
    if mesh.rank == 0:
        interrupt(model, kind, at_wait)
        with pytest.raises(kind):
            train(model)
        with pytest.raises(PeerLost, match="rank 0 was interrupted in the exchange of bucket 0"):
            train(model)
    else:
        with pytest.raises(PeerLost, match=r"a rank left the exchange of bucket 0: .* then the backend said"):
            train(model, steps=2)  # all of the first exchange may have come by then
    with pytest.raises(PeerLost, match=r"This group is lost: .* model.rebind"):
        train(model)
    model.close()


def train(model: instep.DataParallel, steps: int = 1) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 300)).sum().backward()


def interrupt(model: instep.DataParallel, kind: type[BaseException], at_wait: int) -> None:
    """The group's wait number ``at_wait`` from now on raises: first come headers, then gradients."""
    peers, waits = model.group.peers, [0]
    original = peers.wait

    def wait(*args: object, **named: object) -> None:
        waits[0] += 1
        if waits[0] == at_wait:
            raise kind
        original(*args, **named)

    peers.wait = wait
