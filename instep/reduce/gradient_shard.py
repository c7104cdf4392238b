"""The ``.grad`` of a parameter's shard: a real tensor, which knows that the other ranks have the rest.

Elementwise operations are what they are for any tensor. What looks at a whole gradient would use this rank's
part of it for all, and silently: torch's clipping would scale every rank by another factor, and a
``GradScaler`` would skip the step on the rank alone whose part overflowed. So a norm raises, and unscaling
asks all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from instep.reduce.owners import GradientPeers, owner_of

NORMS = frozenset({"_foreach_norm", "linalg_vector_norm", "linalg_norm", "vector_norm", "norm"})
ZEROS = frozenset({"zero_", "_foreach_zero_"})
DATA = torch._C.TensorBase.__dict__["data"]
PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__"})
# Their results are shards again: programs set them as ``.grad``, or take their norm. Not so ``clone``, with
# which optimizers make moments.
STAY_SHARDS = PRODUCTS | {"add", "clamp", "clip", "detach", "float", "nan_to_num", "neg", "sub"}
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class GradientShard(Tensor):
    """This rank's shard of the gradient of the parameter called ``instep_name``."""

    instep_name: str
    instep_peers: weakref.ref[GradientPeers]
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
                return gradient_shard(made, of.instep_name, of.instep_peers, is_part=of.instep_is_part)
        return made


def gradient_shard(
    values: Tensor, name: str, peers: weakref.ref[GradientPeers], *, is_part: bool
) -> GradientShard:
    """``values``, which stay where they are, as the gradient of this rank's shard of parameter ``name``."""
    x: GradientShard = Tensor._make_subclass(GradientShard, values)
    x.instep_name, x.instep_peers, x.instep_is_part = name, peers, is_part
    return x


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Every ``.grad``, as a ``GradientShard`` where other ranks have more of it, also if a program set it."""
    for p in parameters:
        if p.grad is None or isinstance(p.grad, GradientShard):
            continue
        owner = owner_of(p)
        peers = None if owner is None else owner.peers()
        if owner is not None and peers is not None and peers.cut:
            p.grad = gradient_shard(p.grad, owner.name, weakref.ref(peers), is_part=True)
    return [p.grad for p in parameters if p.grad is not None]


def peers_in(gradient: Tensor) -> GradientPeers | None:
    """Who knows the ranks that have more of ``gradient``; None if it is whole."""
    is_part = isinstance(gradient, GradientShard) and gradient.instep_is_part
    return gradient.instep_peers() if is_part else None  # type: ignore[attr-defined]


def _unscale(
    func: Callable[..., None], gradients: Sequence[Tensor], found_inf: Tensor, scale: Tensor
) -> None:
    func(gradients, found_inf, scale)
    for peers in dict.fromkeys(map(peers_in, gradients)):
        if peers is not None:
            peers.all_found_inf(found_inf)
