"""Wrapping, for every kind: the ranks compare their models and options, and take rank 0's values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from tests.kinds import KINDS, STAGES, WRAPPERS, Program, close, net, on_every_kind
from tests.parity import filled, world_of_one
from tests.replicate.nets import Mixed, Tied
from tests.world import world


def wrap(kind: str, module: nn.Module, mesh: Mesh, **options: Any) -> Any:
    return KINDS[kind].wrap(module, mesh, **KINDS[kind].options, **options)


def module_of(*layers: tuple[str, nn.Module]) -> nn.Module:
    module = nn.Module()
    for name, layer in layers:
        module.add_module(name, layer)
    return module


def linear(*shape: int) -> nn.Module:
    return nn.Linear(*(shape or (2, 2)))


ONE = [("a", linear())]
NAMED = "parameter 'a.weight', "
# What rank 0 has, what the others have, and what the error says of the two.
DIFFERENCES: dict[str, tuple[list[Any], list[Any], str]] = {
    "name": (ONE, [("b", linear())], f"{NAMED}.* on rank 0, but parameter 'b.weight', .* on rank 1"),
    "order": (
        [*ONE, ("b", linear())],
        [("b", linear()), *ONE],
        r"parameter 'a.weight'.* on rank 0, but .*'b.weight'.* on rank 1",
    ),
    "shape": (
        [("a", linear(2, 3))],
        [("a", linear(3, 2))],
        rf"{NAMED}shape \(3, 2\), .* on rank 0, but .* shape \(2, 3\), .* on rank 1",
    ),
    "dtype": (ONE, [("a", linear().double())], f"{NAMED}.*float32.* on rank 0, but .*float64.* on rank 1"),
    "requires_grad": (
        ONE,
        [("a", linear().requires_grad_(False))],
        f"{NAMED}.*requires_grad=True on rank 0, but .*requires_grad=False on rank 1",
    ),
    "one more": (ONE, [*ONE, ("b", linear())], r"nothing on rank 0, but parameter 'b.weight', .* on rank 1"),
    "buffer": (
        [("a", nn.BatchNorm1d(2))],
        [("a", nn.BatchNorm1d(2, track_running_stats=False))],
        r"buffer 'a.running_mean', .* on rank 0, but nothing on rank 1",
    ),
}


@on_every_kind(3, WRAPPERS)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_models_that_differ_are_refused_on_all_ranks_by_the_first_difference(
    mesh: Mesh, kind: str, difference: str
) -> None:
    first, other, message = DIFFERENCES[difference]
    module = module_of(*(first if mesh.rank == 0 else other))
    match = f"^the ranks differ in models: {message}: build the same modules in the same order$"
    with pytest.raises(ValueError, match=match) as caught:
        wrap(kind, module, mesh)
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)  # so that one reports it


# What rank 0 passes and the others: they would start different operations, or draw other random numbers.
OPTIONS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "init_sync": (True, "verify", WRAPPERS),
    "find_unused_parameters": (None, False, WRAPPERS),
    "broadcast_buffers": (True, False, ("replicated",)),
    "seed": (0, 1, WRAPPERS),
    "strategy": ("bucketed", "naive", ("replicated",)),
    "bucket_cap_mb": (25, [1, 25], ("replicated",)),
    "ordered": (True, False, ("replicated",)),
}


@on_every_kind(2, WRAPPERS)
def test_options_that_differ_are_refused_on_all_ranks(mesh: Mesh, kind: str) -> None:
    for name, (first, other, kinds) in OPTIONS.items():
        if kind in kinds:
            message = (
                rf"^the ranks differ in options: {name}={first!r} on rank 0, but {name}=.* on rank 1: pass"
            )
            with pytest.raises(ValueError, match=message):
                wrap(kind, net(), mesh, **{name: other if mesh.rank else first})


# What rank 1 alone wraps, how, and what the error says. More, for replicas: replicate/test_construction.py.
REFUSALS: list[tuple[tuple[str, ...], Callable[[], nn.Module], dict[str, Any], str]] = [
    (WRAPPERS, lambda: nn.Embedding(4, 2, max_norm=1.0), {}, r"'' has max_norm=1\.0"),
    (WRAPPERS, lambda: nn.LazyLinear(2), {}, "parameter 'weight' has no shape yet"),
    (WRAPPERS, net, {"init_sync": "yes"}, "init_sync='yes': expected True"),
    (("stage 2",), lambda: net().to("meta"), {}, "parameter '0.weight' is on the meta device"),
    (STAGES, net, {"compute_dtype": torch.int8}, r".*expected one of floating point, got"),
]


@on_every_kind(3, WRAPPERS)
def test_what_one_rank_refuses_all_raise_and_name_it_and_all_can_go_on(mesh: Mesh, kind: str) -> None:
    for kinds, make, options, message in REFUSALS:
        if kind in kinds:
            with pytest.raises(ValueError, match=f"^{message}" if mesh.rank == 1 else f"^rank 1: {message}"):
                wrap(kind, make() if mesh.rank == 1 else net(), mesh, **(options if mesh.rank == 1 else {}))
    model, optimizer = KINDS[kind].make(filled(net()), mesh)
    Program(kind).step(model, optimizer, 0)
    close(optimizer, model)


@on_every_kind(2, WRAPPERS)
def test_a_model_that_was_refused_is_left_as_it_was(mesh: Mesh, kind: str) -> None:
    module = nn.Linear(2, 2 + mesh.rank)
    with pytest.raises(ValueError, match="shape"):
        wrap(kind, module, mesh)
    assert type(module) is nn.Linear
    module(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


class Varied(nn.Module):
    """A frozen and a tied parameter; buffers of bools, a number, an expanded one, one that is not saved."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tied = filled(Tied())
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("same", torch.zeros(1).expand(3))
        self.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(rank)


@on_every_kind(2, WRAPPERS)
def test_rank_0s_values_are_everybodys(mesh: Mesh, kind: str) -> None:
    expected = Varied(0)
    model = wrap(kind, Varied(mesh.rank), mesh)
    for name, x in instep.full_state_dict(model).items():
        assert torch.equal(x, expected.state_dict()[name]), name
    for name, x in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], x), name
    close(model)


@world(2)
def test_rank_0s_values_are_taken_in_every_dtype_and_layout(mesh: Mesh) -> None:
    module = Mixed()
    module.turned = nn.Parameter(torch.zeros(3, 2).t())
    module.image = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(mesh.rank)
    instep.DataParallel(module, process_group=mesh).close()
    assert all(torch.equal(p, torch.zeros_like(p)) for p in module.parameters())
    assert module.image.is_contiguous(memory_format=torch.channels_last)


@on_every_kind(3, WRAPPERS)
def test_values_that_differ_are_refused_if_they_are_verified(mesh: Mesh, kind: str) -> None:
    close(wrap(kind, filled(net()), mesh, init_sync="verify"))

    def by_one_bit(x: Tensor) -> None:
        if mesh.rank == 1:
            x[2] = torch.nextafter(x[2], torch.tensor(9.0))

    for name in ("2.bias", "extra"):
        module = filled(net())
        module.register_buffer("extra", torch.zeros(3))
        with torch.no_grad():
            by_one_bit(dict([*module.named_parameters(), *module.named_buffers()])[name])
        with pytest.raises(ValueError, match=rf"'{name}' has other values on rank 1 than on.* 0: load"):
            wrap(kind, module, mesh, init_sync="verify")


@world(2)
def test_values_may_be_left_as_they_are(mesh: Mesh) -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(mesh.rank)
    instep.DataParallel(module, process_group=mesh, init_sync=False).close()
    assert module.weight.tolist() == [[mesh.rank, mesh.rank]]


ALREADY = r"sharded already|is sharded by fully_shard|belongs to (a|another) DataParallel"


@pytest.mark.parametrize(("first", "second"), [*product(WRAPPERS, WRAPPERS)])
def test_a_module_is_wrapped_once_until_it_is_closed(first: str, second: str) -> None:
    module = nn.Sequential(filled(net()), nn.Linear(2, 2))
    model = wrap(first, module[0], world_of_one())
    for part in (module[0], module):
        with pytest.raises(ValueError, match=ALREADY):
            wrap(second, part, world_of_one())
    close(model)
    close(wrap(second, filled(net()), world_of_one()))
