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
from instep.replicate.ddp_keywords import REFUSED
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, Mixed, Twice
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, gradients, samples, square
from tests.world import world


def module_of(*layers: tuple[str, nn.Module]) -> nn.Module:
    module = nn.Module()
    for name, layer in layers:
        module.add_module(name, layer)
    return module


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


# What rank 0 has, what the others have, and what the error says of the two.
DIFFERENCES = {
    "name": (
        [("a", nn.Linear(2, 2))],
        [("b", nn.Linear(2, 2))],
        r"parameter 'a.weight', .* on rank 0, but parameter 'b.weight', .* on rank 1",
    ),
    "order": (
        [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))],
        [("b", nn.Linear(2, 2)), ("a", nn.Linear(2, 2))],
        r"parameter 'a.weight'.* on rank 0, but .*'b.weight'.* on rank 1",
    ),
    "shape": (
        [("a", nn.Linear(2, 3))],
        [("a", nn.Linear(3, 2))],
        r"parameter 'a.weight', shape \(3, 2\), .* on rank 0, but .* shape \(2, 3\), .* on rank 1",
    ),
    "dtype": (
        [("a", nn.Linear(2, 2))],
        [("a", nn.Linear(2, 2).double())],
        r"parameter 'a.weight', .*float32.* on rank 0, but .*float64.* on rank 1",
    ),
    "requires_grad": (
        [("a", nn.Linear(2, 2))],
        [("a", frozen(nn.Linear(2, 2)))],
        r"parameter 'a.weight', .*requires_grad=True on rank 0, but .*requires_grad=False on rank 1",
    ),
    "one more": (
        [("a", nn.Linear(2, 2))],
        [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))],
        r"nothing on rank 0, but parameter 'b.weight', .* on rank 1",
    ),
    "buffer": (
        [("a", nn.BatchNorm1d(2))],
        [("a", nn.BatchNorm1d(2, track_running_stats=False))],
        r"buffer 'a.running_mean', .* on rank 0, but nothing on rank 1",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@world(3)
def test_models_that_differ_are_refused_on_all_ranks_by_the_first_difference(mesh: Mesh, kind: str) -> None:
    first, other, message = DIFFERENCES[kind]
    module = module_of(*(first if mesh.rank == 0 else other))
    match = f"^the ranks differ in models: {message}: build the same modules in the same order$"
    with pytest.raises(ValueError, match=match) as caught:
        DataParallel(module, process_group=mesh)
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)  # so that one reports it


# What rank 0 says and the others: they would start different operations, or draw other random numbers.
OPTIONS = {
    "init_sync": (True, "verify"),
    "strategy": ("bucketed", "naive"),
    "bucket_cap_mb": (25, [1, 25]),
    "ordered": (True, False),
    "find_unused_parameters": (None, False),
    "broadcast_buffers": (True, False),
    "seed": (0, 1),
}


@pytest.mark.parametrize("name", OPTIONS)
@world(2)
def test_options_that_differ_are_refused_on_all_ranks(mesh: Mesh, name: str) -> None:
    first, other = OPTIONS[name]
    message = rf"^the ranks differ in options: {name}={first!r} on rank 0, but {name}=.* on rank 1: pass the"
    with pytest.raises(ValueError, match=message):
        DataParallel(Dense(), process_group=mesh, **{name: other if mesh.rank else first})


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
        lambda: module_of(("module", nn.Linear(2, 2))),
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
def test_a_module_is_wrapped_once_at_a_time(mesh: Mesh) -> None:
    """Of two wrappers each sent gradients while the other was writing them."""
    module = filled(Dense())
    model = DataParallel(module, process_group=mesh)
    for again in (module, module.layers[3], nn.Sequential(module), model, nn.Sequential(model)):
        with pytest.raises(ValueError, match=r"layers\.\d\.weight' belongs to a DataParallel already"):
            DataParallel(again, process_group=mesh)
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, module, square)
    model.close()
    model = DataParallel(module, process_group=mesh)
    del model  # collected, it is closed too
    DataParallel(nn.Sequential(module), process_group=mesh).close()


@world(2)
def test_frozen_weights_and_those_of_another_wrapper_may_be_held_in_a_list(mesh: Mesh) -> None:
    """A teacher, say, or the discriminator that a generator's loss asks."""
    teacher, discriminator = frozen(nn.Linear(2, 2)), nn.Linear(2, 2)
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


@world(2)
def test_a_model_that_was_refused_is_left_as_it_was(mesh: Mesh) -> None:
    module = nn.Linear(2, 2 + mesh.rank)
    with pytest.raises(ValueError, match="shape"):
        DataParallel(module, process_group=mesh)
    module(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


class Varied(Mixed):
    """All dtypes, and buffers: one of bools, one that is a number, one that is expanded."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(rank + 1)
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("same", torch.zeros(1).expand(3))
        self.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)


@world(2)
def test_rank_0_s_values_are_taken_in_every_dtype(mesh: Mesh) -> None:
    module = Varied(mesh.rank)
    DataParallel(module, process_group=mesh).close()
    for p in module.parameters():
        assert torch.equal(p, torch.ones_like(p))
    assert module.mask.tolist() == [True, False]
    assert module.count.item() == 0
    assert module.scratch.tolist() == [0, 0]


@world(2)
def test_a_parameter_that_is_not_contiguous_takes_rank_0_s_values(mesh: Mesh) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.full((3, 2), float(mesh.rank)).t())
    module.image = nn.Parameter(
        torch.full((2, 3, 4, 5), 1.0 * mesh.rank).to(memory_format=torch.channels_last)
    )
    DataParallel(module, process_group=mesh).close()
    assert all(torch.equal(p, torch.zeros_like(p)) for p in module.parameters())
    assert module.image.is_contiguous(memory_format=torch.channels_last)


@world(3)
def test_values_that_differ_are_refused_if_they_are_verified(mesh: Mesh) -> None:
    module = filled(Dense())
    DataParallel(module, process_group=mesh, init_sync="verify").close()
    if mesh.rank == 1:
        with torch.no_grad():
            module.layers[3].bias[2] = torch.nextafter(module.layers[3].bias[2], torch.tensor(9.0))
    with pytest.raises(ValueError, match=r"'layers.3.bias' has other values on rank 1 than on.* 0: load"):
        DataParallel(module, process_group=mesh, init_sync="verify")


@world(2)
def test_a_buffer_that_differs_is_refused_if_values_are_verified(mesh: Mesh) -> None:
    module = nn.BatchNorm1d(2)
    module.num_batches_tracked.fill_(mesh.rank)
    with pytest.raises(ValueError, match="'num_batches_tracked' has other values on rank 1"):
        DataParallel(module, process_group=mesh, init_sync="verify")


@world(2)
def test_values_may_be_left_as_they_are(mesh: Mesh) -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(mesh.rank)
    DataParallel(module, process_group=mesh, init_sync=False).close()
    assert module.weight.tolist() == [[mesh.rank, mesh.rank]]


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
