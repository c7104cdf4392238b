"""Batch norm over the global batch, on CPUs and GPUs.

torch's ``BatchNorm`` normalises by mean and variance of the samples that one process computes at a time. Over
the global batch:

    forward     each part of the batch has (count, mean, M2), M2 the sum of squared distances from its mean;
                parts are merged pairwise, in the order of the sum tree
    backward    two sums per channel, of dy and dy * x_hat, are added in the same order

                dx = weight / std * (dy - mean(dy) - x_hat * mean(dy * x_hat))

In a plain loop a part is what a rank computes in one forward, and the layer exchanges both, as torch's
``SyncBatchNorm`` does. In a declared step a part is a micro-batch: see ``global_step.py``. C channels.

Source of the merge: T. Chan, G. Golub, R. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from instep.errors import Desync
from instep.events import BATCH_NORM
from instep.net.process_group import Group
from instep.reduce.evaluation import group_of
from instep.reduce.tree import split
from instep.step.running_statistics import OverGlobalBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from instep.mesh.mesh import Mesh

OPERATION = "the statistics of an instep.nn.BatchNorm"
_numbers: WeakKeyDictionary[Group, WeakKeyDictionary[BatchNorm, int]] = WeakKeyDictionary()  # by first use
Means = Callable[[Tensor], Tensor]
"""From a part's sums of dy and dy * x_hat, (2, C) float64, to their means over the global batch."""


class BatchNorm(OverGlobalBatch):
    """Batch norm whose statistics are those of the global batch, for inputs (N, C) and (N, C, ...).

    In a plain loop: of the samples of all ranks in this forward, which each rank has to run, if need be with
    an empty batch. In a declared step: of all micro-batches, by ``instep.nn.global_step``;
    ``model.micro_batches`` refuses the layer. In ``eval()`` mode, and on one rank in a plain loop, it is
    torch's ``BatchNorm``. Statistics are computed in float32 at least and merged in float64; running
    statistics have the same bits on all ranks.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for torch's.
        process_group: of the plain loop, as for ``DataParallel``; by default the registered mesh, else
            torch's default group, else this process alone.

    Example:
        >>> norm = instep.nn.BatchNorm(3)
        >>> norm(torch.randn(8, 3, 5, 5)).mean().abs() < 1e-6
        tensor(True)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Mesh | ProcessGroup | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        # A copy of the module shares the group: functions are not copied.
        self._ranks = None if process_group is None else lambda: process_group

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"BatchNorm: expected an input (N, {self.num_features}) or (N, {self.num_features}, ...), "
                f"got {tuple(x.shape)}"
            )

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if self.training and self.settling is not None:
            found: Tensor = self.settling.normalise(self, x)
            return found
        if not self.training:
            return super().forward(x)
        group, waiting = group_of(None if self._ranks is None else self._ranks(), BATCH_NORM)
        if group.size == 1:
            return super().forward(x)
        numbers = _numbers.setdefault(group, WeakKeyDictionary())
        number = numbers.setdefault(self, len(numbers)) + 1
        with waiting:
            moments = merged(gathered(group, number, moments_of(x)))
        self.update(moments)

        def means(sums: Tensor) -> Tensor:
            with waiting:
                rows = gathered(group, -number, F.pad(sums.flatten(), (1, 0)))  # as long as in forward
            return folded(rows)[1:].view_as(sums) / moments[0]

        return self.normalised(x, moments, means)

    def normalised(self, x: Tensor, moments: Tensor, means: Means) -> Tensor:
        """``x`` by the ``moments`` of the global batch, (1 + 2C,)."""
        mean, m2 = moments[1:].view(2, -1).to(torch.promote_types(x.dtype, torch.float32))
        variance = m2 / moments[0].to(m2).clamp(min=1)
        found: Tensor = Normalise.apply(x, self.weight, self.bias, mean, variance, self.eps, means)
        return found

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Follow the ``moments`` of a global batch with the running statistics."""
        if moments.device.type == "cpu" and moments[0] <= 1:  # a GPU's host would have to wait
            raise ValueError(
                f"BatchNorm: expected more than 1 value per channel in the global batch, got {moments[0]:g}"
            )
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean, m2 = moments[1:].view(2, -1)
        self.running_mean.lerp_(mean.to(self.running_mean), factor)
        self.running_var.lerp_((m2 / (moments[0] - 1)).to(self.running_var), factor)


def convert_batchnorm(module: nn.Module, process_group: Mesh | ProcessGroup | None = None) -> nn.Module:
    """Replace every batch norm of torch in ``module`` by a ``BatchNorm``, in place, as torch's
    ``SyncBatchNorm.convert_sync_batchnorm`` does.

    Names, parameters and buffers stay the same objects: an optimizer and a ``state_dict`` still fit. Hooks on
    the old layers are lost.

    Args:
        module: a model, before it is wrapped, or a batch norm.
        process_group: as for ``BatchNorm``.

    Returns:
        ``module``, or the new layer if it is a batch norm itself.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> instep.nn.convert_batchnorm(net)[1].weight.shape
        torch.Size([8])
    """
    return _converted(module, process_group, {})


def _converted(m: nn.Module, process_group: Any, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if m in known:
        return known[m]
    known[m] = m
    if isinstance(m, _BatchNorm) and not isinstance(m, BatchNorm):
        known[m] = new = BatchNorm(
            m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats, process_group, device="meta"
        )
        new._parameters.update(m._parameters)
        new._buffers.update(m._buffers)
        new.training = m.training
        return new
    for name, child in m._modules.items():
        m._modules[name] = None if child is None else _converted(child, process_group, known)
    return m


class Normalise(torch.autograd.Function):
    """``x`` by the mean and variance of the global batch; backward asks for ``means`` of gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        means: Means,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        ctx.means = means
        kind = mean.dtype if weight is None or x.dtype == mean.dtype else weight.dtype
        return F.batch_norm(x, mean.to(kind), variance.to(kind), weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std = ctx.saved_tensors
        shape = (1, -1, *[1] * (x.dim() - 2))
        kind, dims = mean.dtype, [0, *range(2, x.dim())]
        dy = dy.to(kind)
        x_hat = (x.to(kind) - mean.view(shape)) * inverse_std.view(shape)
        sums = torch.stack([dy.sum(dims), (dy * x_hat).sum(dims)])  # (2, C)
        dx = None
        if ctx.needs_input_grad[0]:
            of_dy, of_both = (row.to(kind).view(shape) for row in ctx.means(sums.double()))
            scale = inverse_std if weight is None else inverse_std * weight.to(kind)
            dx = ((dy - of_dy - x_hat * of_both) * scale.view(shape)).to(x.dtype)
        dw = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        db = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None, None


def moments_of(x: Tensor) -> Tensor:
    """Count, mean and M2 of each channel of ``x`` (N, C, ...): (1 + 2C,) float64, on its device."""
    count = x.numel() // x.shape[1]
    if count == 0:
        return x.new_zeros(1 + 2 * x.shape[1], dtype=torch.float64)
    dims = [0, *range(2, x.dim())]
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=dims, correction=0)
    return torch.cat([mean.double().new_full((1,), count), mean.double(), variance.double() * count])


def merged(parts: Sequence[Tensor]) -> Tensor:
    """The moments of all ``parts`` together, in the order of the sum tree."""

    def merge(a: Tensor, b: Tensor) -> Tensor:
        n, m = a[:1], b[:1]
        (mean, m2), (other, other_m2) = a[1:].view(2, -1), b[1:].view(2, -1)
        distance, share = other - mean, m / (n + m).clamp(min=1)
        return torch.cat([n + m, mean + distance * share, m2 + other_m2 + distance**2 * n * share])

    return folded(parts, merge)


def folded(parts: Sequence[Tensor], join: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """``parts``, joined by ``join`` in the order of the sum tree."""
    if len(parts) == 1:
        return parts[0]
    middle = split(0, len(parts))
    return join(folded(parts[:middle], join), folded(parts[middle:], join))


def gathered(group: Group, number: int, row: Tensor) -> Sequence[Tensor]:
    """The ``row`` (n,) of every rank; ``number`` says in which layer, and below 0 in its backward."""
    row = torch.cat([row.new_full((1,), number), row])
    out = row.new_empty(group.size, len(row))
    group.all_gather(out.view(-1), row, OPERATION)
    if row.device.type == "cpu" and len(found := set(out[:, 0].tolist())) > 1:
        raise Desync(
            f"the ranks are in different BatchNorms, or one is in forward, {sorted(map(int, found))}: every "
            "rank has to call the same layers in training mode, if need be with an empty batch"
        )
    return out[:, 1:].unbind()
