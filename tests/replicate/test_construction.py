"""Wrapping: the ranks compare their models and take rank 0's values; every keyword of DDP is known."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.mesh.mesh import Mesh, get, registered_mesh
from instep.replicate.wrapper import REFUSED, DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, Twice
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, gradients, samples, square
from tests.world import world


def capped(sizes: list[int]) -> int:
    raise ZeroDivisionError("division by zero")


SHARED = nn.Linear(2, 2)


def holding(value: object) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].held = value
    return module


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(nn.Linear(2, 2))


# What rank 1 alone wraps, how, and what it says of it.
REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "writes to a weight": (
        lambda: nn.Embedding(4, 2, max_norm=1.0),
        {},
        ValueError,
        r"'' has max_norm=1\.0, which rescales rows of its weight in forward",
    ),
    "has no shape": (
        lambda: nn.LazyLinear(2),
        {},
        ValueError,
        "parameter 'weight' has no shape yet: run one",
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        {},
        ValueError,
        "'0' has sparse gradients: make it with sparse=False",
    ),
    "sparse bag": (lambda: nn.EmbeddingBag(4, 2, sparse=True), {}, ValueError, "'' has sparse gradients"),
    "TorchScript": (Scripted, {}, ValueError, "'part' is a TorchScript module, .* wrap the Python module"),
    "part called module": (
        lambda: nn.ModuleDict({"module": nn.Linear(2, 2)}),
        {},
        ValueError,
        "the module has a part called 'module', .* give the part another name",
    ),
    **{
        f"unregistered weights {i}": (
            partial(holding, value),
            {},
            ValueError,
            r"'0\.held' holds trainable weights that are no parameters .*: register them \(nn\.ParameterList",
        )
        for i, value in enumerate(
            (torch.ones(2, requires_grad=True), [nn.Linear(1, 1)], {"a": nn.Parameter(torch.ones(1))})
        )
    },
    "shared": (
        lambda: nn.Sequential(SHARED),
        {},
        ValueError,
        r"parameter 'weight' belongs to a DataParallel already, .*: wrap or shard one module .*or close\(\)",
    ),
    "strategy": (Dense, {"strategy": "ring"}, ValueError, "strategy 'ring': expected one of naive, flat"),
    "values": (Dense, {"init_sync": "yes"}, ValueError, "init_sync='yes': expected True, False or 'verify'"),
    "unknown keyword": (
        Dense,
        {"bucket_cap_gb": 1},
        TypeError,
        "DataParallel got an unknown keyword 'bucket_cap_gb'",
    ),
    "bucket size": (
        Dense,
        {"bucket_cap_mb": -1},
        ValueError,
        "bucket_cap_mb: expected positive sizes in MiB",
    ),
    "callable": (Dense, {"bucket_cap_mb": capped}, ZeroDivisionError, "division by zero"),
    **{
        name: (Dense, {name: [1]}, ValueError, f"{name} has no meaning here: {reason}")
        for name, reason in REFUSED.items()
    },
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("kind", REFUSALS)
@world(2)
def test_what_one_rank_refuses_all_raise_and_name_it(mesh: Mesh, kind: str) -> None:
    make, options, error, message = REFUSALS[kind]
    if mesh.rank == 1:
        other = DataParallel(SHARED, process_group=world_of_one())
        with pytest.raises(error, match=f"^{message}"):
            DataParallel(make(), process_group=mesh, **options)
        other.close()
    else:
        kind = "" if error is ValueError else f"{error.__name__}: "
        with pytest.raises(ValueError, match=f"^rank 1: {kind}{message}") as caught:
            DataParallel(Dense(), process_group=mesh)
        assert f"rank 1 raised {error.__name__} in the preparation of models" in caught.value.__notes__[0]
    model = DataParallel(filled(Dense()), process_group=mesh)  # all can go on
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_frozen_weights_and_those_of_another_wrapper_may_be_held_in_a_list(mesh: Mesh) -> None:
    """A teacher, say, or the discriminator that a generator's loss asks."""
    teacher, discriminator = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    other = DataParallel(discriminator, process_group=mesh)
    DataParallel(holding([teacher, discriminator]), process_group=mesh).close()
    other.close()


@world(2)
def test_a_gradient_that_arrives_sparse_is_refused_by_name(mesh: Mesh) -> None:
    class LooksUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(4, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.embedding(tokens, self.rows, sparse=True)

    for accumulates in (False, True):
        model = DataParallel(LooksUp(), process_group=mesh)
        match = r"parameter 'rows' has a sparse gradient: .*sparse=False"
        with pytest.raises(ValueError, match=match), model.no_sync() if accumulates else nullcontext():
            model(torch.tensor([mesh.rank])).sum().backward()
        model.close()


def test_every_keyword_of_ddp_is_known_and_one_that_asks_for_nothing_is_ignored() -> None:
    theirs = set(inspect.signature(DistributedDataParallel).parameters) - {"module"}
    assert theirs <= set(inspect.signature(DataParallel).parameters) | REFUSED.keys()
    for nothing in (None, False, 0):
        DataParallel(nn.Linear(1, 1), **dict.fromkeys(REFUSED, nothing)).close()


@pytest.mark.parametrize("devices", [[0], 0, torch.device("cpu"), "cuda:0", ()])
def test_devices_as_the_second_argument_are_refused(devices: object) -> None:
    with pytest.raises(TypeError, match=r"process_group: expected a mesh or a process group, got .*: dev"):
        DataParallel(nn.Linear(1, 1), devices)


@world(2, by="process")
def test_a_static_graph_may_have_unused_parameters_as_in_ddp(mesh: Mesh) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank), True).square().mean()

    theirs = DistributedDataParallel(filled(Twice()), static_graph=True)
    loss(theirs, mesh.rank).backward()
    model = DataParallel(filled(Twice()), find_unused_parameters=False, static_graph=True)
    loss(model, mesh.rank).backward()
    torch.testing.assert_close(gradients(model.module), gradients(theirs.module))
    model.close()


@world(2, by="process")
def test_buffers_are_left_alone_if_asked(mesh: Mesh) -> None:
    model = DataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), broadcast_buffers=False)
    square(model, mesh.rank).backward()
    assert not equal_everywhere(mesh, model.buffers())
    model.close()


def test_a_world_of_one_needs_no_group() -> None:
    module = filled(Dense())
    model = DataParallel(module)
    square(model, 0).backward()
    torch.testing.assert_close(gradients(module), gradients(one_backward()))
    assert DataParallel(Dense(), process_group=world_of_one()).group.size == 1


def one_backward() -> nn.Module:
    module = filled(Dense())
    square(module, 0).backward()
    return module


@world(2, by="process")
def test_half_an_environment_is_no_error_where_a_default_group_is(mesh: Mesh) -> None:
    """Programs that spawn their ranks set ``WORLD_SIZE`` and pass the rank as an argument."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "INSTEP_STORE"):
            patch.delenv(name, raising=False)
        patch.setenv("WORLD_SIZE", "2")
        before = registered_mesh()
        get.register_mesh(None)
        try:
            model = DataParallel(filled(Dense()))
            square(model, mesh.rank).backward()
            assert_mean_gradients(mesh, model.module, square)
            model.close()
            joined = instep.init(backend="gloo")
            assert (joined.rank, joined.axes.world_size) == (mesh.rank, 2)
            joined.close()
        finally:
            get.register_mesh(before)


def test_a_rank_that_has_joined_nothing_is_told_to(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"rank 1 of 2 .* joined no group: call instep.init\(\) first"):
        DataParallel(nn.Linear(2, 2))
