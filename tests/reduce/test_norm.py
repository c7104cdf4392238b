"""The gradient norm is right, and has the same bits however the gradients are cut and placed."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from instep.reduce import norm
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.reduce.buckets import flat_real
from instep.reduce.norm import block_square_sums, clip_grad_norm_, exact_sum, grad_norm


def with_gradients(*gradients: Tensor) -> list[Tensor]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@given(st.integers(0, 4 * BLOCK_ELEMENTS), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(deadline=None, max_examples=25)
def test_the_norm_is_that_of_exact_arithmetic(num_elements, dtype):
    gradient = torch.randn(num_elements).to(dtype)
    exact = sum((Fraction(x) ** 2 for x in gradient.tolist()), Fraction(0))
    assert grad_norm([gradient]) == pytest.approx(math.sqrt(exact), rel=1e-12)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 5000), st.randoms())
@settings(deadline=None, max_examples=40)
def test_gradients_cut_between_blocks_have_the_norm_of_the_whole(whole_blocks, rest, random):
    sizes = [n * BLOCK_ELEMENTS for n in whole_blocks] + [rest]
    gradient = torch.randn(sum(sizes)) * 10 ** torch.empty(sum(sizes)).uniform_(-3, 3)
    parts = list(gradient.split(sizes))
    blocks = torch.cat([block_square_sums(part) for part in parts])
    assert blocks.tolist() == block_square_sums(gradient).tolist()
    random.shuffle(parts)
    assert grad_norm(parts) == grad_norm([gradient])


@pytest.mark.parametrize("cut", [1000, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS + 16])
def test_a_cut_inside_a_block_would_change_the_bits_of_some(cut):
    """Why slice edges lie on block edges: the same numbers, cut elsewhere, round elsewhere."""
    gradients = torch.randn(50, 2 * BLOCK_ELEMENTS)
    assert any(grad_norm([g[:cut], g[cut:]]) != grad_norm([g]) for g in gradients)


def test_a_block_has_one_sum_at_every_address_and_beside_every_other():
    block = torch.randn(BLOCK_ELEMENTS)
    (alone,) = block_square_sums(block).tolist()
    memory = torch.randn(6 * BLOCK_ELEMENTS)
    for offset in range(20):
        place = memory[BLOCK_ELEMENTS + offset :][: 3 * BLOCK_ELEMENTS]
        place[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS] = block
        assert block_square_sums(place)[1].item() == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sums_of_a_gpu_do_not_depend_on_how_many_blocks_there_are(dtype, monkeypatch):
    monkeypatch.setattr(norm, "GPU_PIECE_BLOCKS", 4)  # several batches, and a tensor in two of them
    x = torch.randn(5 * BLOCK_ELEMENTS + 7, dtype=torch.float64).mul_(100).to(dtype)
    whole = norm._sums_by_halves([x])
    parts = x.split(BLOCK_ELEMENTS)
    assert torch.equal(whole, torch.cat([norm._sums_by_halves([part]) for part in parts]))
    assert torch.equal(whole, norm._sums_by_halves([x[:0], *parts]))
    torch.testing.assert_close(whole, block_square_sums(x), rtol=1e-14, atol=0)
    assert norm._sums_by_halves([x[:0]]).shape == (0,)


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, math.nan], math.nan),
        ([], 0.0),
        ([0.0, -0.0], 0.0),
    ],
)
def test_what_is_not_finite_shows_in_the_norm(elements, expected):
    norm = grad_norm([torch.ones(5), torch.tensor(elements)])
    expected = math.hypot(expected, math.sqrt(5))
    assert math.isnan(norm) if math.isnan(expected) else norm == expected


@given(st.permutations([1e308, 1e308, -1e308, 1.0]))
def test_an_exact_sum_has_no_order_though_partial_sums_are_too_large(numbers):
    assert exact_sum(numbers) == 1e308
    assert exact_sum([1e308, 1e308]) == math.inf


def test_clipping_a_gradient_that_has_a_graph_adds_nothing_to_the_graph():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    made_by = weight.grad.grad_fn
    clip_grad_norm_(weight, 1.0)
    assert weight.grad.grad_fn is made_by is not None
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("element", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_raises_on_demand_and_before_a_gradient_changes(element):
    (parameter,) = with_gradients(torch.tensor([element, 1.0]))
    with pytest.raises(RuntimeError, match="expected a finite number"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert parameter.grad is not None
    assert parameter.grad[1].item() == 1.0
    theirs = with_gradients(parameter.grad)
    clip_grad_norm_(parameter, 1.0)
    nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(parameter.grad, theirs[0].grad, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_norm_of_many_tensors_is_that_of_the_blocks_of_each(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    try:
        sizes = [*range(40), 96, 384, 1000, 1023, 2049, 4095, 4096, 4097, 9000]
        gradients = [(torch.randn(n, generator=draw) * 10).to(dtype) for n in sizes]
        blocks = [block for x in gradients for block in flat_real(x).split(BLOCK_ELEMENTS) if block.numel()]
        alone = [torch.linalg.vector_norm(x.view(1, -1), dim=1, dtype=torch.float64).square() for x in blocks]
        assert sorted(norm._square_sums(gradients)) == sorted(alone)
        assert grad_norm([torch.empty(0, dtype=dtype)]) == 0.0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_of_a_tensor_give_the_bits_of_all_of_it(monkeypatch, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for numel in (0, 1, 4095, 4096, 4097, 33 * 4096, 64 * 4096, 131 * 4096 + 5):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            in_pieces = norm.block_square_sums(x)
            monkeypatch.setattr(norm, "PIECE_BLOCKS", 1 << 20)
            assert torch.equal(in_pieces, norm.block_square_sums(x)), numel
            monkeypatch.undo()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 5.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_clipping_is_that_of_torch_in_float64_rounded_once(max_norm, dtype):
    gradients = [torch.randn(30, 7, dtype=dtype), torch.randn(5000, dtype=dtype)]
    ours = with_gradients(*gradients)
    theirs = with_gradients(*(x.to(torch.promote_types(dtype, torch.float64)) for x in gradients))
    norm, reference = clip_grad_norm_(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, reference.double(), rtol=1e-12, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_the_edges_of_norms_and_of_clipping():
    assert grad_norm([torch.tensor([1e154], dtype=torch.float64)] * 2) == math.inf
    assert grad_norm([]) == 0.0 and grad_norm([torch.tensor([3 + 4j, 12j])]) == 13.0
    matrix = torch.randn(300, 70)
    assert grad_norm([matrix.t().contiguous().t()]) == grad_norm([matrix])
    parameters = [*with_gradients(torch.tensor([3.0, 4.0])), nn.Parameter(torch.ones(2))]
    assert clip_grad_norm_(parameters[1], 1.0).item() == 0.0
    assert clip_grad_norm_(parameters, 5.1).item() == 5.0 and parameters[0].grad.tolist() == [3, 4]
    assert clip_grad_norm_((p for p in parameters), 1.0).item() == 5.0 and parameters[1].grad is None
    with pytest.raises(ValueError, match=r"norm_type=inf: expected 2, .*torch\.nn\.utils\.clip_grad_norm_"):
        clip_grad_norm_(parameters, 1.0, math.inf)
