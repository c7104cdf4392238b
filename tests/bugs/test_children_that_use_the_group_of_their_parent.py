"""A process that a rank had forked, a worker of a loader say, could call collectives of its shared memory.

They counted as the rank's own: where children of all ranks did, they succeeded, and the ranks themselves met
what their children had left, in a Desync or in numbers of another operation.
"""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from instep.mesh.mesh import Mesh
from tests.world import world


def in_a_child(work: Callable[[], object]) -> str:
    """What ``work`` raises in a child of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            work()
        except BaseException as error:  # the child must not go on as the test
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with open(reader) as end:
        said = end.read()
    os.waitpid(child, 0)
    return said


CALLS: dict[str, Callable[[int], object]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(1000)),
    "in flight": lambda rank: dist.all_reduce(torch.ones(1000), async_op=True).wait(),
    "barrier": lambda rank: dist.barrier(),
    "message": lambda rank: dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0),
}


@world(2, by="process", backend="shm")
@pytest.mark.parametrize("call", CALLS)
def test_a_collective_in_a_child_is_refused_and_the_ranks_go_on(mesh: Mesh, call: str) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # the group has its threads, which no child has
    CALLS["message"](mesh.rank)
    said = in_a_child(lambda: CALLS[call](mesh.rank))
    assert said.startswith("RuntimeError: process ")
    assert said.endswith("and is no member of its groups: call collectives in the rank's own process")
    for k in range(4):
        x = torch.full((1000,), float(mesh.rank + k))
        dist.all_reduce(x)
        assert x.eq(2 * k + 1).all()
