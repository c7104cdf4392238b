"""Wrapping: the ranks compare their models and take rank 0's values; every keyword of DDP is known."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.mesh.mesh import Mesh, get, registered_mesh
from instep.replicate.ddp_keywords import NO_EFFECT, REFUSED
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, Twice
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, gradients, samples, square
from tests.world import world


def capped(sizes: list[int]) -> int:
    raise ZeroDivisionError("division by zero")


# What rank 1 alone wraps, how, and what it says of it.
REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "writes to a weight": (
        lambda: nn.Embedding(4, 2, max_norm=1.0),
        {},
        ValueError,
        r"'' has max_norm=1\.0, which rescales rows of its weight in forward",
    ),
    "has no shape": (lambda: nn.LazyLinear(2), {}, ValueError, "parameter 'weight' has no shape yet"),
    "strategy": (Dense, {"strategy": "ring"}, ValueError, "strategy 'ring': expected one of naive, flat"),
    "values": (Dense, {"init_sync": "yes"}, ValueError, "init_sync='yes': expected True, False or 'verify'"),
    "refused keyword": (Dense, {"mixed_precision": 1}, ValueError, "mixed_precision is not offered"),
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
}


@pytest.mark.parametrize("kind", REFUSALS)
@world(3)
def test_what_one_rank_refuses_all_raise_and_name_it(mesh: Mesh, kind: str) -> None:
    make, options, error, message = REFUSALS[kind]
    if mesh.rank == 1:
        with pytest.raises(error, match=f"^{message}"):
            DataParallel(make(), process_group=mesh, **options)
    else:
        kind = "" if error is ValueError else f"{error.__name__}: "
        with pytest.raises(ValueError, match=f"^rank 1: {kind}{message}") as caught:
            DataParallel(Dense(), process_group=mesh)
        assert f"rank 1 raised {error.__name__} in the preparation of models" in caught.value.__notes__[0]
    model = DataParallel(filled(Dense()), process_group=mesh)  # all can go on
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


def test_every_keyword_of_ddp_is_known() -> None:
    theirs = set(inspect.signature(DistributedDataParallel).parameters) - {"module"}
    ours = set(inspect.signature(DataParallel).parameters) | NO_EFFECT.keys() | REFUSED.keys()
    assert theirs <= ours


def test_the_first_arguments_stand_where_they_do_in_ddp() -> None:
    positional = [
        name
        for name, p in inspect.signature(DataParallel).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    theirs = list(inspect.signature(DistributedDataParallel).parameters)
    assert positional == theirs[: len(positional)]


@pytest.mark.parametrize("place", range(1, 6))
@world(2)
def test_a_group_in_the_place_of_another_argument_is_refused(mesh: Mesh, place: int) -> None:
    name = list(inspect.signature(DataParallel).parameters)[place]
    for group in (mesh.whole.pg, [mesh], *([mesh] if place > 1 else ())):  # a mesh may be the second argument
        with pytest.raises(TypeError, match=f"^{name}: expected .*, got a .*by name, process_group="):
            DataParallel(Dense(), *[None] * (place - 1), group)


def test_keywords_that_ask_for_nothing_are_quiet() -> None:
    quiet = {name: value for name, (value, _) in NO_EFFECT.items()} | dict.fromkeys(REFUSED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(nn.Linear(1, 1), **quiet).close()


@world(2, by="process")
def test_keywords_without_effect_warn_once_on_rank_0(mesh: Mesh) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallel(Dense(), gradient_as_bucket_view=False, static_graph=True, dim=1).close()
    assert len(caught) == (mesh.rank == 0)
    for warning in caught:
        text = str(warning.message)
        assert all(name in text for name in ("gradient_as_bucket_view", "static_graph", "dim (")), text
        assert warning.filename == __file__


@pytest.mark.parametrize(
    ("keyword", "value"), [("delay_all_reduce_named_params", [("a", None)]), ("mixed_precision", object())]
)
def test_keywords_that_are_refused_say_what_to_do(keyword: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{keyword} is not offered: "):
        DataParallel(nn.Linear(1, 1), **{keyword: value})


def test_a_keyword_that_nobody_knows() -> None:
    with pytest.raises(TypeError, match="unknown keyword 'bucket_cap_gb'"):
        DataParallel(nn.Linear(1, 1), bucket_cap_gb=1)


@world(2, by="process")
def test_joining_uneven_inputs_points_to_micro_batches(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.join():
            square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    assert [("micro_batches(G)" in str(w.message)) for w in caught] == [True] * (mesh.rank == 0)
    model.close()


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
def test_a_device_mesh_instead_of_a_process_group(mesh: Mesh) -> None:
    device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = DataParallel(filled(Dense()), device_mesh=device_mesh)
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()
    with pytest.raises(ValueError, match="process_group or device_mesh, not both"):
        DataParallel(Dense(), process_group=mesh, device_mesh=device_mesh)


@world(2, by="process")
def test_buffers_are_left_alone_if_asked(mesh: Mesh) -> None:
    for keyword in ("broadcast_buffers", "forward_sync_buffers"):
        model = DataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), **{keyword: False})
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
