"""Batch norm over the global batch, on CPUs and GPUs.

torch's ``BatchNorm`` normalises by the mean and variance of the samples that one process computes at a time,
and with few samples these are noise. Over the global batch:

    forward     each part of the batch has (count, mean, M2), M2 the sum of squared distances from its mean;
                merged pairwise in the order of the sum tree, they are mean and variance of the whole batch
    backward    two sums per channel, of dy and dy * x_hat, are added in the same order

                dx = weight / std * (dy - mean(dy) - x_hat * mean(dy * x_hat))

In a plain loop a part is what a rank computes in one forward, and the layer exchanges both, as torch's
``SyncBatchNorm`` does. In a declared step a part is a micro-batch, and ``global_step.py`` says when its
statistics are known. C channels.

Source of the merge: T. Chan, G. Golub, R. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
Means = Callable[[Tensor], Tensor]
"""From a part's sums of dy and dy * x_hat, (2, C) float64, to their means over the global batch."""


class BatchNorm(OverGlobalBatch):
    """Batch norm whose statistics are those of the global batch, for inputs (N, C) and (N, C, ...).

    In a plain loop, training: of all samples that the ranks are given in this forward, which every rank has
    to run; a rank may have none. In a declared step: of all its micro-batches, in ``instep.nn.global_step``;
    ``model.micro_batches`` refuses the layer. In ``eval()`` mode, and with one rank in a plain loop, it is
    torch's ``BatchNorm``. Statistics are computed in float32 at least, also of float16 and bfloat16, and
    merged in float64. Running statistics have the same bits on all ranks.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as for torch's ``BatchNorm2d``.
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
        self._num_exchanges = 0

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"BatchNorm: expected an input (N, {self.num_features}) or (N, {self.num_features}, ...), "
                f"got {tuple(x.shape)}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """As torch's ``BatchNorm``.

        Raises:
            ValueError: the shape does not fit, or the global batch has one value per channel.
            Desync: another rank is in another forward of a BatchNorm (found on CPUs).
            PeerLost: a rank did not come.
        """
        self._check_input_dim(x)
        if not self.training:
            alone = self.running_mean is None
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, alone, 0.0, self.eps
            )
        if self.settling is not None:
            found: Tensor = self.settling.normalise(self, x)
            return found
        group, waiting = group_of(None if self._ranks is None else self._ranks(), BATCH_NORM)
        if group.size == 1:
            return super().forward(x)
        number = torch.full((1,), self._num_exchanges, dtype=torch.float64, device=x.device)
        self._num_exchanges += 1
        with waiting:
            rows = gathered(group, torch.cat([number, moments_of(x)]))
        if rows.device.type == "cpu" and len(numbers := set(rows[:, 0].tolist())) > 1:
            raise Desync(
                f"a BatchNorm({self.num_features}) is in its forwards number {sorted(map(int, numbers))} on "
                "different ranks: call it equally often on every rank in training mode, if need be with an "
                "empty batch"
            )
        moments = merged(rows[:, 1:].unbind())
        require_several(moments)
        self.update(moments)

        def means(sums: Tensor) -> Tensor:
            with waiting:
                everyone = gathered(group, sums.flatten())
            return added(everyone.unbind()).view_as(sums) / moments[0]

        return self.normalised(x, moments, means)

    def normalised(self, x: Tensor, moments: Tensor, means: Means) -> Tensor:
        """``x`` by the ``moments`` of the global batch, (1 + 2C,)."""
        mean, variance = _mean_and_variance(moments, _wide(x.dtype))
        found: Tensor = Normalise.apply(x, self.weight, self.bias, mean, variance, self.eps, means)
        return found

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Follow the ``moments`` of a global batch with the running statistics."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        count = moments[0]
        mean, variance = _mean_and_variance(moments, self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.device), factor)
        unbiased = (variance * (count / (count - 1))).to(self.running_var)
        self.running_var.lerp_(unbiased, factor)


def convert_batchnorm(module: nn.Module, process_group: Mesh | ProcessGroup | None = None) -> nn.Module:
    """Replace every batch norm of torch in ``module`` by a ``BatchNorm``, in place, as torch's
    ``SyncBatchNorm.convert_sync_batchnorm`` does.

    Names, parameters and buffers stay the same objects, so an optimizer and a ``state_dict`` still fit. Hooks
    on the old layers are lost.

    Args:
        module: a model, before it is wrapped, or a batch norm.
        process_group: as for ``BatchNorm``.

    Returns:
        ``module``, or the new layer if it is a batch norm itself.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> instep.nn.convert_batchnorm(net)[1]
        BatchNorm(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
    """
    return _converted(module, process_group, {})


def _converted(module: nn.Module, process_group: Any, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in known:
        return known[module]
    known[module] = module
    if isinstance(module, _BatchNorm) and not isinstance(module, BatchNorm):
        known[module] = new = BatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            device="meta",
        )
        new._parameters.update(module._parameters)
        new._buffers.update(module._buffers)
        new.training = module.training
        return new
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _converted(child, process_group, known)
    return module


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
        if x.numel() == 0:
            return x.clone()
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
        dw, db = (
            row.to(weight.dtype) if weight is not None and needed else None
            for row, needed in zip(sums.flip(0), ctx.needs_input_grad[1:3], strict=True)
        )
        return dx, dw, db, None, None, None, None


def moments_of(x: Tensor) -> Tensor:
    """Count, mean and M2 of each channel of ``x`` (N, C, ...): (1 + 2C,) float64, on its device."""
    count = x.numel() // x.shape[1]
    if count == 0:
        return x.new_zeros(1 + 2 * x.shape[1], dtype=torch.float64)
    dims = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x.detach().to(_wide(x.dtype)), dim=dims, correction=0)
    number = torch.full((1,), count, dtype=torch.float64, device=x.device)
    return torch.cat([number, mean.double(), variance.double() * count])


def merged(parts: Sequence[Tensor]) -> Tensor:
    """The moments of all ``parts`` together, in the order of the sum tree."""

    def merge(a: Tensor, b: Tensor) -> Tensor:
        n, m = a[:1], b[:1]
        (mean, m2), (other, other_m2) = a[1:].view(2, -1), b[1:].view(2, -1)
        distance, share = other - mean, m / (n + m).clamp(min=1)
        return torch.cat([n + m, mean + distance * share, m2 + other_m2 + distance**2 * n * share])

    return _folded(parts, merge)


def require_several(moments: Tensor) -> None:
    """Raise ``ValueError`` if ``moments`` are of one value; not on a GPU, whose host would have to wait."""
    if moments.device.type == "cpu" and moments[0] <= 1:
        raise ValueError(
            f"BatchNorm: expected more than 1 value per channel in the global batch, got {int(moments[0])}"
        )


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of ``parts``, in the order of the sum tree."""
    return _folded(parts, torch.add)


def _folded(parts: Sequence[Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    middle = split(0, len(parts))
    return join(_folded(parts[:middle], join), _folded(parts[middle:], join))


def gathered(group: Group, row: Tensor) -> Tensor:
    """The ``row`` (n,) of every rank: (W, n), on its device."""
    out = row.new_empty(group.size * len(row))
    group.all_gather(out, row.contiguous(), OPERATION)
    return out.view(group.size, -1)


def _mean_and_variance(moments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mean, m2 = moments[1:].view(2, -1)
    return mean.to(dtype), (m2 / moments[0].clamp(min=1)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
