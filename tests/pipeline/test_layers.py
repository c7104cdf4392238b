"""Layers that draw, write in place, measure, or are frozen: wherever the cut is, they train as on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.mesh.mesh import Mesh
from tests.parity import world_of_one
from tests.world import world

G, WIDTH = 4, 4
x = torch.randn(G, 5, WIDTH, generator=torch.Generator().manual_seed(3))
LOOPED = {"schedule": "interleaved", "chunks": 2}  # on one rank a pipeline of two stages


def linear() -> nn.Linear:
    """Not drawn: ranks that are threads share the generator."""
    made = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape))
    return made


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def step(layers: Sequence[nn.Module], mesh: Mesh | None = None, **options: Any) -> list[Tensor]:
    """The losses of one step of a pipeline, whose gradients stay."""
    model = instep.Pipeline(nn.Sequential(*layers), mesh or world_of_one(), micro_batches=G, **options)
    losses = model.step(mean_square, lambda micro_batch: x[micro_batch.index].clone())
    model.close()
    return losses


def step_of_data_parallel(layers: Sequence[nn.Module]) -> None:
    model = instep.DataParallel(nn.Sequential(*layers))
    for micro_batch in model.micro_batches(G):
        mean_square(model(x[micro_batch.index].clone()), micro_batch).backward()
    model.close()


class Block(nn.Module):
    rng_block: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = linear(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


@pytest.mark.parametrize(
    "layer",
    [
        Block,
        lambda: nn.Sequential(nn.Dropout(0.5), linear()),
        lambda: nn.Sequential(nn.Dropout(0.5), Block()),
        lambda: nn.Sequential(Block(), nn.Dropout(0.5)),
    ],
    ids=["a block", "no block", "drawn before a block", "drawn after a block"],
)
def test_what_a_layer_draws_depends_on_no_cut(layer: Callable[[], nn.Module]) -> None:
    losses = [torch.stack(step([layer() for _ in range(4)], cuts=cuts, **LOOPED)) for cuts in ([1], [2], [3])]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: self.norm(self.linear(x)), x, use_reentrant=False)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_a_norm_that_is_computed_again_measures_once_as_without_a_pipeline(schedule: str) -> None:
    alone, piped = ([Checkpointed() for _ in range(2)] for _ in range(2))
    step_of_data_parallel(alone)
    step(piped, schedule=schedule)
    for one, other in zip(alone, piped, strict=True):
        assert one.norm.num_batches_tracked == other.norm.num_batches_tracked == G
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


class WithCodes(nn.Module):
    """Frozen whole numbers, as of quantised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.codes = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[..., self.codes])


@world(2, pp=2, dp=1)
def test_a_rank_can_be_without_frozen_whole_numbers(mesh: Mesh) -> None:
    model = instep.Pipeline(nn.Sequential(WithCodes(), WithCodes()), mesh, micro_batches=G)
    model.step(mean_square, lambda micro_batch: x[micro_batch.index])
    whole = instep.full_state_dict(model)
    assert torch.equal(whole["0.codes"], torch.arange(WIDTH))
    assert torch.equal(whole["1.codes"], torch.arange(WIDTH))
    model.close()


def in_place() -> list[nn.Module]:
    """The first cut is before what keeps its output for its backward, the last before what writes to it."""
    return [linear(), nn.Sigmoid(), linear(), nn.ReLU(inplace=True), linear()]


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("options", [LOOPED, {"schedule": "zb-v"}], ids=["B", "I and W"])
def test_a_stage_may_begin_with_a_layer_that_writes_in_place(options: dict[str, Any], cut: int) -> None:
    alone, piped = nn.ModuleList(in_place()), nn.ModuleList(in_place())
    step_of_data_parallel(list(alone))
    step(list(piped), cuts=[cut], **options)
    for one, other in zip(gradients(alone), gradients(piped), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_layer_may_be_there_twice(cut: int) -> None:
    def made() -> list[nn.Module]:
        act, twice = nn.Tanh(), linear()
        return [twice, act, linear(), act, twice]

    alone, piped = made(), made()
    step_of_data_parallel(alone)
    step(piped, cuts=[cut], **LOOPED)
    for layer, other in zip(alone, piped, strict=True):
        for one, its in zip(gradients(layer), gradients(other), strict=True):
            assert one is not None and its is not None and torch.equal(one, its)


@world(2, pp=2, dp=1)
def test_a_norm_of_two_stages_is_refused_by_name(mesh: Mesh) -> None:
    norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(
        ValueError, match=r"buffer '1.running_mean' .* layers on ranks 0 and 1, .*make a norm"
    ):
        instep.Pipeline(nn.Sequential(linear(), norm, linear(), norm), mesh)
