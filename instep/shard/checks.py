"""What parameters have to be like for their optimizer to be sharded, and to stay like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.mesh.group import Group
from instep.shard import claims
from instep.shard.kinds import is_elementwise


def require_new(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` unless each trainable one of ``parameters`` can get memory of its own."""
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError("a parameter is given twice: pass tied parameters once, as module.parameters() does")
    trainable = [p for p in parameters if p.requires_grad]
    claims.require_free(trainable)
    homeless = [p for p in trainable if claims.home(p) is None]
    for p in homeless:
        if p.layout != torch.strided or p.device.type == "meta":
            raise ValueError(
                f"expected parameters in memory, got {p.layout} on {p.device}: materialise the module first"
            )
    stretches = sorted(
        (p.device.type, p.data_ptr(), p.data_ptr() + _extent(p)) for p in homeless if p.numel()
    )
    for (device, _, end), (other, begin, _) in pairwise(stretches):
        if device == other and begin < end:
            raise ValueError(
                "two parameters share memory, and would not when they have moved: make them one Parameter, "
                "or give each its own values"
            )


def require_homes(parameters: Sequence[Tensor], optimizer_cls: type[Optimizer], group: Group) -> None:
    """Raise ``ValueError`` unless the spaces where ``parameters`` live already can be stepped as they are."""
    given = set(map(id, parameters))
    for space in claims.homes(parameters):
        if not is_elementwise(optimizer_cls):
            raise ValueError(
                f"{optimizer_cls.__name__} looks at whole parameters, and fully_shard has cut these: use an "
                "elementwise class such as torch.optim.AdamW, or leave fully_shard out"
            )
        if space.group.ranks != group.ranks:
            raise ValueError(
                f"the parameters are divided among ranks {list(space.group.ranks)}, and the optimizer is for "
                f"ranks {list(group.ranks)}: pass both the same process_group"
            )
        for name, p in zip(space.names, space.parameters, strict=True):
            if p.requires_grad and id(p) not in given:
                raise ValueError(
                    f"parameter {name!r} is missing: fully_shard has divided it together with others that "
                    "are given, so pass all of module.parameters() to one optimizer, or freeze it"
                )


def require_one_copy(parameters: Sequence[Tensor], group: Group) -> None:
    """Raise ``ValueError`` unless all ranks of ``group`` can have the same memory for ``parameters``."""
    if group.size == 1:
        return
    if group.backend != "shm":
        raise ValueError(
            f"one_copy=True needs ranks that share memory, and this group's backend is {group.backend!r}: "
            'run all ranks on one host and make the group with backend "shm", or leave one_copy out'
        )
    for p in parameters:
        home = claims.home(p)
        if p.requires_grad and home is not None and not home.one_copy:
            raise ValueError(
                "one_copy=True, but fully_shard has given each rank a copy: pass one_copy=True to it instead"
            )
        if p.requires_grad and p.device.type != "cpu":
            raise ValueError(
                f"one_copy=True is for parameters in CPU memory, got one on {p.device}: leave one_copy out"
            )


def _extent(p: Tensor) -> int:
    """Bytes from the first element in memory to the end of the last."""
    steps = ((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return (sum(steps) + 1) * p.itemsize


def require_usable(groups: Sequence[Mapping[str, Any]], trainable: set[int]) -> None:
    """Raise if a gradient cannot be stepped with; ``trainable`` are the identities of what can be.

    Raises:
        TypeError: it is sparse.
        ValueError: it is one of a parameter that was frozen.
    """
    for i, group in enumerate(groups):
        for k, p in enumerate(group["params"]):
            if id(p) not in trainable and (p.requires_grad or p.grad is not None):
                raise ValueError(
                    f"{_called(i, k, p)} was frozen when the ShardedOptimizer was made: unfreeze first, or "
                    "leave it out, and use add_param_group() when it is trainable"
                )
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(
                    f"{_called(i, k, p)} has a sparse gradient: make the embedding with sparse=False, or "
                    "give its parameters to a torch.optim.SparseAdam beside this optimizer"
                )


def moved(groups: Sequence[Mapping[str, Any]], parameter: Tensor) -> ValueError:
    """The error to raise because ``parameter`` is not where it was."""
    where = next(
        _called(i, k, p)
        for i, group in enumerate(groups)
        for k, p in enumerate(group["params"])
        if p is parameter
    )
    return ValueError(
        f"{where} has other memory than when the ShardedOptimizer was made (module.to(), .data = ..., "
        "another optimizer): convert first, then make the optimizer, and change values in place"
    )


def _called(group: int, position: int, p: Tensor) -> str:
    return f"parameter {position} of group {group}, shape {tuple(p.shape)},"
