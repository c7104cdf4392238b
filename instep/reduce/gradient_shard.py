"""The ``.grad`` of a parameter's shard: a real tensor, which knows that the other ranks have the rest.

Elementwise operations are what they are for any tensor. What looks at a whole gradient would use this rank's
part of it for all, and silently: torch's clipping would scale every rank by another factor, and a
``GradScaler`` would skip the step on the rank alone whose part overflowed. So a norm raises, and unscaling
asks all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

NORMS = frozenset({"_foreach_norm", "linalg_vector_norm", "linalg_norm", "vector_norm", "norm"})
ZEROS = frozenset({"zero_", "_foreach_zero_"})
DATA = torch._C.TensorBase.__dict__["data"]
PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__"})
# Their results are shards again: programs set them as ``.grad``, or take their norm. Not so ``clone``, with
# which optimizers make moments.
STAY_SHARDS = PRODUCTS | {"add", "clamp", "clip", "detach", "float", "nan_to_num", "neg", "sub"}
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class ShardOwner(Protocol):
    """What has reduced gradients to shards on several ranks."""

    def square_sums(self, shards: Sequence[Tensor]) -> list[float]:
        """Sums of squares of all blocks of these gradients, on all ranks. Collective."""

    def all_found_inf(self, found_inf: Tensor) -> None:
        """``found_inf`` is 1 on all ranks if it is on one. Collective."""


class GradientShard(Tensor):
    """This rank's shard of the gradient of the parameter called ``instep_name``."""

    instep_name: str
    instep_owner: weakref.ref[ShardOwner]
    instep_is_part = True  # other ranks have more of it
    instep_is_zeroed = False  # by ``zero_grad(set_to_none=False)``

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        called = getattr(func, "__name__", "")
        if called in ZEROS:
            for x in tree_leaves(args):
                if isinstance(x, cls):
                    x.instep_is_zeroed = True
        if called in NORMS and any(isinstance(x, cls) and x.instep_is_part for x in tree_leaves(args)):
            raise RuntimeError(
                f"{called} of a gradient shard: .grad of a sharded parameter is this rank's part, and its "
                "norm is not that of the gradient. Clip with instep.clip_grad_norm_(model.parameters(), "
                "max_norm), which returns the norm over all ranks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if called == UNSCALE:
                return _unscale(func, *args)
            made = func(*args, **(kwargs or {}))
        if called in STAY_SHARDS or getattr(func, "__self__", None) is DATA:
            of = next((x for x in tree_leaves(args) if isinstance(x, cls)), None)
            if of is not None and type(made) is Tensor and made.shape == of.shape:
                return _shard_of(made, of.instep_name, of.instep_owner, of.instep_is_part)
        return made


def gradient_shard(values: Tensor, name: str, owner: ShardOwner, *, is_part: bool) -> GradientShard:
    """``values``, which stay where they are, as the gradient of this rank's shard of parameter ``name``."""
    return _shard_of(values, name, weakref.ref(owner), is_part)


def _shard_of(values: Tensor, name: str, owner: weakref.ref[ShardOwner], is_part: bool) -> GradientShard:
    x: GradientShard = Tensor._make_subclass(GradientShard, values)
    x.instep_name, x.instep_owner, x.instep_is_part = name, owner, is_part
    return x


_reduced_by: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its name, who reduces its gradient


def is_reduced_by(owner: ShardOwner, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """From now on a ``.grad`` of any of ``parameters`` is this rank's shard, also one that a program sets."""
    for name, p in zip(names, parameters, strict=True):
        _reduced_by[p] = name, weakref.ref(owner)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Every ``.grad``, as a ``GradientShard`` where other ranks have more of it."""
    for p in parameters:
        name, known = _reduced_by.get(p, ("", None))
        owner = None if known is None else known()
        if owner is not None and p.grad is not None and not isinstance(p.grad, GradientShard):
            p.grad = gradient_shard(p.grad, name, owner, is_part=True)
    return [p.grad for p in parameters if p.grad is not None]


def owner_of(gradient: Tensor) -> ShardOwner | None:
    """Whose shard ``gradient`` is; None if it is whole."""
    is_part = isinstance(gradient, GradientShard) and gradient.instep_is_part
    return gradient.instep_owner() if is_part else None  # type: ignore[attr-defined]


def by_owner(gradients: Sequence[Tensor]) -> list[tuple[ShardOwner, list[Tensor]]]:
    """The shards among ``gradients``, with their owners, in the order of the first ones."""
    found: dict[int, tuple[ShardOwner, list[Tensor]]] = {}
    for x in gradients:
        if (owner := owner_of(x)) is not None:
            found.setdefault(id(owner), (owner, []))[1].append(x)
    return list(found.values())


def _unscale(
    func: Callable[..., None], gradients: Sequence[Tensor], found_inf: Tensor, scale: Tensor
) -> None:
    func(gradients, found_inf, scale)
    for owner, _ in by_owner(gradients):
        owner.all_found_inf(found_inf)
