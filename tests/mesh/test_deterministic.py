"""The settings that the same bits need on a GPU; here without one, where they can be made, too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from instep.mesh import deterministic
from instep.mesh.deterministic import WORKSPACE
from instep.mesh.join import _require_own_gpus
from instep.mesh.mesh import Mesh
from instep.net import device
from instep.run.run import Run
from tests.world import world


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = before
    os.environ.pop(WORKSPACE, None)


def test_all_that_is_missing_is_set_before_cuda_starts() -> None:
    torch.backends.cudnn.benchmark = True
    with pytest.warns(UserWarning, match="same bits everywhere only with deterministic kernels") as told:
        deterministic.warn_if_missing()
    for setting in (f"{WORKSPACE}=:4096:8", "use_deterministic_algorithms(True)", "benchmark = False"):
        assert setting in str(told[0].message)
    deterministic.enable()
    assert os.environ[WORKSPACE] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert deterministic.missing() == []
    deterministic.warn_if_missing()  # which the test would not survive


def test_a_workspace_of_the_user_s_stays_and_one_that_comes_too_late_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=rf"expected {WORKSPACE}=:4096:8 before CUDA starts, got ''"):
        deterministic.enable()
    monkeypatch.setenv(WORKSPACE, ":16:8")
    deterministic.enable()
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize(("wanted", "is_set"), [("cuda", True), ("cpu", False)])
def test_a_run_sets_it_for_a_gpu_and_for_nothing_else(wanted: str, is_set: bool, monkeypatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    monkeypatch.setattr(device, "activate", lambda device, local_rank: torch.device("cpu"))
    Run(mesh={"device": wanted, "backend": "gloo", "deterministic": True}).close()
    assert torch.are_deterministic_algorithms_enabled() == is_set
    assert (os.environ.get(WORKSPACE) == ":4096:8") == is_set


def test_ranks_that_share_a_gpu_over_nccl_are_named(monkeypatch) -> None:
    monkeypatch.setattr(device, "current_gpu", lambda: 5)
    world(2)(shares)()


def shares(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 1 share a GPU of host .*: pass backend='gloo'"):
        _require_own_gpus(mesh)
