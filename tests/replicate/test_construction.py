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
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.pipeline.pipeline import Pipeline
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.replicate.wrapper import REFUSED, DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, square
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


HELD = (torch.ones(2, requires_grad=True), [nn.Linear(1, 1)], {"a": nn.Parameter(torch.ones(1))})
# What rank 1 alone wraps, how, and what it says of it.
REFUSALS: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (partial(nn.Embedding, 4, 2, max_norm=1.0), {}, r"'' has max_norm=1\.0, which rescales rows of its"),
    (partial(nn.LazyLinear, 2), {}, "parameter 'weight' has no shape yet: run one"),
    (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        {},
        "'0' has sparse gradients: make it with spa",
    ),
    (partial(nn.EmbeddingBag, 4, 2, sparse=True), {}, "'' has sparse gradients"),
    (Scripted, {}, "'part' is a TorchScript module, .* wrap the Python module"),
    (
        lambda: nn.ModuleDict({"module": nn.Linear(2, 2)}),
        {},
        "the module has a part called 'module', .* give",
    ),
    *[
        (partial(holding, x), {}, r"'0\.held' holds trainable weights that are no parameters .*: reg")
        for x in HELD
    ],
    (
        lambda: nn.Sequential(SHARED),
        {},
        r"parameter 'weight' belongs to a DataParallel already, .*or close\(\)",
    ),
    (Dense, {"strategy": "ring"}, "strategy 'ring': expected one of naive, flat"),
    (Dense, {"init_sync": "yes"}, "init_sync='yes': expected True, False or 'verify'"),
    (Dense, {"bucket_cap_gb": 1}, "(TypeError: )?DataParallel got an unknown keyword 'bucket_cap_gb'"),
    (Dense, {"bucket_cap_mb": -1}, "bucket_cap_mb: expected positive sizes in MiB"),
    (Dense, {"bucket_cap_mb": capped}, "(ZeroDivisionError: )?division by zero"),
    *[(Dense, {name: [1]}, f"{name} has no meaning here: {reason}") for name, reason in REFUSED.items()],
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize(("make", "options", "message"), REFUSALS)
@world(2)
def test_what_one_rank_refuses_all_raise_and_name_it(
    mesh: Mesh, make: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    if mesh.rank == 1:
        other = DataParallel(SHARED, process_group=world_of_one())
        with pytest.raises((ValueError, TypeError, ZeroDivisionError), match=f"^{message}"):
            DataParallel(make(), process_group=mesh, **options)
        other.close()
    else:
        with pytest.raises(ValueError, match=f"^rank 1: {message}") as caught:
            DataParallel(Dense(), process_group=mesh)
        assert "in the preparation of models" in caught.value.__notes__[0]
    model = DataParallel(filled(Dense()), process_group=mesh)  # all can go on
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


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


def test_a_rank_that_has_joined_nothing_is_told_to(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"rank 1 of 2 .* joined no group: call instep.init\(\) first"):
        DataParallel(nn.Linear(2, 2))


# A wrapper around a wrapper, as accelerate's ``prepare`` makes it: training went on, with other weights.

Wrap = Callable[[nn.Module, Mesh], nn.Module]

OURS: dict[str, Wrap] = {
    "DataParallel": DataParallel,
    "stage 2": lambda module, mesh: fully_shard(module, mesh, stage=2),
    "stage 3": lambda module, mesh: fully_shard(module, mesh, stage=3),
}
AROUND = r"was put around .*use one of the two.*leave the model out of prepare\(\)"


class Holder(nn.Module):
    """A model with a wrapper somewhere in it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("ours", OURS)
def test_ddp_around_a_wrapper_is_refused_when_it_is_made(ours: str) -> None:
    mesh = world_of_one()
    model = OURS[ours](filled(Dense()), mesh)
    with pytest.raises(ValueError, match=AROUND):
        DistributedDataParallel(model, process_group=object())
    assert all(hasattr(model, name) for name in dir(model) if name.startswith("_ddp"))  # looking is free
    model.close()


@world(2, by="process")
@pytest.mark.parametrize("ours", OURS)
def test_ddp_further_out_is_refused_in_the_first_forward(mesh: Mesh, ours: str) -> None:
    even = nn.Linear(BLOCK_ELEMENTS, 2, bias=False)  # shards of one shape, which torch's DDP takes
    inner = OURS[ours](filled(even), mesh)
    model = DistributedDataParallel(Holder(inner))
    with pytest.raises(ValueError, match=AROUND):
        model(torch.ones(2, BLOCK_ELEMENTS))
    inner.close()


@world(2, by="process")
def test_fsdp_around_a_wrapper_is_refused_when_it_is_made(mesh: Mesh) -> None:
    for further_out in (False, True):
        inner = DataParallel(filled(Dense()), process_group=mesh)
        with pytest.raises(ValueError, match=AROUND):
            fsdp2(Holder(inner) if further_out else inner)
        inner.close()


@world(2, by="process")
def test_torch_s_wrappers_inside_are_refused_by_name(mesh: Mesh) -> None:
    ddp, fsdp = DistributedDataParallel(filled(Dense())), fsdp2(filled(Dense()))
    for wrap in OURS.values():
        with pytest.raises(ValueError, match="the module is wrapped in torch's DistributedDataParallel alr"):
            wrap(ddp, mesh)
        with pytest.raises(ValueError, match="part 'body' of the module is wrapped in torch's FSDP already"):
            wrap(Holder(fsdp), mesh)
    ddp.requires_grad_(False)  # a teacher, say
    model = DataParallel(nn.ModuleList([ddp, nn.Linear(2, 2)]), process_group=mesh)
    model.close()


@pytest.mark.parametrize("wrap", OURS.values(), ids=OURS)
def test_a_pipeline_inside_is_refused_by_name(wrap: Wrap) -> None:
    """Both exchanged its gradients, and the first step said that none had come."""
    mesh = world_of_one()
    model = Pipeline([nn.Linear(2, 2)], mesh)
    with pytest.raises(ValueError, match="the module is wrapped in instep's Pipeline already, and both"):
        wrap(model, mesh)
    model.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize(
    "compiled", [torch.jit.script, partial(torch.jit.trace, example_inputs=torch.ones(1, 2))]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_module_of_torch_jit_is_refused(ours: str, compiled: Callable[[Any], Any], whole: bool) -> None:
    """It keeps its parameters in C++, and some take no hooks."""
    made = compiled(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"is a TorchScript module, which takes no hooks: .* the Python module"
    ):
        OURS[ours](made if whole else nn.Sequential(made), world_of_one())
