"""How ranks share the work: settings from what wrappers say, and the words that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import instep
from instep.checkpoint.registered import Registered
from instep.reduce.tree import rank_major
from instep.run.placement import global_batch, layout_of, shard_axis
from instep.run.settings import ScriptBatch, ScriptConfig
from tests.parity import world_of_one


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "global batch 32 = micro-batch 4 x accumulation 8 x 1 rank"),
        (2, "global batch 32 = micro-batch 4 x accumulation 4 x 2 ranks"),
        (3, "global batch 32 = micro-batch 4 x 8, of which 3 ranks have 3 + 3 + 2"),
        (8, "global batch 32 = micro-batch 4 x accumulation 1 x 8 ranks"),
    ],
)
def test_the_equation_of_the_batch_is_true_for_unequal_shares_too(ranks: int, said: str) -> None:
    shares = [len(own) for own in rank_major(8, ranks)]
    assert global_batch(ScriptBatch(global_size=32, micro_size=4), shares) == said


def test_the_ranks_of_a_pipeline_have_one_share() -> None:
    batch = ScriptBatch(global_size=32, micro_size=4)
    said = "global batch 32 = micro-batch 4 x accumulation 8 x 1 pipeline of 2 ranks"
    assert global_batch(batch, [8], pp=2) == said
    said = "global batch 32 = micro-batch 4 x 8, of which 3 pipelines of 2 ranks have 3 + 3 + 2"
    assert global_batch(batch, [3, 3, 2], pp=2) == said


@given(st.integers(1, 40), st.integers(2, 40))
def test_shard_groups_are_as_large_as_asked_for_or_larger_and_leave_no_rank_over(
    num_ranks: int, asked: int
) -> None:
    axis = shard_axis(num_ranks, asked)
    assert num_ranks % axis == 0
    assert axis >= min(asked, num_ranks)
    assert not any(num_ranks % n == 0 for n in range(asked, axis))
    assert shard_axis(num_ranks, 1) == 1
    assert shard_axis(num_ranks, -1) == num_ranks


PP: dict[str, Any] = {"schedule": "interleaved", "micro_batches": 2, "chunks": 2}


def wrapped(kind: str) -> tuple[Any, torch.optim.Optimizer]:
    module = nn.Linear(4, 4)
    if kind == "fully_shard":
        model: Any = instep.fully_shard(module, stage=3)
    else:
        model = instep.DataParallel(module, ordered=kind != "not ordered")
    if kind == "sharded":
        return model, instep.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "strategy", "stage", "ordered"),
    [
        ("plain", "bucketed", 0, True),
        ("not ordered", "bucketed", 0, False),
        ("sharded", "bucketed", 1, True),
        ("fully_shard", "fully_shard", 3, True),
    ],
)
def test_what_is_divided_is_among_the_settings(kind: str, strategy: str, stage: int, ordered: bool) -> None:
    model, optimizer = wrapped(kind)
    found = layout_of(Registered({"model": model, "optimizer": optimizer}), ScriptConfig()).parallel
    model.close()
    assert (found.strategy, found.shard_stage, found.ordered) == (strategy, stage, ordered)


@pytest.mark.parametrize(("cuts", "said"), [("cost", "cost"), ([1], (1,))])
def test_what_a_pipeline_is_cut_by_is_among_the_settings(cuts: Any, said: Any) -> None:
    """It was not, so a run that was cut by cost was advised to be cut by cost."""
    model = instep.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), world_of_one(), cuts=cuts, **PP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = layout_of(Registered({"model": model, "optimizer": optimizer}), ScriptConfig()).parallel
    model.close()
    assert (found.cuts, found.schedule) == (said, "interleaved")


class Named(torch.utils.data.Dataset[Tensor]):
    name = "sixteen rows"

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((4,), float(number))


@pytest.mark.parametrize(
    ("words", "said_of_nodes"),
    [({}, ""), ({"nodes": "int8", "rounding": "stochastic"}, ", nodes in int8, stochastic")],
)
def test_a_run_says_what_it_is_about_to_do(
    words: dict[str, Any], said_of_nodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = instep.Run(tmp_path / "run", timeout_s=60)
    model = instep.DataParallel(nn.Linear(4, 400), run.mesh, **words)
    optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, run.mesh)
    data = instep.Loader(Named(), batch_size=8, micro_batch_size=2)
    for step in run.steps(1, model=model, optimizer=optimizer, data=data):
        with step:
            for micro_batch in model.micro_batches(data):
                model(micro_batch.data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [
        "2.00 k parameters on 1 rank (cpu, 1 thread each); strategy bucketed, stage 1 of sharding"
        f"{said_of_nodes}; timeout_s=60; checkpoints hold: model, optimizer, data",
        f"sixteen rows; run directory {tmp_path / 'run'}",
        "global batch 8 = micro-batch 2 x accumulation 4 x 1 rank",
    ]
