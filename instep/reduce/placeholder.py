"""What stands in ``.grad`` where a rank has only pieces of the gradient: it says that there is one, no more.

"Is there a gradient?" and its shape are what they always are, its dtype is that of the pieces.
``zero_grad()`` discards it, also where zeros are asked for, and a ``GradScaler`` unscales the pieces. Who
computes with it, writes to it, or sends it to other ranks gets an error that names the parameter: torch's own
clipping, ``all_reduce(p.grad)``, which would write where there is no memory. For whoever comes around that,
its memory is one NaN; ``was_written`` tells, on a CPU, if it is filled.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Methods that ask about a tensor, not about its values, as torch.compile does; so do all attributes that are
# no tensors themselves. Not ``is_complex``: of some collectives it is all that sees what they write to.
ABOUT = frozenset(
    {"__hash__", "__len__", "_has_compatible_shallow_copy_type", "_is_view", "dim", "element_size"}
    | {"get_device", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_signed"}
    | {"ndimension", "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"}
)
# What ``module.to()`` calls: allowed where it has no effect.
CONVERSIONS = frozenset({"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type", "xpu"})


class Slices(Protocol):
    """Has the pieces of the gradients that ``placeholders`` stand for: some on this rank, some on others.

    ``where`` says so in errors.
    """

    where: ClassVar[str]

    def square_sums(self, placeholders: Sequence[Tensor], whole: Sequence[Tensor]) -> list[float]:
        """Sums of squares of all blocks of these gradients. Collective.

        ``whole`` are those asked for with them that are here, and have placeholders on other ranks.
        """

    def scale(self, placeholders: Sequence[Tensor], factor: float) -> None:
        """Multiply this rank's pieces of these gradients."""

    def unscale(
        self,
        placeholders: Sequence[Tensor],
        whole: Sequence[Tensor],
        found_inf: Tensor,
        inverse_scale: Tensor,
    ) -> None:
        """As ``scale``; ``found_inf`` is 1 on all ranks if one has a piece that is not finite. Collective.

        ``whole`` are the gradients that were unscaled with these, and are here.
        """

    def discard(self, placeholders: Sequence[Tensor]) -> None:
        """Their parameters have no gradient any more."""

    def used(self, placeholders: Sequence[Tensor]) -> None:
        """A step of an optimizer begins, of their parameters: those that it shall not see are discarded."""


class Placeholder(Tensor):
    """Stands for the gradient of the parameter called ``instep_name``, whose pieces ``instep_slices`` has."""

    instep_name: str
    instep_slices: weakref.ref[Slices]
    instep_where: str
    instep_memory: Tensor  # ()
    instep_dtype: torch.dtype  # of the pieces
    # Asked for in every step, here without a detour; nothing ever changes it.
    layout = torch.strided
    _version = 0

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.instep_dtype

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        called = getattr(func, "__name__", str(func))
        if called == "__set__" and args[0] is args[1]:
            return None
        if called == "requires_grad_" and args[1:] == (False,):  # zero_grad makes sure of it
            return args[0]
        if called in ABOUT or called in CONVERSIONS or called == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if found is args[0] or not isinstance(found, Tensor):
                return found
        if called in DONE_BY_SLICE:
            return DONE_BY_SLICE[called](*args, **(kwargs or {}))
        if called in ("__get__", "__set__"):
            called = f".{func.__self__.__name__}"
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise RuntimeError(
            f"the gradient of {first.instep_name!r} is {first.instep_where}, and .grad only stands for it: "
            f"{called} cannot use it. Clip with instep.clip_grad_norm_(model.parameters(), max_norm) instead "
            "of torch's; discard gradients with zero_grad(); scale the loss instead of them, or use a "
            "GradScaler"
        )

    def __repr__(self, **others: Any) -> str:  # type: ignore[override]
        return f"<{self.instep_where}: the gradient of {self.instep_name!r}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _discard(gradients: Tensor | Sequence[Tensor]) -> Tensor | None:
    """``zero_``, of one or several; on a placeholder, the gradient is gone."""
    found = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    for slices, own in by_slices(found):
        slices.discard(own)
    for x in found:
        if not isinstance(x, Placeholder):
            x.zero_()
    return gradients if isinstance(gradients, Tensor) else None


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    whole = [x for x in gradients if not isinstance(x, Placeholder)]
    if whole:
        torch._amp_foreach_non_finite_check_and_unscale_(whole, found_inf, inverse_scale)
    for slices, own in by_slices(gradients):
        slices.unscale(own, whole, found_inf, inverse_scale)


def by_slices(gradients: Sequence[Tensor]) -> list[tuple[Slices, list[Tensor]]]:
    """The placeholders among ``gradients``, with who has their pieces."""
    found: dict[int, tuple[Slices, list[Tensor]]] = {}
    for x in gradients:
        if (slices := slices_of(x)) is not None:
            found.setdefault(id(slices), (slices, []))[1].append(x)
    return list(found.values())


# What ``zero_grad`` of modules and optimizers, and a ``GradScaler``, do with gradients.
DONE_BY_SLICE: Mapping[str, Callable[..., Any]] = {
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_zero_": _discard,
    "zero_": _discard,
}


def placeholder(like: Tensor, slices: Slices, name: str, dtype: torch.dtype) -> Tensor:
    """A gradient of ``dtype`` for the parameter ``like``, whose pieces ``slices`` has; it does not keep them
    alive."""
    memory = torch.full((), math.nan, dtype=like.dtype, device=like.device)
    x = Tensor._make_subclass(Placeholder, memory.expand(like.shape))  # to autograd no view of anything
    x.instep_name, x.instep_slices, x.instep_memory = name, weakref.ref(slices), memory
    x.instep_where, x.instep_dtype = slices.where, dtype
    return x


def was_written(stands_in: Tensor) -> bool:
    """Whether the one element of a placeholder was filled; on a GPU this is not asked, as it takes time."""
    assert isinstance(stands_in, Placeholder)
    memory = stands_in.instep_memory
    return memory.device.type == "cpu" and not bool(torch.isnan(memory))


def slices_of(gradient: Tensor) -> Slices | None:
    """Who has the pieces that ``gradient`` stands for; None if it is a gradient itself."""
    return gradient.instep_slices() if isinstance(gradient, Placeholder) else None
