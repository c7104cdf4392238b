"""torch 2.15 asks a group for its backend before it sends several messages at once, and this one had none.

``batch_isend_irecv``, and with it every schedule of ``torch.distributed.pipelining``, raised "No backend type
associated with device type cpu". Older versions ask groups of their own class alone.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.shm.calls import group_of
from tests.world import world


@world(2, backend="shm")
def test_torch_is_told_what_the_group_can_do(mesh):
    pg = group_of(mesh)
    for ask in (pg._get_backend, pg.get_backend):
        backend = ask(torch.device("cpu"))
        assert backend is pg
        assert not backend.supports_coalescing and not backend.supports_splitting
        assert not backend.supports_tensor_alloc(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="no backend for tensors on cuda: use nccl"):
            ask(torch.device("cuda"))


@world(2, by="process", backend="shm")
def test_several_messages_are_sent_at_once(mesh):
    other, found = 1 - mesh.rank, torch.zeros(2)
    mine = torch.full((2,), float(mesh.rank))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, found, other)]
    ):
        work.wait()
    assert found.tolist() == [other] * 2
