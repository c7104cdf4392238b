"""After a trial step everything is bit for bit as before, and training goes on as if it had not happened."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import bits, filled
from tests.replicate.nets import WIDTH, Dense
from tests.replicate.trials import assert_untouched, failing, rows_of, square, state
from tests.world import world


@world(2, by="process")
def test_everything_is_as_before_and_training_goes_on_the_same(mesh: Mesh) -> None:
    def train(verify: bool) -> list[tuple[str, Tensor | None]]:
        torch.manual_seed(5)
        layers = (nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 2))
        module = filled(nn.Sequential(*layers))
        model = DataParallel(module, process_group=mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def trial() -> None:
            if verify:
                batch = rows_of(mesh.rank + 7)
                assert_untouched(model, lambda: model.verify(batch, square).raise_for_error())

        trial()
        for _ in range(3):
            with model.no_sync():
                square(model, rows_of(mesh.rank)).backward()
            trial()
            square(model, rows_of(mesh.rank + 2)).backward()
            trial()
            optimizer.step()
            optimizer.zero_grad()
            trial()
        model.close()
        return state(model)

    for (name, x), (_, y) in zip(train(verify=True), train(verify=False), strict=True):
        assert x is y is None or torch.equal(bits(x), bits(y)), name  # type: ignore[arg-type]


@world(2)
def test_a_gradient_that_was_never_exchanged_is_still_refused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        square(model, rows_of(mesh.rank)).backward()
    assert model.verify(rows_of(mesh.rank), square).ok
    with pytest.raises(RuntimeError, match="never exchanged"):
        optimizer.step()
    model.zero_grad()
    model.module.layers[0].bias.grad = torch.full((9,), mesh.rank + 1.0)
    assert model.verify(rows_of(mesh.rank), square).ok
    with pytest.raises(RuntimeError, match=r"never exchanged|nothing was exchanged"):
        optimizer.step()
    model.close()


@world(2)
def test_a_graph_from_before_can_still_be_walked_backwards(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    loss = square(model, rows_of(mesh.rank))
    assert model.verify(rows_of(mesh.rank), square).ok
    with pytest.raises(ValueError, match="planted in backward"):
        model.verify(rows_of(mesh.rank), failing(mesh.rank, "backward"))
    loss.backward()
    mean = DataParallel(copy.deepcopy(model.module), process_group=mesh)
    square(mean, rows_of(mesh.rank)).backward()
    for p, q in zip(model.module.parameters(), mean.module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    mean.close()
    model.close()


@world(2)
def test_who_observes_leaves_does_not_see_those_of_a_trial(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    seen: list[int] = []
    model._reducer.observer = lambda micro_batch, bucket, values: seen.append(micro_batch)
    assert model.verify(rows_of(mesh.rank), square).ok
    assert seen == []
    square(model, rows_of(mesh.rank)).backward()
    assert seen == [mesh.rank]
    model.close()


@world(2)
def test_inside_a_declared_step_it_is_refused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    leaves = model.micro_batches(2)
    next(leaves)
    with pytest.raises(ValueError, match="between two steps"):
        model.verify(rows_of(mesh.rank), square)
    leaves.close()
    model.close()
