"""``bucket_cap_mb="auto"``: one choice, the same on all ranks, that follows the link and keeps the bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.comm.cost import AlphaBeta, uniform_exposed_s
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.auto_cap import (
    DEFAULT_MB,
    MEASURED,
    MEBIBYTE,
    SMALL_MB,
    WARM_UP,
    Sample,
    choose_cap_mb,
    probing_caps,
)
from instep.replicate.wrapper import DataParallel
from instep.step.micro_batches import MicroBatch
from tests.parity import Training, assert_bits_of_one, filled, momentum, world_of_one
from tests.replicate.nets import WIDTH, Dense, mean_square
from tests.replicate.replicas import equal_everywhere, square
from tests.world import world

REDUCTIONS = 1 + WARM_UP + MEASURED  # until the size is chosen
TOTAL, BACKWARD_S = 80 * MEBIBYTE, 0.1


class Wide(nn.Module):
    """2.1 MB, so that probing has buckets of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, 512, 512, 512, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def pipeline_layers(self) -> list[Any]:
        return [
            (f"layers.{i}", lambda x, layer=layer: torch.tanh(layer(x) / 8))
            for i, layer in enumerate(self.layers)
        ]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) / 8)
        return x


def sample(link: AlphaBeta) -> Sample:
    sizes = [SMALL_MB * MEBIBYTE, 9 * MEBIBYTE] * 8
    return Sample([(int(size), link.time_s(size)) for size in sizes], BACKWARD_S)


@pytest.mark.parametrize("hiding", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "link", [AlphaBeta(1e-5, 1e-11), AlphaBeta(1e-3, 1e-9), AlphaBeta(5e-3, 1e-8), AlphaBeta(2e-2, 1e-10)]
)
def test_no_size_is_better_for_the_link_that_was_measured(link: AlphaBeta, hiding: float) -> None:
    def longer_s(mb: float) -> float:
        exposed_s = uniform_exposed_s(mb * MEBIBYTE, TOTAL, BACKWARD_S, link)
        sent_s = TOTAL / min(mb * MEBIBYTE, TOTAL) * link.latency_s + TOTAL * link.s_per_byte
        return exposed_s + hiding * (sent_s - exposed_s)

    chosen = choose_cap_mb([sample(link)] * 5, hiding)
    least = min(longer_s(SMALL_MB + 0.1 * i) for i in range(800))
    assert longer_s(chosen) <= 1.01 * least + 1e-6


def test_a_large_latency_makes_large_buckets_and_a_small_one_small_buckets() -> None:
    sizes = [choose_cap_mb([sample(AlphaBeta(latency_s, 2e-9))], 0.0) for latency_s in (1e-6, 1e-3, 1e-2)]
    assert sizes[0] == SMALL_MB and sizes == sorted(sizes) and sizes[-1] > 20
    assert choose_cap_mb([sample(AlphaBeta(1e-3, 2e-9))], 1.0) == 80  # no core is idle: hide nothing


def test_where_nothing_can_be_told_apart_the_size_is_the_default() -> None:
    alike = Sample([(MEBIBYTE, 0.001)] * 8, BACKWARD_S)
    without_backward = sample(AlphaBeta(1e-3, 1e-9))._replace(backward_s=0.0)
    assert [choose_cap_mb([x], 0.0) for x in (alike, without_backward)] == [DEFAULT_MB] * 2


@pytest.mark.parametrize("megabytes", [1, 30])
def test_probing_has_buckets_of_two_sizes_for_parameters_of_one(megabytes: int) -> None:
    small, large, *_ = probing_caps([megabytes * MEBIBYTE] * 8)
    assert small <= megabytes < 2 * megabytes <= large


class Watched:
    """The choices that a wrapper made, as it makes them."""

    def __init__(self, model: Any) -> None:
        self.reducer = model._reducer
        self.caps: list[float] = []

    def __call__(self) -> None:
        caps = self.reducer.caps
        if not callable(caps) and caps not in self.caps:
            self.caps.append(caps)


def steps(model: DataParallel, mesh: Mesh, count: int, *, declared: bool) -> list[float]:
    optimizer, watched = torch.optim.SGD(model.parameters(), lr=0.01), Watched(model)
    for step in range(count):
        if declared:
            for micro_batch in model.micro_batches(4):
                mean_square(model, micro_batch, step)
        else:
            with model.no_sync():
                square(model, mesh.rank).backward()
            square(model, mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        watched()
    return watched.caps


def values(model: DataParallel) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def chosen_once_with_the_bits_of_a_number(mesh: Mesh, declared: bool) -> None:
    found = []
    for cap in ("auto", 25):
        model = DataParallel(filled(Wide()), process_group=mesh, bucket_cap_mb=cap)
        if cap == "auto":
            assert "bucket_mb" not in model.placement
            assert steps(model, mesh, REDUCTIONS - 1, declared=declared) == []
            (chosen,) = steps(model, mesh, 3, declared=declared)
            assert model.placement["bucket_mb"] == chosen >= SMALL_MB
            assert equal_everywhere(mesh, [torch.tensor(chosen)])
            assert sum(len(b.slots) for b in model._reducer.buckets) == len(model._reducer.names)
        else:
            steps(model, mesh, REDUCTIONS - 1, declared=declared)
            steps(model, mesh, 3, declared=declared)
        found.append(values(model))
        model.close()
    assert all(map(torch.equal, *found)) and all(x.isfinite().all() for x in found[0])


@pytest.mark.parametrize("declared", [False, True])
@world(2)
def test_two_ranks_choose_once_and_keep_the_bits(mesh: Mesh, declared: bool) -> None:
    chosen_once_with_the_bits_of_a_number(mesh, declared)


@pytest.mark.parametrize("declared", [False, True])
@world(3, by="process", backend="shm")
def test_three_processes_choose_once_and_keep_the_bits(mesh: Mesh, declared: bool) -> None:
    chosen_once_with_the_bits_of_a_number(mesh, declared)


LONG = Training(Wide, mean_square, 4, momentum, num_steps=REDUCTIONS + 2)


@world(3)
def test_the_bits_are_those_of_one_rank(mesh: Mesh) -> None:
    assert_bits_of_one(mesh, LONG, bucket_cap_mb="auto")


def leave_early(model: DataParallel, rank: int) -> None:
    for micro_batch in model.micro_batches(4):
        mean_square(model, micro_batch, 0)
        if rank == 1:
            raise RuntimeError("this rank gives up")


@world(2)
def test_a_reduction_that_was_given_up_does_not_count(mesh: Mesh) -> None:
    model = DataParallel(filled(Wide()), process_group=mesh, bucket_cap_mb="auto")
    assert steps(model, mesh, REDUCTIONS - 1, declared=True) == []
    with pytest.raises((RuntimeError, Desync)):
        leave_early(model, mesh.rank)
    model.zero_grad()
    assert "bucket_mb" not in model.placement
    assert len(steps(model, mesh, 1, declared=True)) == 1
    model.close()


@world(2)
def test_verify_leaves_the_measurement_alone(mesh: Mesh) -> None:
    model = DataParallel(filled(Wide()), process_group=mesh, bucket_cap_mb="auto")
    steps(model, mesh, REDUCTIONS - 1, declared=True)
    buckets = model._reducer.buckets
    model.verify(torch.ones(4, WIDTH), lambda model, x: model(x).square().mean()).raise_for_error()
    assert model._reducer.buckets == buckets and "bucket_mb" not in model.placement
    assert len(steps(model, mesh, 1, declared=True)) == 1
    model.close()


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap"])
@world(2)
def test_other_strategies_have_no_bucket_size_to_choose(mesh: Mesh, strategy: str) -> None:
    model = DataParallel(filled(Wide()), process_group=mesh, strategy=strategy, bucket_cap_mb="auto")
    assert model._reducer._samples is None and model.placement["bucket_mb"] == DEFAULT_MB
    model.close()


def test_one_rank_sends_nothing_and_chooses_nothing() -> None:
    model = DataParallel(filled(Wide()), process_group=world_of_one(), bucket_cap_mb="auto")
    assert steps(model, world_of_one(), REDUCTIONS + 1, declared=True) == [DEFAULT_MB]
    model.close()


def leaf(micro_batch: MicroBatch) -> Tensor:
    return torch.full((4, WIDTH), 1.0 + micro_batch.index)


def pipeline_weights(mesh: Mesh, cap: float | str) -> list[Tensor]:
    model = instep.Pipeline(filled(Wide()), mesh, micro_batches=4, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(REDUCTIONS + 2):
        model.step(lambda output, micro_batch: output.square().mean(), inputs=leaf)
        optimizer.step()
        optimizer.zero_grad()
    if cap == "auto":
        assert all(not callable(stage.reducer.caps) for stage in model._stages.values())
    found = [p.detach().clone() for p in model.parameters()]
    model.close()
    return found


@world(4, dp=2, pp=2)
def test_each_stage_of_a_pipeline_chooses_and_keeps_the_bits(mesh: Mesh) -> None:
    assert all(map(torch.equal, pipeline_weights(mesh, "auto"), pipeline_weights(mesh, 25)))


def hooked(mesh: Mesh) -> None:
    DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb="auto").register_comm_hook(None, print)


REFUSALS: dict[str, Callable[[Mesh], object]] = {
    "bucket_cap_mb='Auto': expected a size in MiB, or 'auto'": lambda mesh: DataParallel(
        filled(Dense()), process_group=mesh, bucket_cap_mb="Auto"
    ),
    "bucket_cap_mb='best': expected a size in MiB, or 'auto'": lambda mesh: instep.Pipeline(
        filled(Dense()).layers, world_of_one(), bucket_cap_mb="best"
    ),
    "which measures the exchanges that a hook replaces: pass a size in MiB": hooked,
    "bucket_cap_mb": lambda mesh: DataParallel(
        filled(Dense()), process_group=mesh, bucket_cap_mb="auto" if mesh.rank else 25
    ),
}


@pytest.mark.parametrize("says", REFUSALS)
@world(2)
def test_refusals(mesh: Mesh, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        REFUSALS[says](mesh)
