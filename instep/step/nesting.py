"""Modules that cannot be wrapped, and wrappers around wrappers.

Two wrappers exchange the same gradients, each out of ``.grad`` and back into it while the other one does.
With torch's DDP and ``gradient_as_bucket_view`` the weights are wrong; without it they are right by luck.
Frameworks do it unasked: accelerate's ``prepare`` puts torch's DDP around each model that it is given, and so
does the Trainer of transformers.

    inside     construction looks (``require_supported``), and ``optimizer_guard`` for instep's own wrappers
    around     torch's wrappers ask the module: DDP for the names to leave out, and FSDP, in both forms, marks
               each module that it takes over: ``WrappedOnce`` answers
    further    torch's DDP around a module with a wrapper somewhere in it: the first forward notices
    out        (``require_outermost``)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instep.rng.attributes import own_attributes
from instep.step.optimizer_guard import owners_of

WIDTH = 1000  # elements looked at in a container, which may be a data set
DDP, FSDP = "torch's DistributedDataParallel", "torch's FSDP"


class WrappedOnce:
    """Exchanges gradients: nothing else that does may be put around it; nor instep's, if ``is_outermost``."""

    is_outermost: ClassVar[bool] = False

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Iterator[str]:
        """torch's DDP goes through these names first of all."""
        raise _around(DDP, f"instep's {type(self).__name__}")
        yield  # so that reading the attribute raises nothing

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        raise _around(FSDP, f"instep's {type(self).__name__}")


def require_supported(module: nn.Module) -> None:
    """Raise ``ValueError`` if ``module`` cannot be put into a wrapper, which calls it ``module``."""
    require_reducible(module)
    if "module" in module._modules:
        raise ValueError(
            "the module has a part called 'module', as the wrapper calls the module itself, so that "
            "'module.weight' would mean two things: give the part another name"
        )


def require_reducible(module: nn.Module) -> None:
    """Raise ``ValueError`` if ``module`` has a part whose gradients cannot be exchanged, or are already."""
    for name, part in module.named_modules():
        wrapper = _wrapper(part)
        if wrapper is not None and any(p.requires_grad for p in part.parameters()):
            where = f"part {name!r} of the module" if name else "the module"
            raise ValueError(
                f"{where} is wrapped in {wrapper} already, and both would exchange its gradients: wrap the "
                "module itself (what its wrapper calls .module), once, with all that it contains"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{name!r} is a TorchScript module, which takes no hooks: wrap the Python module, and use "
                "torch.compile"
            )
        is_embedding = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and part.sparse and part.weight.requires_grad:
            raise ValueError(f"{name!r} has sparse gradients: make it with sparse=False")
    registered = {id(p) for p in module.parameters()}
    for name, key, value in own_attributes(module.named_modules()):
        if any(id(x) not in registered and not owners_of([x]) for x in _trainable(value)):
            raise ValueError(
                f"{f'{name}.{key}'.lstrip('.')!r} holds trainable weights that are no parameters of the "
                "module, so that their gradients would stay on this rank: register them (nn.ParameterList, "
                "nn.ModuleList), freeze them (requires_grad_(False)), or wrap them first"
            )


def require_outermost(parameters: Iterable[Tensor]) -> None:
    """In a forward of torch's DDP: raise ``ValueError`` if it exchanges gradients of ``parameters`` too."""
    outer: Any = DistributedDataParallel._active_ddp_module
    if not set(map(id, outer._module_parameters)).isdisjoint(map(id, parameters)):
        raise _around(DDP, "a model of which instep has wrapped a part")


def _trainable(value: Any) -> Iterator[Tensor]:
    """The trainable leaves of autograd that an attribute is, or holds in a list, tuple or dict."""
    held = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    )
    for x in islice(held, WIDTH):
        tensors = x.parameters() if isinstance(x, nn.Module) else [x]
        yield from (t for t in tensors if isinstance(t, Tensor) and t.is_leaf and t.requires_grad)


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
        "leave the model out of prepare(), as in docs/huggingface.md"
    )
