"""The test worlds themselves: ranks are distinct, failures are the failing rank's, processes stay warm."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from instep.launch.rank_exit import RankFailed
from tests.world import world

SHOULD_BE_FREE = threading.Event()


def gathered(mesh, value: int) -> list[int]:
    out = torch.empty(mesh.world.size, dtype=torch.int64)
    mesh.world.group.all_gather(out, torch.tensor([value]), "the gathering of a test")
    return out.tolist()


@pytest.fixture
def seven() -> int:
    return 7


@world(2, by="process")
@pytest.mark.parametrize("scale", [1, 3])
def test_parameters_and_fixtures_reach_processes(mesh, scale, seven, tmp_path):
    (tmp_path / str(mesh.rank)).touch()
    assert gathered(mesh, scale * seven * mesh.rank) == [0, 7 * scale]
    assert len(list(tmp_path.iterdir())) == 2


@world(2, by="process")
def test_processes_are_distinct_seeded_and_have_one_thread(mesh):
    assert len(set(gathered(mesh, os.getpid()))) == 2
    assert dist.get_rank() == mesh.rank
    drawn = torch.randint(1 << 40, ()).item()
    assert drawn == torch.randint(1 << 40, (), generator=torch.Generator().manual_seed(0)).item()
    assert torch.get_num_threads() == 1


@world(2, by="process")
def remember_the_process(mesh, path):
    with open(path / str(mesh.rank), "a") as file:
        file.write(f"{os.getpid()}\n")


def test_processes_stay_warm_from_test_to_test(tmp_path):
    for _ in range(2):
        remember_the_process(path=tmp_path)
    first, second = (tmp_path / "0").read_text().split()
    assert first == second != str(os.getpid())


@world(4, timeout_s=2)
def rank_two_raises(mesh):
    if mesh.rank == 2:
        raise LookupError("only here")
    gathered(mesh, 0)


@world(3, by="process", timeout_s=30)
def rank_two_raises_in_its_process(mesh):
    if mesh.rank == 2:
        raise LookupError("only here")
    gathered(mesh, 0)


def test_a_failure_is_reported_as_the_failing_rank_s():
    with pytest.raises(LookupError, match="only here") as failure:
        rank_two_raises()
    own, *others = failure.value.__notes__
    assert own.startswith("in rank 2 of 4 (")
    assert "dp=2" in own
    assert len(others) == 3
    assert all("PeerLost" in other for other in others)


def test_a_failure_in_a_process_is_reported_as_the_failing_rank_s():
    with pytest.raises(RankFailed, match=r"rank 2 of 3 .* failed with LookupError: only here") as failure:
        rank_two_raises_in_its_process()
    assert "in rank_two_raises_in_its_process" in failure.value.__notes__[0]


@world(2, by="process", timeout_s=30)
def rank_one_is_killed(mesh):
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered(mesh, 0)


def test_a_killed_process_is_the_cause_and_its_pool_is_replaced(tmp_path):
    remember_the_process(path=tmp_path)
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        rank_one_is_killed()
    remember_the_process(path=tmp_path)
    before, after = (tmp_path / "0").read_text().split()
    assert before != after


@world(2, deadline_s=5)
def rank_one_waits_for_nothing(mesh):
    if mesh.rank == 1:
        SHOULD_BE_FREE.wait(20)


def test_past_the_deadline_the_stack_of_a_stuck_thread_is_shown():
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 did not end within 5 s") as failure:
        rank_one_waits_for_nothing()
    SHOULD_BE_FREE.set()
    assert "SHOULD_BE_FREE.wait(20)" in str(failure.value)


@world(2, by="process", deadline_s=1)
def both_wait_in_native_code(mesh):
    signal.sigwait([signal.SIGUSR1])


def test_past_the_deadline_the_stacks_of_stuck_processes_are_shown():
    with pytest.raises(TimeoutError, match=r"rank 0, 1 of 2 did not end within 1 s") as failure:
        both_wait_in_native_code()
    assert str(failure.value).count("in both_wait_in_native_code") == 2
