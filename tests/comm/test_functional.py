"""Gradients through collectives are those that one process computes from everybody's inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from instep.comm import functional
from instep.net.messages import Messages
from tests.comm.inputs import drawn
from tests.world import world

SIZES = range(1, 5)
ROWS, COLUMNS = 2, 3

Forward = Callable[[Tensor, Messages], Tensor]
Alone = Callable[[list[Tensor], int], Tensor]  # what rank r gets, of all inputs


def to_rows(size: int) -> list[list[int]]:
    """How many rows rank r sends to rank s: uneven, some none."""
    return [[(r + 2 * s) % 3 for s in range(size)] for r in range(size)]


def exchanged(xs: list[Tensor], rank: int) -> Tensor:
    plan = to_rows(len(xs))
    return torch.cat([x.split(plan[r])[rank] for r, x in enumerate(xs)])


def exchange(x: Tensor, messages: Messages) -> Tensor:
    plan = to_rows(messages.size)
    return functional.all_to_all(x, messages, plan[messages.rank], [row[messages.rank] for row in plan])


FUNCTIONS: dict[str, tuple[Forward, Alone]] = {
    "all_reduce_sum": (functional.all_reduce_sum, lambda xs, _: sum(xs[1:], xs[0])),
    "all_gather": (functional.all_gather, lambda xs, _: torch.cat(xs)),
    "reduce_scatter": (
        functional.reduce_scatter,
        lambda xs, rank: sum(xs[1:], xs[0]).tensor_split(len(xs))[rank],
    ),
    "broadcast": (lambda x, m: functional.broadcast(x, m, m.size - 1), lambda xs, _: xs[-1]),
    "all_to_all": (exchange, exchanged),
}


def num_rows(name: str, size: int, rank: int) -> int:
    return sum(to_rows(size)[rank]) if name == "all_to_all" else ROWS * size


def losses(ys: list[Tensor]) -> list[Tensor]:
    """A loss for each rank, no two of them alike, curved so that second derivatives are not zero."""
    return [((1 + r + torch.arange(y.numel()).view_as(y)) * y**3).sum() for r, y in enumerate(ys)]


@pytest.mark.parametrize("size", SIZES)
def test_first_and_second_derivatives_are_those_of_the_sum_of_all_losses(size):
    world(size)(derivatives)()


def derivatives(mesh):
    messages = Messages(mesh.world.pg)
    size, rank = messages.size, messages.rank
    for name, (forward, alone) in FUNCTIONS.items():
        rows = [num_rows(name, size, r) for r in range(size)]
        xs = [
            drawn(r, n * COLUMNS, torch.float64).view(n, COLUMNS).requires_grad_() for r, n in enumerate(rows)
        ]
        ys = [alone(xs, r) for r in range(size)]
        firsts = torch.autograd.grad(sum(losses(ys)), xs, create_graph=True, materialize_grads=True)
        seconds = torch.autograd.grad(sum(losses(list(firsts))), xs, materialize_grads=True)

        x = xs[rank].detach().clone().requires_grad_()
        y = forward(x, messages)
        (first,) = torch.autograd.grad(losses([y.new_zeros(0)] * rank + [y])[rank], x, create_graph=True)
        (second,) = torch.autograd.grad(losses([y.new_zeros(0)] * rank + [first])[rank], x)
        torch.testing.assert_close(y, ys[rank], msg=name)
        torch.testing.assert_close(first, firsts[rank], msg=name)
        torch.testing.assert_close(second, seconds[rank], msg=name)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cross_entropy_split_over_the_vocabulary_has_the_gradient_of_one_process(size):
    world(size)(split_vocabulary)()


def split_vocabulary(mesh):
    messages = Messages(mesh.world.pg)
    vocabulary, width = 8, 5
    hidden = drawn(3, 4 * width, torch.float64).view(4, width).requires_grad_()
    weight = drawn(4, vocabulary * width, torch.float64).view(vocabulary, width).requires_grad_()
    targets = torch.tensor([0, 7, 3, 5])
    expected = F.cross_entropy(hidden @ weight.t(), targets)
    expected.backward()

    own_words = torch.arange(vocabulary).tensor_split(messages.size)[messages.rank]
    h = hidden.detach().clone().requires_grad_()
    w = weight.detach()[own_words].requires_grad_()
    logits = functional.copy_to_all(h, messages) @ w.t()  # (rows, own words)
    highest = functional.all_gather(logits.detach().amax(dim=1)[None], messages).amax(dim=0)
    logits = logits - highest[:, None]
    is_target = targets[:, None] == own_words
    normaliser = functional.reduce_from_all(logits.exp().sum(dim=1), messages).log()
    at_target = functional.reduce_from_all((logits * is_target).sum(dim=1), messages)
    loss = (normaliser - at_target).mean()
    loss.backward()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(h.grad, hidden.grad)
    assert weight.grad is not None
    torch.testing.assert_close(w.grad, weight.grad[own_words])


@world(3)
def test_one_loss_that_all_ranks_share_would_count_three_times_with_all_reduce_sum(mesh):
    messages = Messages(mesh.world.pg)
    found = {}
    for name in ("reduce_from_all", "all_reduce_sum"):
        x = torch.ones(2, requires_grad=True)
        getattr(functional, name)(x, messages).sum().backward()
        assert x.grad is not None
        found[name] = x.grad.tolist()
    assert found == {"reduce_from_all": [1.0, 1.0], "all_reduce_sum": [3.0, 3.0]}


def test_a_world_of_one_needs_no_group_and_rows_that_do_not_fit_are_refused():
    messages = Messages(None)
    x = torch.ones(2, 3, requires_grad=True)
    for forward in (functional.copy_to_all, functional.reduce_from_all, FUNCTIONS["all_gather"][0]):
        (gradient,) = torch.autograd.grad(forward(x, messages).sum(), x)
        assert gradient.tolist() == [[1.0] * 3] * 2
    messages.size = 2
    with pytest.raises(ValueError, match=r"as many rows for each of 2 ranks, got shape \(3,\)"):
        functional.reduce_scatter(torch.ones(3), messages)
    with pytest.raises(ValueError, match=r"expected 2 numbers of rows that sum to 3, got to=\[1, 1\]"):
        functional.all_to_all(torch.ones(3), messages, [1, 1], [2, 1])
    with pytest.raises(ValueError, match=r"pass x.view\(1\)"):
        functional.all_gather(torch.tensor(1.0), messages)
