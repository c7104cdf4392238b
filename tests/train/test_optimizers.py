"""The optimizer's implementation is ours to name, and the learning rate has the shape that is drawn here."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.train.optimizers import learning_rate, make_optimizer, set_learning_rate
from instep.train.run_config import OptimConfig
from tests.parity import bits, numbers

HEIGHT = 5


def drawn(optim: OptimConfig, num_steps: int) -> str:
    """Columns are steps, rows are fifths of the full rate."""
    rates = [learning_rate(optim, step, num_steps) / optim.lr for step in range(num_steps)]
    rows = range(HEIGHT, 0, -1)
    return "\n".join("".join(".#"[round(rate * HEIGHT) >= row] for rate in rates) for row in rows)


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_warm_up_is_a_ramp_and_then_comes_half_a_cosine():
    assert drawn(OptimConfig(lr=3e-4, warmup_steps=5, min_lr_ratio=0.2), num_steps=15) == picture(
        """
        ....####.......
        ...######......
        ..#########....
        .###########...
        ###############
        """
    )


def test_a_constant_rate_stays_where_warm_up_has_left_it():
    assert drawn(OptimConfig(lr=2.0, warmup_steps=5, schedule="constant"), num_steps=9) == picture(
        """
        ....#####
        ...######
        ..#######
        .########
        #########
        """
    )


def test_the_rate_is_exact_where_the_shape_has_its_corners():
    optim = OptimConfig(lr=0.5, warmup_steps=4, min_lr_ratio=0.25)
    rates = [learning_rate(optim, step, 11) for step in range(11)]
    assert rates[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert rates[7] == pytest.approx(0.5 * (1 + 0.25) / 2)  # half-way down
    assert rates[10] == 0.125


@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (1, 1), (1, 2), (5, 5), (9, 5)])
def test_a_run_too_short_for_the_shape_still_has_rates(warmup, num_steps):
    optim = OptimConfig(lr=1.0, warmup_steps=warmup, min_lr_ratio=0.0)
    assert all(0 <= learning_rate(optim, step, num_steps) <= 1 for step in range(num_steps))


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(*shape, key=f"{shape}")) for shape in shapes]


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("sgd", False)])
def test_torch_is_not_left_the_choice_of_an_implementation(name, fused):
    optimizer = make_optimizer(parameters((2, 3), (3,)), OptimConfig(name=name, lr=1.0))
    for group in optimizer.param_groups:
        assert group["fused"] is fused
        assert group["foreach"] is False


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_vectors_are_not_decayed(name):
    matrix, vector = parameters((2, 3), (3,))
    before = [p.detach().clone() for p in (matrix, vector)]
    optimizer = make_optimizer([matrix, vector], OptimConfig(name=name, lr=0.5, weight_decay=0.1))
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(matrix, before[0] * (1 - 0.5 * 0.1))
    assert torch.equal(vector, before[1])


def test_adamw_is_the_published_one():
    """Decoupled weight decay, two bias-corrected moments (Loshchilov and Hutter, 2019, algorithm 2)."""
    optim = OptimConfig(lr=0.02, betas=(0.8, 0.9), weight_decay=0.3)
    (p,) = parameters((4, 5))
    x = p.detach().double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    optimizer = make_optimizer([p], optim)
    for step in range(1, 4):
        g = numbers(4, 5, key=f"gradient {step}")
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        x = x - 0.02 * (0.3 * x + m / (1 - 0.8**step) / ((v / (1 - 0.9**step)).sqrt() + 1e-8))
    assert torch.allclose(p.double(), x, atol=1e-6)


def stepped(whole: Tensor, sizes: list[int], optim: OptimConfig) -> Tensor:
    """``whole`` after three steps in which its slices of ``sizes`` are parameters of their own."""
    slices = [nn.Parameter(part) for part in whole.clone().split(sizes)]
    optimizer: Optimizer = make_optimizer(slices, optim)
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


def test_the_rate_is_set_in_all_groups():
    optimizer = make_optimizer(parameters((2, 2), (2,)), OptimConfig(lr=1.0))
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
