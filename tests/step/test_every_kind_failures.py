"""What a step that failed, a rank that froze a weight or a load in between leave behind, for every kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from tests.kinds import KINDS, STAGES, WIDTH, WRAPPERS, Program, close, net, on_every_kind, rows, square
from tests.parity import filled
from tests.replicate.nets import Twice
from tests.shard.trained import assert_same
from tests.step.test_every_kind_loop import made

DECLARED = pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])


class Breaks(nn.Module):
    """Its backward raises between two layers while ``broken``."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = net(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        if self.broken and x.requires_grad:
            x.register_hook(self.fail)
        return self.above(x)

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("planted")


@contextmanager
def broken(model: nn.Module) -> Iterator[None]:
    part: Any = next(x for x in model.modules() if isinstance(x, Breaks))
    part.broken = True
    yield
    part.broken = False


def backward(model: Any, rank: int, declared: bool) -> None:
    if declared:
        Program("", num_leaves=4).backward(model, 0)
    else:
        square(model, rows(f"on rank {rank}")).backward()


def norm_of(model: Any, rank: int, declared: bool) -> Tensor:
    model.zero_grad()
    backward(model, rank, declared)
    return instep.clip_grad_norm_(model.parameters(), 1e9)


def norms(mesh: Mesh, kind: str) -> list[Tensor]:
    """Of a plain and a declared step of a model that nothing disturbs."""
    model, _ = made(kind, mesh, Breaks)
    found = [norm_of(model, mesh.rank, declared) for declared in (False, True)]
    close(model)
    return found


def assert_steps_work(model: Any, rank: int, expected: list[Tensor]) -> None:
    """The next forward gives up a backward that raised, so none comes in between."""
    for declared in (False, True):
        assert torch.equal(norm_of(model, rank, declared), expected[declared])


@on_every_kind(2, WRAPPERS)
@DECLARED
def test_backwards_that_raise_on_one_rank_are_given_up_once(mesh: Mesh, kind: str, declared: bool) -> None:
    """A step given up twice was counted twice, and the old error was raised again by every later backward."""
    expected = norms(mesh, kind)
    model, optimizer = made(kind, mesh, Breaks)
    for _ in range(3):
        if mesh.rank == 1:
            with broken(model), pytest.raises(ArithmeticError):
                backward(model, 1, declared)
        else:
            with pytest.raises(Desync, match=r"rank 1 left (the )?step"):
                backward(model, 0, declared)
        assert_steps_work(model, mesh.rank, expected)
        model.zero_grad()
    close(optimizer, model)


@on_every_kind(2, WRAPPERS)
def test_a_backward_without_synchronisation_that_raised_is_no_part_of_the_next_step(
    mesh: Mesh, kind: str
) -> None:
    expected = norms(mesh, kind)
    model, _ = made(kind, mesh, Breaks)
    with model.no_sync(), broken(model), pytest.raises(ArithmeticError):
        backward(model, mesh.rank, False)
    assert_steps_work(model, mesh.rank, expected)
    close(model)


@on_every_kind(2, WRAPPERS)
def test_an_exception_after_the_last_backward_of_the_very_first_step(mesh: Mesh, kind: str) -> None:
    """The others updated their weights with a gradient that this rank had dropped."""
    expected = norms(mesh, kind)
    model, _ = made(kind, mesh, Breaks)

    def leave() -> None:
        for count, micro_batch in enumerate(model.micro_batches(4)):
            Program("").leaf(model, micro_batch, 0)
            if count == 1:
                raise ArithmeticError("the loss is not a number")

    if mesh.rank == 0:
        with pytest.raises(ArithmeticError):
            leave()
    else:
        with pytest.raises(Desync, match=r"rank 0 left (the )?step"):
            backward(model, 1, declared=True)
    assert_steps_work(model, mesh.rank, expected)
    close(model)


@on_every_kind(2, ("replicated", "stage 2"))
def test_an_evaluation_that_raised_on_one_rank_is_its_own_affair(mesh: Mesh, kind: str) -> None:
    """Where all ranks have all weights. It waited for the others, and they for it in the next exchange."""
    expected = norms(mesh, kind)
    model, _ = made(kind, mesh, Breaks)
    backward(model, mesh.rank, False)
    if mesh.rank == 1:
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, WIDTH + 1))
    assert_steps_work(model, mesh.rank, expected)
    close(model)


# A layer frozen on one rank only: the mean lacked that rank's share, and all ranks agreed.


@pytest.mark.filterwarnings("ignore:no gradient came")
@on_every_kind(2, WRAPPERS)
@DECLARED
def test_a_weight_that_one_rank_has_frozen_is_an_error_on_all(mesh: Mesh, kind: str, declared: bool) -> None:
    model, _ = made(kind, mesh)
    norm_of(model, mesh.rank, declared)
    first = next(model.parameters())
    first.requires_grad_(mesh.rank == 0)
    with pytest.raises(Desync, match=r"frozen on some ranks alone .*: '0\.weight' on rank 1; in step 0 "):
        norm_of(model, mesh.rank, declared)
    for trained in (False, True):  # on all ranks
        first.requires_grad_(trained)
        norm_of(model, mesh.rank, declared)
        assert (first.grad is not None) == trained
    close(model)


# A gradient that ``zero_grad`` had discarded came back for a parameter that the next step did not use.


def weights_after(kind: str, mesh: Mesh, declared: bool) -> dict[str, Tensor]:
    model, optimizer = made(kind, mesh, Twice, find_unused_parameters=True)

    def once(key: str, sometimes: bool) -> None:
        x = rows(f"{key} on rank {mesh.rank}")[:, :6]
        model(x, sometimes).square().mean().backward()

    once("first", True)
    with model.no_sync():
        once("kept", True)
    optimizer.zero_grad()
    for _ in model.micro_batches(2) if declared else (None,):
        once("last", False)
    optimizer.step()
    found = {name: x.clone() for name, x in instep.full_state_dict(model).items()}
    close(optimizer, model)
    return found


@on_every_kind(2, STAGES)
@DECLARED
def test_a_discarded_gradient_does_not_come_back(mesh: Mesh, kind: str, declared: bool) -> None:
    assert_same(weights_after(kind, mesh, declared), weights_after("replicated", mesh, declared), "weights")


@on_every_kind(2, STAGES)
@pytest.mark.parametrize("discards", [True, False])
def test_after_a_backward_that_raised_the_sum_is_what_was_not_discarded(
    mesh: Mesh, kind: str, discards: bool
) -> None:
    sums = []
    for each in ("replicated", kind):
        model, _ = made(each, mesh, Breaks)
        square(model, rows(f"first {mesh.rank}")).backward()
        with model.no_sync(), broken(model), pytest.raises(ArithmeticError):
            square(model, rows(f"kept {mesh.rank}")).backward()
        if discards:
            model.zero_grad()
        last = square(model, rows(f"last {mesh.rank}"))
        assert all((p.grad is None) == discards for p in model.parameters())
        last.backward()
        sums.append(instep.clip_grad_norm_(model.parameters(), 1e9))
        close(model)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)  # a sum over steps has no one order


# A load between forward and backward: gradients of old activations through new weights, without an error.


@on_every_kind(2, STAGES)
def test_a_graph_from_before_a_load_is_refused(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    both: tuple[dict[str, Any], ...] = {}, {"compute_dtype": torch.bfloat16}
    for number, options in enumerate(both):
        model = KINDS[kind].wrap(filled(net()), mesh, **KINDS[kind].options, **options)
        x = rows(f"on rank {mesh.rank}").to(options.get("compute_dtype"))
        loss = model(x).square().mean()
        instep.save(tmp_path / str(number), step=0, model=model)
        instep.load(tmp_path / str(number), model=model)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*is at version"):
            loss.backward()
        model(x).square().mean().backward()
        close(model)
