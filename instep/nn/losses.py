"""Contrastive losses of the whole global batch: InfoNCE and CLIP, SigLIP, supervised contrastive.

Every sample is compared with every other one, so the loss of a batch is not the mean of the losses of its
parts. These modules take all embeddings and communicate nothing: one process calls them with its batch, and
in a declared step ``instep.nn.global_step`` gathers the global batch for them.

    similarities (n, n)    keys 0 1 2 3
                query 0    [ +  -  -  - ]     + a pair    - a negative
                      1    [ -  +  -  - ]     rows are computed in blocks of ``block_rows``, and again in
                      2    [ -  -  +  - ]     backward: memory for block_rows * n similarities
                      3    [ -  -  -  + ]

n samples, D features. Embeddings are scaled to length 1, and are float32 at least. ``block_rows`` is part of
the numerical configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BLOCK_ROWS = 4096


class InfoNCE(nn.Module):
    """Each query is to find its own key among all keys: softmax cross-entropy over the similarities.

    The mean over i of -log(exp(q_i k_i / T) / sum_j exp(q_i k_j / T)). ``symmetric=True`` is the loss of
    CLIP: the mean of the losses of queries among keys and of keys among queries.

    Sources: A. van den Oord et al., arXiv 1807.03748, equation 4; A. Radford et al., "Learning Transferable
    Visual Models From Natural Language Supervision", arXiv 2103.00020, figure 3.

    Args:
        temperature: T. Similarities are divided by it.
        learnable: make log(1 / T) a parameter, ``logit_scale``, as CLIP does. The loss has to be a part of
            the wrapped module then. CLIP clips the parameter at log(100) after each step of the optimizer.
        symmetric: also let each key find its query.
        block_rows: rows of similarities that are in memory at a time.

    Example:
        >>> loss = instep.nn.InfoNCE(0.1, symmetric=True)
        >>> images, texts = torch.eye(2), torch.eye(2)
        >>> loss(images, texts) < loss(images, texts.flip(0))
        tensor(True)
    """

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        learnable: bool = False,
        symmetric: bool = False,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        super().__init__()
        self.symmetric, self.block_rows = symmetric, block_rows
        self.logit_scale = _log_scale(temperature, learnable=learnable)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The loss, (), of ``queries`` (n, D) and ``keys`` (m, D); keys beyond the first n are negatives."""
        _require_rows(queries, keys, same=self.symmetric)
        queries, keys, scale = _unit(queries), _unit(keys), self.logit_scale.exp()
        loss = self._one_way(queries, keys, scale)
        return (loss + self._one_way(keys, queries, scale)) / 2 if self.symmetric else loss

    def _one_way(self, queries: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
        def block(start: int, stop: int) -> Tensor:
            logits = (queries[start:stop] @ keys.T).to(queries.dtype) * scale
            own = torch.arange(start, stop, device=logits.device)
            return F.cross_entropy(logits, own, reduction="sum")

        return _over_blocks(block, len(queries), self.block_rows) / len(queries)


class SigLIP(nn.Module):
    """Each pair is classified by itself, as belonging together or not: a sigmoid per similarity.

    The sum over i and j of -log sigmoid(z_ij (t q_i k_j + b)), divided by n; z_ij is 1 for i = j, else -1.

    Source: X. Zhai et al., "Sigmoid Loss for Language Image Pre-Training", arXiv 2303.15343, equation 1.

    Args:
        temperature: 1 / t at the beginning; ``logit_scale`` is log t.
        bias: b at the beginning, the parameter ``logit_bias``.
        learnable: train both, as the paper does. The loss has to be a part of the wrapped module then.
        block_rows: rows of similarities that are in memory at a time.

    Example:
        >>> loss = instep.nn.SigLIP()
        >>> [name for name, _ in loss.named_parameters()]
        ['logit_scale', 'logit_bias']
    """

    def __init__(
        self,
        temperature: float = 0.1,
        bias: float = -10.0,
        *,
        learnable: bool = True,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        super().__init__()
        self.block_rows = block_rows
        self.logit_scale = _log_scale(temperature, learnable=learnable)
        self.logit_bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learnable)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The loss, (), of ``queries`` (n, D) and ``keys`` (n, D)."""
        _require_rows(queries, keys, same=True)
        queries, keys, scale = _unit(queries), _unit(keys), self.logit_scale.exp()

        def block(start: int, stop: int) -> Tensor:
            logits = (queries[start:stop] @ keys.T).to(queries.dtype) * scale + self.logit_bias
            # -log sigmoid(x) = softplus(-x) = softplus(x) - x
            return F.softplus(logits).sum() - logits[:, start:stop].diagonal().sum()

        return _over_blocks(block, len(queries), self.block_rows) / len(queries)


class SupCon(nn.Module):
    """Samples of one class are to be close: supervised contrastive loss; without labels that of SimCLR.

    For sample i, the mean over the other samples p of its class of -log(exp(x_i x_p / T) / sum over a != i of
    exp(x_i x_a / T)); then the mean over all samples that have another one in their class.

    Source: P. Khosla et al., "Supervised Contrastive Learning", arXiv 2004.11362, equation 2.

    Args:
        temperature: T.
        block_rows: rows of similarities that are in memory at a time.

    Example:
        >>> loss = instep.nn.SupCon()
        >>> embeddings, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
        >>> loss(embeddings, labels)
        tensor(1.0986)
    """

    def __init__(self, temperature: float = 0.1, *, block_rows: int = BLOCK_ROWS) -> None:
        super().__init__()
        self.temperature, self.block_rows = temperature, block_rows

    def forward(self, embeddings: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, (), of ``embeddings`` (n, D), or (n, V, D) of V views of each, and ``labels`` (n,).

        Without labels each sample is a class of its own, with its views.
        """
        n = len(embeddings)
        classes = torch.arange(n, device=embeddings.device) if labels is None else labels
        if embeddings.dim() not in (2, 3) or n == 0 or classes.shape != (n,):
            raise ValueError(
                "SupCon: expected embeddings (n, D) or (n, V, D) and labels (n,), got "
                f"{tuple(embeddings.shape)} and {tuple(classes.shape)}"
            )
        if embeddings.dim() == 3:
            classes = classes.repeat_interleave(embeddings.shape[1])
        x = _unit(embeddings.flatten(0, -2))
        lowest = torch.finfo(x.dtype).min / 2  # -inf would make the gradient of its own similarity nan

        def block(start: int, stop: int) -> Tensor:
            others = torch.ones(stop - start, len(x), dtype=torch.bool, device=x.device)
            others[:, start:stop].fill_diagonal_(False)
            logits = ((x[start:stop] @ x.T).to(x.dtype) / self.temperature).masked_fill(~others, lowest)
            positive = (classes[start:stop, None] == classes) & others
            found = torch.where(positive, logits.log_softmax(dim=1), 0.0).sum(dim=1)
            return -(found / positive.sum(dim=1).clamp(min=1)).sum()

        _, own, sizes = classes.unique(return_inverse=True, return_counts=True)
        num_anchors = (sizes[own] > 1).sum().clamp(min=1)
        return _over_blocks(block, len(x), self.block_rows) / num_anchors


def _log_scale(temperature: float, *, learnable: bool) -> nn.Parameter:
    return nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learnable)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, dim=-1)


def _require_rows(queries: Tensor, keys: Tensor, *, same: bool) -> None:
    fits = queries.dim() == keys.dim() == 2 and queries.shape[1] == keys.shape[1] and len(queries) > 0
    if not fits or len(keys) < len(queries) or (same and len(keys) > len(queries)):
        raise ValueError(
            f"expected queries (n, D) and keys ({'n' if same else 'at least n'}, D), got "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        )


def _over_blocks(block: Callable[[int, int], Tensor], num_rows: int, block_rows: int) -> Tensor:
    """The sum of ``block(start, stop)`` over all rows; of several blocks none is kept for backward."""
    if num_rows <= block_rows:
        return block(0, num_rows)
    stops = [(i, min(i + block_rows, num_rows)) for i in range(0, num_rows, block_rows)]
    again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    return torch.stack([again(start, stop) for start, stop in stops]).sum()
