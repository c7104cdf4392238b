"""Parameters whose memory is odd: off its alignment, with gaps or strides, turned, channels-last, lazy views.

``load_state_dict(assign=True)`` makes tensors of a mapped file the weights, and kernels look at addresses and
strides: other bits, or a fused optimizer that updates every weight with the gradient of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.memory import as_bytes
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.state.hash import tensor_digest
from instep.step.micro_batches import MicroBatch
from tests.parity import Training, assert_bits_of_one, filled, numbers, world_of_one
from tests.reduce.mapped import off_by
from tests.replicate.replicas import assert_backwards, equal_everywhere
from tests.world import world

WIDTH = 64  # one row times such a matrix has other bits where the matrix is not aligned


class Net(nn.Module):
    """Every weight is a matrix of its own kind: trained, frozen, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mixing", numbers(WIDTH, WIDTH, key="mixing"))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.frozen(self.trained(x)), self.mixing)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as made": lambda x: x.clone(),
    "4 bytes off": lambda x: off_by(4, x),
    "44 bytes off": lambda x: off_by(44, x),
    "with gaps": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
}


def net(layout: str) -> Net:
    module = filled(Net())
    values = {name: LAYOUTS[layout](x) for name, x in module.state_dict().items()}
    module.load_state_dict(values, assign=True)
    return module


def by_hand(module: Net, optimizer: torch.optim.Optimizer) -> None:
    """The sum in the order of the tree, in memory that torch has aligned."""
    parts = []
    for i in range(4):
        loss = module(numbers(1, WIDTH, key=str(i))).square().mean()
        parts.append(torch.autograd.grad(loss, list(module.trained.parameters())))
    for p, a, b, c, d in zip(module.trained.parameters(), *parts, strict=True):
        p.grad = ((a + b) + (c + d)) * 0.25
    optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_weights_that_torch_has_made(layout: str) -> None:
    """In the other forms of training: tests/test_placements.py."""
    plain, module = net("as made"), net(layout)
    steps, optimizer = (torch.optim.AdamW(x.parameters(), lr=0.02, fused=True) for x in (plain, module))
    model = DataParallel(module, process_group=world_of_one())
    for _ in range(2):
        by_hand(plain, steps)
        for micro_batch in model.micro_batches(4):
            model(numbers(1, WIDTH, key=str(micro_batch.index))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = plain.state_dict()
    assert all(tensor_digest(x) == tensor_digest(expected[name]) for name, x in module.state_dict().items())
    model.close()


def test_layers_of_a_pipeline_are_aligned() -> None:
    """Its weights had a home when they were to be aligned, and what has a home stays where it is."""
    layer = net("4 bytes off").trained
    model = instep.Pipeline(nn.Sequential(layer), world_of_one())
    assert layer.weight.data_ptr() % 64 == 0
    model.close()


@pytest.mark.parametrize("layout", ["4 bytes off", "with gaps"])
def test_weights_that_are_assigned_after_wrapping_are_aligned_or_refused(layout: str) -> None:
    module = net("as made")
    model = DataParallel(module, process_group=world_of_one())
    loaded = {name: LAYOUTS[layout](x) for name, x in module.frozen.state_dict().items()}
    module.frozen.load_state_dict(loaded, assign=True)
    for _ in model.micro_batches(1):
        model(numbers(1, WIDTH, key="x")).sum().backward()
    weight = module.frozen.weight
    assert weight.data_ptr() % 64 == 0 and weight.is_contiguous()
    module.trained.load_state_dict(loaded, assign=True)
    loss = model(numbers(1, WIDTH, key="x")).sum()
    with pytest.raises(ValueError, match=r"'trained.weight' was not there .*assign=True"):
        loss.backward()
    model.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer"])
def test_stages_refuse_by_name_what_they_would_separate(stage: int, kind: str) -> None:
    module = nn.Module()
    module.layer = nn.Linear(4, 4)
    if kind == "buffer":
        module.register_buffer("tied", module.layer.weight.detach()[:2])
    else:
        module.tied = nn.Parameter(module.layer.weight.detach(), requires_grad=kind == "parameter")
    with pytest.raises(ValueError, match=r"'(layer.weight|tied)' and '(layer.weight|tied)' share memory"):
        instep.fully_shard(module, world_of_one(), stage=stage)


def conv() -> nn.Module:
    return filled(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)


def images(model: nn.Module, turn: int, rank: int = 0) -> Tensor:
    return model(numbers(2, 3, 5, 5, key=f"images {turn} {rank}")).square().mean()


@pytest.mark.parametrize("fused", [True, False])
def test_a_channels_last_parameter_is_updated_with_its_own_gradient(fused: bool) -> None:
    plain, module = conv(), conv()
    for model in (plain, DataParallel(module, process_group=world_of_one())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        for turn in range(2):
            optimizer.zero_grad()
            images(model, turn).backward()
            optimizer.step()
    assert torch.equal(module.weight, plain.weight)


# Views that torch does not see as bytes: as a parameter they raised its own words.

NUMBERS = torch.arange(8.0)
VIEWS = {
    "one of a row": NUMBERS[:2].as_strided((1,), (2,)),
    "a column of one row": NUMBERS.view(2, 4)[1:, 3:],
    "none": NUMBERS.as_strided((0, 3), (5, 2)),
    "a conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "the imaginary part of one": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
def test_bytes_and_hash_of_a_view_are_those_of_a_copy(name: str) -> None:
    plain = torch.tensor(VIEWS[name].tolist()).view(VIEWS[name].shape)
    assert as_bytes(VIEWS[name]).numpy().tobytes() == plain.numpy().tobytes()
    assert tensor_digest(VIEWS[name]) == tensor_digest(plain)


def test_bytes_of_what_is_contiguous_are_its_memory() -> None:
    x = torch.zeros(3)
    as_bytes(x)[3] = 63  # the highest byte of the first float
    assert x[0] == 0.5


class Gain(nn.Module):
    """Parameters of one element with a stride, and rows so long that a sample is a part of a column."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(216, 72)
        self.layer.weight = nn.Parameter(torch.zeros(216, 72).t())
        self.gain = nn.Parameter(torch.ones(4).as_strided((1,), (2,)))
        self.register_buffer("shift", torch.ones(4).as_strided((1,), (2,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain + self.shift


def square(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(numbers(2, 216, key=f"{step} {micro_batch.index}")).square().mean().backward()


STRIDED = Training(Gain, square, num_leaves=2, num_steps=8)


@world(2)
@pytest.mark.parametrize("init_sync", [True, "verify"])
def test_a_model_with_strides_trains(mesh: Mesh, init_sync: Any) -> None:
    assert_bits_of_one(mesh, STRIDED, init_sync=init_sync)


def test_a_model_with_strides_is_saved_and_loaded(tmp_path: Path) -> None:
    model, other = Gain(), Gain()
    instep.save(tmp_path, step=1, model=model)
    assert instep.load(tmp_path, model=other).step == 1
    assert torch.equal(model.layer.weight, other.layer.weight)


class Lazy(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        values = numbers(6, key=key, dtype=torch.complex64)
        self.conjugate = nn.Parameter(values.conj())
        self.negative = nn.Parameter(values.clone().conj().imag)
        self.tied = nn.Parameter(numbers(6, key=key, dtype=torch.complex64))
        self.register_buffer("its_conjugate", self.tied.detach().conj())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conjugate.imag + self.negative * self.tied.imag + self.its_conjugate.imag


@world(2)
def test_parameters_that_are_lazy_are_trained_and_tied_ones_stay_tied(mesh: Mesh) -> None:
    expected = [x.resolve_conj().resolve_neg() for x in Lazy("0").state_dict().values()]
    model = DataParallel(Lazy(str(mesh.rank)), process_group=mesh)
    module = model.module
    assert all(map(torch.equal, module.state_dict().values(), expected))
    assert_backwards(mesh, model, times=2)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert equal_everywhere(mesh, module.state_dict().values())
    assert torch.equal(module.its_conjugate, module.tied.detach().conj())
    model.close()
