"""A group in shared memory as torch sees it: its own backend, and of this process alone."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from instep.mesh.mesh import Mesh
from tests.shm.calls import group_of
from tests.world import world


@world(2, backend="shm")
def test_torch_is_told_what_the_group_can_do(mesh: Mesh) -> None:
    """torch 2.15 asks before it sends several messages at once: no backend, no ``batch_isend_irecv``."""
    pg = group_of(mesh)
    for ask in (pg._get_backend, pg.get_backend):
        backend = ask(torch.device("cpu"))
        assert backend is pg
        assert not backend.supports_coalescing and not backend.supports_splitting
        assert not backend.supports_tensor_alloc(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="no backend for tensors on cuda: use nccl"):
            ask(torch.device("cuda"))


@world(2, by="process", backend="shm")
def test_several_messages_are_sent_at_once(mesh: Mesh) -> None:
    other, found = 1 - mesh.rank, torch.zeros(2)
    mine = torch.full((2,), float(mesh.rank))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, found, other)]
    ):
        work.wait()
    assert found.tolist() == [other] * 2


def call(name: str, rank: int) -> None:
    if name == "message":
        dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(1000), async_op=name == "in flight")


@world(2, by="process", backend="shm")
@pytest.mark.parametrize("name", ["all_reduce", "in flight", "message"])
def test_a_call_in_a_forked_child_is_refused_and_the_ranks_go_on(mesh: Mesh, name: str) -> None:
    """It counted as the rank's own, and the ranks met what their loaders' workers had left."""
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # the group has its threads, which no child has
    call("message", mesh.rank)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            call(name, mesh.rank)
        except BaseException as error:  # the child must not go on as the test
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as end:
        said = end.read()
    os.waitpid(child, 0)
    assert said.startswith("RuntimeError: process ")
    assert said.endswith("and is no member of its groups: call collectives in the rank's own process")
    for k in range(4):
        x = torch.full((1000,), float(mesh.rank + k))
        dist.all_reduce(x)
        assert x.eq(2 * k + 1).all()
