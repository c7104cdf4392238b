"""A wrapper is pickled without its group, and takes part in the one that it finds when it is used again."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instep.mesh.mesh import Mesh, get, registered_mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, square
from tests.world import world


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """``model``, as a program does that keeps whole modules in a file."""
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    return pickle.Unpickler(file).load()


@world(2, by="process")
def test_a_loaded_wrapper_trains_on(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), bucket_cap_mb=1e-5, strategy="overlap")
    loaded = saved_and_loaded(model)
    model.close()
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        square(loaded, mesh.rank).backward()
        assert_mean_gradients(mesh, loaded.module, square)
        optimizer.step()
    assert equal_everywhere(mesh, loaded.parameters())
    assert loaded.placement["strategy"] == "overlap"
    loaded.zero_grad()
    for micro_batch in loaded.micro_batches(2):
        square(loaded, micro_batch.index).backward()
    loaded.close()


@world(2, by="process")
def test_one_rank_may_load_and_evaluate_alone(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()))
    if mesh.rank == 0:
        loaded = saved_and_loaded(model)
        with torch.no_grad():
            assert torch.equal(square(loaded, 0), square(model.module, 0))
        assert list(loaded.state_dict()) == list(model.state_dict())
    model.close()


@world(2, by="process")
def test_no_step_past_the_wrapper_that_was_loaded(mesh: Mesh) -> None:
    loaded = saved_and_loaded(DataParallel(filled(Dense())))
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    square(loaded.module, mesh.rank).backward()
    with pytest.raises(RuntimeError, match="loaded from a pickle, and has not been used through its Data"):
        optimizer.step()
    optimizer.zero_grad()
    square(loaded, mesh.rank).backward()
    optimizer.step()
    assert equal_everywhere(mesh, loaded.parameters())
    loaded.close()


@world(2, by="process")
def test_groups_that_are_not_found_again_are_refused(mesh: Mesh) -> None:
    own = dist.new_group([0, 1])
    model = DataParallel(filled(Dense()), process_group=own)
    with pytest.raises(RuntimeError, match=r"registered mesh or torch's default group"):
        pickle.dumps(model)
    model.close()
    before = registered_mesh()
    get.register_mesh(None)
    try:
        for group in (None, dist.group.WORLD):
            model = DataParallel(filled(Dense()), process_group=group)
            loaded = saved_and_loaded(model)
            assert loaded.group.ranks == (0, 1)
            for wrapper in (model, loaded):
                wrapper.close()
    finally:
        get.register_mesh(before)


def test_a_world_of_one_needs_nothing() -> None:
    loaded = saved_and_loaded(DataParallel(filled(Dense())))
    square(loaded.module, 0).backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    loaded.close()
