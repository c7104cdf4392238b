"""The number of threads per operator, which bits depend on: compared, and warned of where nothing set it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from instep.mesh import mesh as current
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled
from tests.replicate.nets import Dense, mean_square
from tests.world import world


@world(2, by="process")
def test_ranks_with_other_numbers_of_threads_are_named_once_on_rank_0(mesh: Mesh) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if mesh.rank else 1)
    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        lambda module: DataParallel(module, process_group=mesh),
        lambda module: fully_shard(module, process_group=mesh),
    ]
    try:
        for wrap in wrappers:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                wrap(filled(Dense())).close()
            expected = ["ranks compute with 1 threads on rank 0, but 2 threads on rank 1"]
            assert [str(warning.message).split(":")[0] for warning in found] == expected[mesh.rank :]
    finally:
        torch.set_num_threads(before)


def declared_steps(num_steps: int, num_micro_batches: int = 2) -> None:
    model = DataParallel(filled(Dense()))
    for step in range(num_steps):
        for micro_batch in model.micro_batches(num_micro_batches):
            mean_square(model, micro_batch, step)
        model.zero_grad()
    model.close()


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mesh, and as many threads as torch takes by itself on a machine with four cores."""
    current.get.register_mesh(None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def test_a_number_that_follows_from_the_machine_is_warned_of_in_the_first_declared_step(unset: None) -> None:
    with pytest.warns(
        UserWarning, match=r"threads per rank: 4 here, .* 1 where torchrun .* OMP_NUM"
    ) as found:
        declared_steps(3)
    assert len(found) == 1


def test_a_number_that_was_set_is_not(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # by torch.set_num_threads
    declared_steps(1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    declared_steps(1)


def test_a_step_that_one_rank_makes_anywhere_is_not(unset: None) -> None:
    declared_steps(1, num_micro_batches=1)


def test_it_is_shown_once_in_a_process(unset: None) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()  # as Python starts: warnings are no errors, and each is shown once
        declared_steps(1)
        declared_steps(1)
    assert len(found) == 1
