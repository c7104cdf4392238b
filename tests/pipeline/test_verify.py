"""``verify`` of a pipeline: gradients of all stages are those of one process, or the wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import instep
from instep.errors import InstepError
from instep.mesh.mesh import Mesh
from tests.pipeline.test_runtime import G, gpt, loss, of_one_rank, sha256, train, windows
from tests.world import world


def verified(model: instep.Pipeline, **options: Any) -> Any:
    return model.verify(
        lambda logits, micro_batch: loss(logits, 0, micro_batch),
        lambda micro_batch: windows(0, micro_batch)[:, :-1],
        **options,
    )


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_all_gradients_are_those_of_one_process_and_nothing_is_left_behind(mesh: Mesh, schedule: str) -> None:
    expected = of_one_rank()
    model = instep.Pipeline(gpt(checkpoint=schedule == "1f1b"), mesh, schedule, G)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = sha256(model, optimizer)
    report = verified(model)
    assert report.ok and report.cause == ""
    assert {row.name for row in report.rows} == {name for name, _ in model.module.named_parameters()}
    assert all(row.error < 1e-6 for row in report.rows)
    assert report.strategy == f"bucketed, pipelines of 2 ({schedule})"
    assert all(p.grad is None for p in model.parameters()) and model.next_step == 0
    assert sha256(model, optimizer) == before
    train(model, optimizer)
    assert sha256(model, optimizer) == expected
    model.close()


@world(4, pp=2, dp=2)
def test_a_wrong_gradient_is_named_with_the_rank_that_has_it(mesh: Mesh) -> None:
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    wrong = "blocks.3.attention.out.weight"
    for stage in model._stages.values():
        if mesh.rank == 3 and wrong in stage.reducer.names:
            finish = stage.reducer.finish

            def doubled(finish: Any = finish) -> None:
                finish()
                model.module.get_parameter(wrong).grad.mul_(2.0)

            stage.reducer.finish = doubled
    report = verified(model)
    bad = [(row.name, row.rank, round(row.ratio, 3)) for row in report.rows if not row.ok]
    assert bad == [(wrong, 3, 2.0)]
    with pytest.raises(InstepError, match=rf"1 of \d+ gradients on 4 rank.*'{wrong}' on rank 3"):
        report.raise_for_error()
    model.close()


@world(2, pp=2, dp=1)
def test_norms_and_gradients_that_are_there_are_as_before(mesh: Mesh) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = instep.Pipeline(net, mesh, "gpipe", 2)
    x = torch.linspace(-1.0, 1.0, 2 * 3 * 4).view(2, 3, 4)
    step: dict[str, Any] = {
        "inputs": lambda micro_batch: x[micro_batch.index],
        "loss": lambda y, _: y.square().sum() / 7,
    }
    model.step(**step)
    gradients = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    assert model.verify(**step, rtol=1e-4).ok
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    model.close()


@world(2, pp=2, dp=1, by="process")
def test_dropout_and_data_are_those_of_the_step(mesh: Mesh) -> None:
    rows = torch.arange(32 * 9).view(32, 9) * 7 % 32
    data = instep.Loader(rows, 12, 2)
    model = instep.Pipeline(gpt(dropout=0.2), mesh, "zb-h1")
    report = model.verify(
        lambda logits, micro_batch: F.cross_entropy(logits.flatten(0, 1), micro_batch.data[:, 1:].flatten()),
        lambda micro_batch: micro_batch.data[:, :-1],
        data,
    )
    assert report.ok and data.position == 0
    data.close()
    model.close()
