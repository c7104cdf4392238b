"""The orders of torch.distributed.pipelining, where it has the same schedules: its generators alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from instep.pipeline.schedules import generate

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def rows_of(order):
    """torch's rows by rank, without idle steps and without what is no computation."""
    return tuple(
        tuple(str(action) for action in row if action is not None and action.is_compute_op)
        for _, row in sorted(order.items())
    )


def ours(name, *counts):
    return tuple(tuple(map(str, row)) for row in generate(name, *counts).rows)


def single(kind, ranks, micro_batches):
    """Its order is read off two numbers of the schedule, so they stand for it."""
    order = getattr(getattr(schedules, kind, None), "_get_pipeline_order", None)
    if order is None:
        pytest.skip("this torch has no order to compare with")
    return rows_of(order(SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)))


def multiple(kind, ranks, micro_batches, chunks):
    """Likewise of a schedule of several stages per rank, with the attributes that its constructor sets."""
    order = getattr(getattr(schedules, kind, None), "_calculate_single_rank_operations", None)
    if order is None:
        pytest.skip("this torch has no order to compare with")
    rounds = max(1, micro_batches // ranks)
    settings = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
        _n_microbatches=micro_batches,
        _num_stages=ranks * chunks,
    )
    return rows_of({rank: order(settings, rank) for rank in range(ranks)})


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 2), (3, 7), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_are_those_of_torch(ranks, micro_batches):
    """torch writes its order of 1f1b down to be looked at; on the last rank it counts forwards from 1."""
    assert ours("gpipe", ranks, micro_batches) == single("ScheduleGPipe", ranks, micro_batches)
    assert ours("1f1b", ranks, micro_batches)[:-1] == single("Schedule1F1B", ranks, micro_batches)[:-1]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "chunks"),
    [(2, 2, 2), (2, 8, 3), (4, 8, 2), (4, 10, 2), (3, 2, 2), (5, 5, 4), (8, 32, 2)],
)
def test_interleaved_is_that_of_torch(ranks, micro_batches, chunks):
    found = multiple("ScheduleInterleaved1F1B", ranks, micro_batches, chunks)
    assert ours("interleaved", ranks, micro_batches, chunks) == found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 3), (4, 8), (8, 32)])
def test_zb_h1_is_torchs_interleaved_zero_bubble_of_one_stage_per_rank(ranks, micro_batches):
    found = multiple("ScheduleInterleavedZeroBubble", ranks, micro_batches, 1)
    assert ours("zb-h1", ranks, micro_batches) == found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 2), (3, 9), (4, 8), (8, 32)])
def test_zb_v_is_that_of_torch(ranks, micro_batches):
    assert ours("zb-v", ranks, micro_batches) == multiple("ScheduleZBVZeroBubble", ranks, micro_batches, 2)
