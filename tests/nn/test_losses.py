"""The contrastive losses, against their formulas pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from instep.nn import InfoNCE, SigLIP, SupCon
from tests.parity import numbers

N, D, T = 11, 5, 0.3
BLOCKS = pytest.mark.parametrize("block_rows", [4, 1000])


def embeddings(key: str, n: int = N) -> Tensor:
    return numbers(n, D, key=key, dtype=torch.float64).requires_grad_()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y) / (x.norm() * y.norm())


def info_nce(queries: Tensor, keys: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, q in enumerate(queries):
        all_keys = sum(torch.exp(cosine(q, k) / T) for k in keys)
        total = total - torch.log(torch.exp(cosine(q, keys[i]) / T) / all_keys)
    return total / len(queries)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """The loss, and its gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    pairs = zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@BLOCKS
def test_info_nce_with_more_keys_than_queries(block_rows):
    queries, keys = embeddings("queries"), embeddings("keys", N + 3)
    loss = InfoNCE(T, block_rows=block_rows).double()
    loss.logit_scale.fill_(math.log(1 / T))
    assert_same(loss(queries, keys), info_nce(queries, keys), [queries, keys])


@BLOCKS
def test_clip_is_the_mean_of_both_ways_and_learns_its_temperature(block_rows):
    x, y = embeddings("images"), embeddings("texts")
    loss = InfoNCE(T, learnable=True, symmetric=True, block_rows=block_rows).double()
    loss.logit_scale.data.fill_(math.log(1 / T))
    assert_same(loss(x, y), (info_nce(x, y) + info_nce(y, x)) / 2, [x, y])
    (gradient,) = torch.autograd.grad(loss(x, y), loss.logit_scale)
    step = 1e-6
    with torch.no_grad():
        loss.logit_scale += step
        above = loss(x, y)
        loss.logit_scale -= 2 * step
        slope = (above - loss(x, y)) / (2 * step)
    torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=0)


@BLOCKS
def test_siglip_is_a_sigmoid_per_pair(block_rows):
    x, y = embeddings("images"), embeddings("texts")
    loss = SigLIP(T, -2.0, block_rows=block_rows).double()
    loss.logit_scale.data.fill_(math.log(1 / T))
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        for j in range(N):
            sign = 1 if i == j else -1
            expected = expected - torch.log(torch.sigmoid(sign * (cosine(x[i], y[j]) / T - 2.0))) / N
    assert_same(loss(x, y), expected, [x, y])


@BLOCKS
@pytest.mark.parametrize("views", [1, 2])
def test_supervised_contrastive_loss(block_rows, views):
    x = embeddings("samples", N * views)
    labels = torch.tensor([0, 1, 2, 0, 1, 0, 3, 2, 2, 2, 1])  # class 3 has one sample
    given = x.view(N, views, D) if views > 1 else x
    classes = labels.repeat_interleave(views).tolist()
    terms = []
    for i, own in enumerate(classes):
        others = [a for a in range(N * views) if a != i]
        positives = [p for p in others if classes[p] == own]
        total = sum(torch.exp(cosine(x[i], x[a]) / T) for a in others)
        if positives:
            parts = [-torch.log(torch.exp(cosine(x[i], x[p]) / T) / total) for p in positives]
            terms.append(sum(parts) / len(parts))
    assert len(terms) == (N - 1 if views == 1 else 2 * N)
    assert_same(SupCon(T, block_rows=block_rows)(given, labels), sum(terms) / len(terms), [x])


def test_without_labels_the_views_of_a_sample_are_its_class():
    x = embeddings("samples", 2 * N).view(N, 2, D)
    assert torch.equal(SupCon(T)(x), SupCon(T)(x, torch.arange(N)))


def test_half_precision_is_computed_in_float32():
    x = embeddings("x").detach().bfloat16()
    for loss, given in (
        (InfoNCE(), (x, x)),
        (SigLIP(), (x, x)),
        (SupCon(), (x.view(N, 1, D).repeat(1, 2, 1),)),
    ):
        assert loss(*given).dtype == torch.float32


REFUSED = [
    (
        lambda: InfoNCE()(torch.ones(3, 2), torch.ones(2, 2)),
        r"keys \(at least n, D\), got \(3, 2\) and \(2, 2\)",
    ),
    (lambda: InfoNCE(symmetric=True)(torch.ones(2, 2), torch.ones(3, 2)), r"keys \(n, D\), got"),
    (lambda: SigLIP()(torch.ones(2, 2), torch.ones(2, 3)), r"got \(2, 2\) and \(2, 3\)"),
    (lambda: SupCon()(torch.ones(3, 2), torch.ones(2)), r"labels \(n,\), got \(3, 2\) and \(2,\)"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_what_does_not_fit_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
