"""The text recipe: losses are means over bytes on any number of ranks, and its optimizers keep their bits."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh
from instep.recipes import text_config
from instep.recipes.corpus import ByteText
from instep.recipes.text import held_out_loss, losses_of, optimizer_class, parameter_groups
from instep.recipes.text_config import OptimConfig
from tests.parity import bits, numbers, world_of_one
from tests.world import world

CPU = torch.device("cpu")
CONTEXT = 7
CORPUS = bytes(i * i % 251 for i in range(1 + 30 * CONTEXT))


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


def held_out(mesh: Mesh, num_windows: int, micro_size: int = 4, model: nn.Module | None = None) -> float:
    config = text_config.tiny()
    config = replace(
        config,
        eval=replace(config.eval, windows=num_windows),
        batch=replace(config.batch, micro_size=micro_size),
    )
    return held_out_loss(model or Bigram(), ByteText(CORPUS, CONTEXT), config, mesh)


def test_the_loss_of_text_is_the_mean_surprise_of_a_byte():
    model = Bigram().eval()
    windows = ByteText(CORPUS, CONTEXT).windows([3, 4])
    loss = losses_of(model, windows, text_config.tiny(), CPU).mean()
    assert loss.item() == pytest.approx(by_hand(model, CORPUS[3 * CONTEXT : 5 * CONTEXT + 1]), rel=1e-6)


@pytest.mark.parametrize("num_windows", [30, 1000])
def test_the_held_out_loss_of_all_windows_is_that_of_the_text(num_windows):
    assert held_out(world_of_one(), num_windows) == pytest.approx(by_hand(Bigram(), CORPUS), rel=1e-6)


@pytest.mark.parametrize("micro_size", [1, 3, 4, 64])
def test_a_last_batch_that_is_smaller_has_a_smaller_weight(micro_size):
    chosen = [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]  # ten of thirty
    windows = [CORPUS[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in chosen]
    expected = math.fsum(by_hand(Bigram(), window) for window in windows) / len(windows)
    assert held_out(world_of_one(), 10, micro_size) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_windows", [1, 10, 30])
@world(3)
def test_three_ranks_find_the_held_out_loss_of_one(mesh: Mesh, num_windows: int) -> None:
    assert held_out(mesh, num_windows) == held_out(world_of_one(), num_windows)


def test_an_evaluation_leaves_the_model_in_training_as_it_was():
    model = Bigram().train()
    held_out(world_of_one(), 2, 2, model)
    assert model.training
    assert model.table.grad is None


def made(weights: list[nn.Parameter], config: OptimConfig) -> Optimizer:
    kind, options = optimizer_class(config)
    return kind(parameter_groups(nn.ParameterList(weights), config.weight_decay), **options)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(*shape, key=f"{shape}")) for shape in shapes]


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("sgd", False)])
def test_torch_is_not_left_the_choice_of_an_implementation(name, fused):
    optimizer = made(parameters((2, 3), (3,)), OptimConfig(name=name, lr=1.0))
    for group in optimizer.param_groups:
        assert group["fused"] is fused
        assert group["foreach"] is False


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_vectors_are_not_decayed(name):
    matrix, vector = parameters((2, 3), (3,))
    before = [p.detach().clone() for p in (matrix, vector)]
    optimizer = made([matrix, vector], OptimConfig(name=name, lr=0.5, weight_decay=0.1))
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(matrix, before[0] * (1 - 0.5 * 0.1))
    assert torch.equal(vector, before[1])


def stepped(whole: Tensor, sizes: list[int], optim: OptimConfig) -> Tensor:
    """``whole`` after three steps in which its slices of ``sizes`` are parameters of their own."""
    slices = [nn.Parameter(part) for part in whole.clone().split(sizes)]
    optimizer: Optimizer = made(slices, optim)
    for step in range(3):
        gradients = numbers(len(whole), key=f"gradient {step}").split(sizes)
        for p, gradient in zip(slices, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    return torch.cat([p.detach() for p in slices])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_parameter_has_the_same_bits_however_it_is_sliced(name):
    optim = OptimConfig(name=name, lr=0.02, weight_decay=0.0)
    whole = numbers(16 * 20, key="whole")
    expected = stepped(whole, [16 * 20], optim)
    for sizes in ([160, 160], [16, 288, 16], [16] * 20, [112, 96, 112]):
        assert torch.equal(bits(stepped(whole, sizes, optim)), bits(expected)), sizes
