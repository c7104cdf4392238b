"""Which optimizers are cut, which are not, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Muon,
    Optimizer,
    RMSprop,
    SparseAdam,
)

from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import world_of_one
from tests.shard.given import SHAPES, parameters, steps
from tests.shard.trained import assert_same
from tests.world import world

NOT_EMPTY = tuple(shape for shape in SHAPES if 0 not in shape)
MATRICES = ((131, 77), (5, 4096), (3, 2), (64, 64), (12, 800))


def assert_as_plain(
    mesh: Mesh,
    kind: type[Optimizer],
    options: dict[str, Any],
    shapes: Any = SHAPES,
    dtype: Any = torch.float32,
) -> None:
    """After four steps everything is as the plain optimizer leaves it."""
    ours, expected = parameters(shapes, dtype), parameters(shapes, dtype)
    sharded, plain = ShardedOptimizer(ours, kind, mesh, **options), kind(expected, **options)
    steps(sharded, ours, 4)
    steps(plain, expected, 4)
    for x, y in zip(ours, expected, strict=True):
        assert_same(x.detach(), y.detach(), kind.__name__)
    assert_same(sharded.state_dict(), plain.state_dict(), kind.__name__)
    assert sharded.defaults == plain.defaults
    sharded.close()


HALF: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "foreach": True}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (ASGD, {}),
    (Adam, {"weight_decay": 0.01}),
    (AdamW, {"fused": True}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@world(2)
def test_in_half_precision_threads_do_not_cut_where_ranks_do(mesh: Mesh, dtype: torch.dtype) -> None:
    """Two threads cut tensors of more than 32768 elements, whole ones in other places than slices of them."""
    before = torch.get_num_threads()
    try:
        for kind, options in HALF:
            after = []
            for ranks, threads in ((mesh, 2), (world_of_one(), 2), (None, 1)):
                torch.set_num_threads(threads)
                given = parameters(((102437,), (37, 4099)), dtype)
                optimizer = kind(given, **options)
                if ranks is not None:
                    optimizer = ShardedOptimizer(given, kind, ranks, **options)
                steps(optimizer, given, 3)
                assert torch.get_num_threads() == threads
                after.append([p.detach() for p in given])
            for other in after[1:]:
                assert_same(after[0], other, kind.__name__)
    finally:
        torch.set_num_threads(before)


@world(3)
def test_optimizers_of_whole_matrices_get_them(mesh: Mesh) -> None:
    assert_as_plain(mesh, Adafactor, {"lr": 0.01}, NOT_EMPTY)
    assert_as_plain(mesh, Muon, {"lr": 0.01}, MATRICES)


class SignOfTheMean(Optimizer):
    """A user's optimizer, which looks at a whole parameter and counts in its group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["mean"] = p.grad.mean()
                    self.state[p]["name"] = "a word"
                    p.add_(self.state[p]["mean"].sign(), alpha=-group["lr"] / group["count"])


class OwnAdamW(AdamW):
    """A subclass may do anything, so it is not cut."""


@world(3)
def test_optimizers_that_are_not_known_get_whole_parameters(mesh: Mesh) -> None:
    assert_as_plain(mesh, SignOfTheMean, {"lr": 0.5}, NOT_EMPTY)
    assert_as_plain(mesh, OwnAdamW, {"lr": 0.5})
    ours = parameters()
    optimizer = ShardedOptimizer(ours, OwnAdamW, mesh)
    pieces = optimizer.sharded_state_dict()["pieces"]
    assert all((x["first"], x["last"]) == (0, ours[x["parameter"]].numel()) for x in pieces)
    optimizer.close()


@world(2)
def test_an_optimizer_that_adapts_its_options_in_another_way_on_each_rank_is_noticed(mesh: Mesh) -> None:
    class Adaptive(SignOfTheMean):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                group["lr"] = float(sum(p.sum() for p in group["params"]))

    ours = parameters()
    optimizer = ShardedOptimizer(ours, Adaptive, mesh)
    with pytest.raises(RuntimeError, match="rank 1 has other options in its parameter groups"):
        steps(optimizer, ours, 1)
    optimizer.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(LBFGS, r"LBFGS cannot be sharded: .* on every rank"), (SparseAdam, "SparseAdam .* sparse=False")],
)
@world(2)
def test_optimizers_that_cannot_be_sharded_are_refused_with_a_way_out(
    mesh: Mesh, kind: type[Optimizer], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ShardedOptimizer(parameters(), kind, mesh)


@world(2)
def test_what_is_no_class_of_optimizers_is_refused(mesh: Mesh) -> None:
    for wrong in (torch.nn.Linear, AdamW(parameters()), [AdamW], "adamw"):
        with pytest.raises(
            TypeError, match=r"optimizer_cls: expected a class such as torch.optim.AdamW, got"
        ):
            ShardedOptimizer(parameters(), wrong, mesh)
    with pytest.raises(ValueError, match="differentiable=True cannot be sharded"):
        ShardedOptimizer(parameters(), AdamW, mesh, differentiable=True)
    two_dtypes = [*parameters([(72,)], torch.bfloat16), *parameters([(72, 72)])]
    with pytest.raises(
        ValueError, match=r"bfloat16 and torch.float32, and Adafactor .* group for each dtype"
    ):
        ShardedOptimizer(two_dtypes, Adafactor, mesh)
    ShardedOptimizer(two_dtypes, Adafactor, mesh, eps=(1e-7, 1e-3)).close()


@world(2)
def test_what_the_class_itself_refuses_is_refused_on_all_ranks(mesh: Mesh) -> None:
    """Muon takes matrices only, and the vector is the second rank's."""
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        ShardedOptimizer(parameters(((80, 80), (900,))), Muon, mesh)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(parameters(), AdamW, mesh, lr=-1.0)


@world(2)
def test_a_closure_gives_the_loss_and_the_gradients(mesh: Mesh) -> None:
    ours, expected = parameters(), parameters()
    sharded, plain = ShardedOptimizer(ours, AdamW, mesh), AdamW(expected)

    def closure(optimizer: Optimizer, given: list[torch.nn.Parameter]) -> Tensor:
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in given)
        loss.backward()
        return loss

    for _ in range(2):
        loss = sharded.step(lambda: closure(sharded, ours))
        assert torch.equal(loss, plain.step(lambda: closure(plain, expected)))
    for x, y in zip(ours, expected, strict=True):
        assert_same(x.detach(), y.detach(), "closure")
    sharded.close()
