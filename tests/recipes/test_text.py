"""The losses of text are means over bytes, and no number of ranks moves a bit of them."""

import math

import pytest
import torch
from torch import Tensor, nn

from instep.data.text import ByteText
from instep.mesh.mesh import Mesh
from instep.mesh.process_group import Group
from instep.recipes.text import held_out_loss, text_loss
from tests.parity import numbers
from tests.world import world

CPU = torch.device("cpu")
CONTEXT = 7
CORPUS = bytes(i * i % 251 for i in range(1 + 30 * CONTEXT))


def alone() -> Group:
    """A world of one."""
    return Group(None, [0], 0, 5.0)


class Bigram(nn.Module):
    """The logits of the next byte are a row of a table; in training they would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(numbers(256, 256, key="bigram"))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x] * (2.0 if self.training else 1.0)


def by_hand(model: Bigram, text: bytes) -> float:
    """Mean surprise of each byte after the one before it."""
    table = model.table.detach().double().log_softmax(1)
    pairs = [(text[i], text[i + 1]) for i in range(len(text) - 1)]
    return -sum(table[a, b].item() for a, b in pairs) / len(pairs)


def held_out(group: Group, num_windows: int, micro_size: int = 4) -> float:
    text = ByteText(CORPUS, CONTEXT)
    sizes = {"num_windows": num_windows, "micro_size": micro_size}
    return held_out_loss(Bigram(), text, group, **sizes, device=CPU, autocast="off")


def test_the_loss_of_text_is_the_mean_surprise_of_a_byte():
    model = Bigram().eval()
    windows = ByteText(CORPUS, CONTEXT).windows([3, 4])
    loss = text_loss(model, windows, device=CPU, autocast="off")
    assert loss.item() == pytest.approx(by_hand(model, CORPUS[3 * CONTEXT : 5 * CONTEXT + 1]), rel=1e-6)


@pytest.mark.parametrize("num_windows", [30, 1000])
def test_the_held_out_loss_of_all_windows_is_that_of_the_text(num_windows):
    assert held_out(alone(), num_windows) == pytest.approx(by_hand(Bigram(), CORPUS), rel=1e-6)


@pytest.mark.parametrize("micro_size", [1, 3, 4, 64])
def test_a_last_batch_that_is_smaller_has_a_smaller_weight(micro_size):
    chosen = [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]  # ten of thirty
    windows = [CORPUS[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in chosen]
    expected = math.fsum(by_hand(Bigram(), window) for window in windows) / len(windows)
    assert held_out(alone(), 10, micro_size) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_windows", [1, 10, 30])
@world(3)
def test_three_ranks_find_the_held_out_loss_of_one(mesh: Mesh, num_windows: int) -> None:
    assert held_out(mesh.world.group, num_windows) == held_out(alone(), num_windows)


def test_an_evaluation_leaves_the_model_in_training_as_it_was():
    model = Bigram().train()
    text = ByteText(CORPUS, CONTEXT)
    held_out_loss(model, text, alone(), num_windows=2, micro_size=2, device=CPU, autocast="off")
    assert model.training
    assert model.table.grad is None
