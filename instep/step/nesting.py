"""A module is wrapped once: what finds another wrapper around it, or inside of it.

Two wrappers exchange the same gradients, each out of ``.grad`` and back into it, while the other one does.
With torch's DDP and ``gradient_as_bucket_view`` the weights are wrong; without it they are right by luck, to
rounding, and where the outer one only accumulates (``no_sync``), the inner one goes on exchanging. Frameworks
do it unasked: accelerate's ``prepare`` puts torch's DDP around each model that it is given, and so does the
Trainer of transformers.

    inside     construction looks (``require_unwrapped``)
    around     torch's wrappers come to the module themselves, and meet ``WrappedOnce``: DDP asks it for what
               to leave out, and FSDP, in both forms, marks each module that it takes over
    further    torch's DDP around a module with a wrapper somewhere in it: the first forward notices
    out        (``require_outermost``)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DDP, FSDP = "torch's DistributedDataParallel", "torch's FSDP"


class WrappedOnce:
    """What exchanges gradients, so that nothing else that does may be put around it.

    ``is_outermost``: nor may what instep has.
    """

    is_outermost: ClassVar[bool] = False

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Iterator[str]:
        """torch's DDP goes through these names first of all."""
        raise _around(DDP, f"instep's {type(self).__name__}")
        yield  # not before it is asked for the first name: who only looks at attributes gets no error

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        raise _around(FSDP, f"instep's {type(self).__name__}")


def require_unwrapped(module: nn.Module) -> None:
    """Raise ``ValueError`` if torch, or a pipeline, has wrapped ``module``, or a part of it that is trained.

    Other parts that instep has wrapped are refused elsewhere (``optimizer_guard.require_unowned``).
    """
    for name, part in module.named_modules():
        wrapper = _wrapper(part)
        if wrapper is not None and any(p.requires_grad for p in part.parameters()):
            where = f"part {name!r} of the module" if name else "the module"
            raise ValueError(
                f"{where} is wrapped in {wrapper} already, and both would exchange its gradients: wrap the "
                "module itself (what its wrapper calls .module), once, with all that it contains"
            )


def require_outermost(parameters: Iterable[Tensor]) -> None:
    """Raise ``ValueError`` inside a forward of torch's DDP that exchanges gradients of ``parameters`` too."""
    outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if outer is not None:
        theirs = set(map(id, outer._module_parameters))
        if not theirs.isdisjoint(map(id, parameters)):
            raise _around(DDP, "a model of which instep has wrapped a part")


def _wrapper(part: nn.Module) -> str | None:
    if isinstance(part, DistributedDataParallel):
        return DDP
    if isinstance(part, WrappedOnce) and part.is_outermost:
        return f"instep's {type(part).__name__}"
    return FSDP if getattr(part, "_is_fsdp_managed_module", False) else None


def _around(outer: str, inner: str) -> ValueError:
    return ValueError(
        f"{outer} was put around {inner}, and both would exchange the same gradients: use one of the two. "
        "accelerate's prepare() and the Trainer of transformers do it to each model that they are given: "
        'leave the model out of prepare(), as in "accelerate and transformers" of docs/use.md'
    )
