"""Batch norm over the ranks of a plain loop: the numbers of torch's batch norm on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import Desync
from instep.nn import BatchNorm, convert_batchnorm
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers, world_of_one
from tests.replicate.replicas import equal_everywhere
from tests.world import world

C = 3
SHAPES = [(C,), (C, 5), (C, 4, 3), (C, 2, 3, 2)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "cumulative": {"momentum": None},
    "no affine": {"affine": False},
    "no tracking": {"track_running_stats": False},
}


def rows_of(rank: int) -> int:
    """Of each rank; one has none."""
    return (4, 0, 2, 3)[rank]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return (numbers(rows_of(rank), *shape, key=f"part {rank}", dtype=dtype) * 2 + 7).requires_grad_()


def outputs_and_gradients(norm: nn.Module, x: Tensor, times: int = 2) -> tuple[Tensor, ...]:
    """Of the last of several forwards and backwards."""
    for _ in range(times):
        norm.zero_grad()
        y = norm(x)
        weights = torch.linspace(-1, 1, y[0].numel(), dtype=x.dtype).view_as(y[0]) if len(y) else 1.0
        (gradient,) = torch.autograd.grad((y.sin() * weights).sum(), x, retain_graph=True)
        (y.sin() * weights).sum().backward()
    return y, gradient


@world(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_torchs_batch_norm_of_the_batch_of_all_ranks(mesh, shape, kind):
    ours = filled(BatchNorm(C, process_group=mesh, dtype=torch.float64, **KINDS[kind]))
    plain = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1]
    theirs = filled(plain(C, dtype=torch.float64, **KINDS[kind]))
    x = torch.cat([part(rank, shape) for rank in range(3)]).detach().requires_grad_()
    expected, expected_dx = outputs_and_gradients(theirs, x)
    y, dx = outputs_and_gradients(ours, part(mesh.rank, shape))
    start = sum(map(rows_of, range(mesh.rank)))
    own = slice(start, start + rows_of(mesh.rank))
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(y, expected[own], **close)
    torch.testing.assert_close(dx, expected_dx[own], **close)
    for buffer, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, **close)
    assert equal_everywhere(mesh, ours.buffers())
    x = part(0, shape)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **close)


@world(2)
def test_gradients_of_weight_and_bias_add_up_to_those_of_the_whole_batch(mesh):
    norm = filled(BatchNorm(C, process_group=mesh, dtype=torch.float64))
    model = DataParallel(norm, mesh)
    model(part(2 * mesh.rank, (C, 5))).sin().sum().backward()
    plain = filled(nn.BatchNorm1d(C, dtype=torch.float64))
    plain(torch.cat([part(0, (C, 5)), part(2, (C, 5))])).sin().sum().backward()
    for p, other in zip(norm.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(2 * p.grad, other.grad, rtol=1e-9, atol=1e-12)
    model.close()


@world(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_formats_have_statistics_in_float32(mesh, dtype):
    """The mean of 4096 values around 300 is beyond what either format can add."""
    x = (numbers(64, C, 64, key="large") + 300).to(dtype)
    norm = BatchNorm(C, momentum=1.0, process_group=mesh)
    y = norm(x[32 * mesh.rank : 32 * mesh.rank + 32].requires_grad_())
    assert y.dtype == dtype
    torch.testing.assert_close(norm.running_mean, x.double().mean((0, 2)).float(), rtol=1e-6, atol=0)
    y.float().square().mean().backward()
    assert norm.weight.grad.dtype == torch.float32


def test_one_rank_has_the_bits_of_torch():
    ours, theirs = BatchNorm(C, process_group=world_of_one()), nn.BatchNorm1d(C)
    x = numbers(8, C, 5, key="x")
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_var, theirs.running_var)


def test_conversion_keeps_names_objects_and_modes():
    shared = nn.BatchNorm1d(4, momentum=None)
    net = nn.Sequential(
        nn.Linear(4, 4), shared, nn.Sequential(shared, nn.BatchNorm2d(4, affine=False).eval())
    )
    before, state = dict(net.named_parameters()), net.state_dict()
    converted = convert_batchnorm(net)
    assert converted is net and list(net.state_dict()) == list(state)
    assert all(p is before[name] for name, p in net.named_parameters())
    assert net[1] is net[2][0] and type(net[1]) is BatchNorm and net[1].momentum is None
    assert not net[2][1].training and net[2][1].weight is None
    assert isinstance(convert_batchnorm(nn.SyncBatchNorm(4)), BatchNorm)
    assert convert_batchnorm(net[1]) is net[1]
    net.load_state_dict(state)


@world(2)
def test_a_copy_shares_the_group(mesh):
    norm = copy.deepcopy(BatchNorm(C, process_group=mesh))
    norm(part(2 * mesh.rank, (C,), torch.float32))
    assert equal_everywhere(mesh, norm.buffers())


@world(2)
def test_ranks_in_different_layers_are_an_error_and_not_a_wrong_mean(mesh):
    norms = [BatchNorm(C, process_group=mesh) for _ in range(2)]
    x = part(0, (C,), torch.float32)
    for norm in norms:
        y = norm(x)
    with pytest.raises(Desync, match=r"in different BatchNorms, or one is in forward, \[1, 2\]"):
        norms[mesh.rank](x)
    with pytest.raises(Desync, match=r"\[-2, 1\]: every rank has to call the same layers"):
        norms[0](x) if mesh.rank else y.sum().backward()


@world(2)
def test_a_batch_of_one_value_is_refused_on_all_ranks(mesh):
    with pytest.raises(ValueError, match="more than 1 value per channel in the global batch, got 1"):
        BatchNorm(C, process_group=mesh)(torch.ones(1 - mesh.rank, C))


@world(2)
def test_one_process_cannot_verify_it(mesh):
    model = DataParallel(nn.Sequential(nn.Linear(C, C), BatchNorm(C, process_group=mesh)), mesh)
    with pytest.raises(ValueError, match="'1' is a BatchNorm, which mixes the batches of all ranks"):
        model.verify(torch.ones(4, C), lambda model, x: model(x).mean())
    model.close()


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected an input \(N, 3\) or \(N, 3, \.\.\.\), got \(2, 4\)"):
        BatchNorm(C)(torch.ones(2, 4))
