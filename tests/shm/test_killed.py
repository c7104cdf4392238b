"""A process that is killed, stopped or interrupted in the middle of an operation is named to all who wait."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import instep
from instep.errors import PeerLost
from instep.launch.launch import launch
from instep.launch.rank_exit import RankFailed
from instep.native.library import core
from instep.shm.heap import Heap
from tests.shm.calls import PATIENCE_S

SOON_S = PATIENCE_S / 2  # far above a slice of a wait, for a busy machine
LONG = 5 << 20


def dies_in(owner: Any, name: str) -> None:
    """This process is killed by its next call of a function of ``owner``."""
    setattr(owner, name, lambda *args, **named: die())


def die() -> None:
    Path("died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after_a_round() -> None:
    """This process is killed in the middle of the next all-reduce of private memory."""
    native = core()
    assert native is not None

    def deadly(view: Any, _: int) -> None:
        native.post_round(view.group.contents, view.rounds + 1)
        die()

    native.all_reduce = deadly


def private(mesh: Any) -> None:
    if mesh.rank == 1:
        dies_after_a_round()
    works = [dist.all_reduce(torch.ones(LONG), async_op=True) for _ in range(2)]
    dist.all_reduce(torch.ones(LONG))
    for work in reversed(works):
        work.wait()


def before_mapping(mesh: Any) -> None:
    """Rank 1 has told where its memory is, and takes it along before anybody has seen it."""
    if mesh.rank == 1:
        dies_in(Heap, "_attached")
    else:
        original = Heap._attached

        def late(*args: Any) -> Any:
            wait_for(Path("died"))
            while 1 not in mesh.world.group.peers.dead():
                pass
            return original(*args)

        Heap._attached = late  # type: ignore[method-assign]
    dist.all_reduce(dist.group.WORLD.allocate(4 * LONG).elements(torch.float32))


def absent(wait: Callable[[], object]) -> Callable[[Any], None]:
    """Rank 1 is killed before ``wait``."""
    return lambda mesh: die() if mesh.rank == 1 else wait()  # type: ignore[return-value]


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        pass


CASES: dict[str, tuple[Callable[[Any], None], str]] = {
    "private": (private, "all_reduce"),
    "before mapping": (before_mapping, "all_reduce"),
    "receive": (absent(lambda: dist.recv(torch.ones(3), src=1)), "receive from rank 1"),
}


def survive(directory: Path, case: str) -> None:
    """A rank's life: meet, be killed, or write down how one learns of it."""
    os.chdir(directory)
    mesh = instep.init(backend="shm", timeout_s=PATIENCE_S)
    dist.barrier()
    try:
        CASES[case][0](mesh)
    except PeerLost as lost:
        told = time.monotonic()
        with pytest.raises(PeerLost) as again:
            dist.barrier()
        facts = {"told": told, "text": str(lost), "ranks": lost.ranks, "operation": lost.operation}
        Path(f"rank {mesh.rank}").write_text(json.dumps({**facts, "again": again.value.ranks}))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_is_killed_is_named_at_once_by_all_who_wait(tmp_path, case):
    pids: list[int] = []
    with pytest.raises(RankFailed, match=r"rank 1 of 3 .* was killed by SIGKILL"):
        launch(survive, (tmp_path, case), ranks=3, on_start=pids.extend, grace_s=PATIENCE_S)
    died = float((tmp_path / "died").read_text())
    for rank in (0, 2):
        facts = json.loads((tmp_path / f"rank {rank}").read_text())
        assert facts["ranks"] == facts["again"] == [1]
        assert facts["operation"].startswith(CASES[case][1])
        assert facts["text"].startswith(f"rank 1 (pid {pids[1]} on ")
        assert f" died: rank {rank} waited " in facts["text"]
        assert facts["told"] - died < SOON_S


def be_interrupted(directory: Path) -> None:
    os.chdir(directory)
    mesh = instep.init(backend="shm", timeout_s=PATIENCE_S)
    if mesh.rank == 0:

        def interrupt(number: int, frame: Any) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="interrupted"):
            dist.barrier()
        Path("died").write_text(str(time.monotonic()))
        signal.pause()
    wait_for(Path("died"))
    dist.all_reduce(torch.ones(2))  # where rank 0 has been, and is found
    with pytest.raises(PeerLost) as lost:
        dist.barrier()
    Path("told").write_text(json.dumps([str(lost.value), time.monotonic()]))
    os.kill(mesh.world.group.peers.table[0].pid, signal.SIGKILL)


def test_an_interrupt_ends_a_wait_and_the_others_are_told(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 0 of 2 .* was killed by SIGKILL"):
        launch(be_interrupted, (tmp_path,), ranks=2, grace_s=PATIENCE_S)
    text, told = json.loads((tmp_path / "told").read_text())
    assert text.endswith("rank 0, which failed: KeyboardInterrupt")
    assert told - float((tmp_path / "died").read_text()) < SOON_S
