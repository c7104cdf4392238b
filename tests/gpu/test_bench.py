"""The benchmarks over NCCL, with the models on GPUs; run with ``pytest -m gpu`` where there are two."""

from __future__ import annotations

import pytest
import torch

from instep.bench import buckets, scaling, steps
from instep.bench.options import BucketsOptions, ScalingOptions, StepsOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_steps_over_nccl_have_ddp_beside_them_and_the_memory_of_a_gpu() -> None:
    options = StepsOptions(backend="nccl", strategies=("bucketed",), params="2M", batch=1, samples=2)
    rows = {row["strategy"]: row for row in steps.measure(options.workload("given"), options).rows}
    assert set(rows) == {"none", "alone", "DDP", "bucketed"}
    assert {row["over"] for row in rows.values()} == {"", "nccl"}
    assert rows["bucketed"]["peak(MB)"] > 2 * 8  # weights and gradients


def test_buckets_over_nccl_take_longer_than_no_exchange() -> None:
    found = buckets.measure(BucketsOptions(backend="nccl", params="2M", sizes=(1.0, 100.0), samples=2))
    assert all(row["step(ms)"] > 0 and row["calls"] > 0 for row in found["rows"])


def test_one_gpu_is_measured_beside_two() -> None:
    found = scaling.measure(ScalingOptions(ranks=(1, 2), backend="nccl", params="2M", batch=2, samples=2))
    assert found["cores"] is None
    assert {row["ranks"] for row in found["rows"]} == {1, 2}
