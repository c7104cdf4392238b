"""What ranks check before they shard an optimizer: its class, its parameters, and that all have the same.

Which classes. An elementwise optimizer computes each new element from the old one, its gradient and its
moments alone, so a rank can update any part of a parameter. Others look at a whole parameter (Adafactor's
factors are means over rows and columns, Muon makes a matrix orthogonal), and one that is not known here may:
each parameter has an owner. The same table says which plain optimizers can step what ``fully_shard`` has cut.

Which parameters. Two sharded optimizers would move each other's memory away, so each claims its parameters.
Claims are weak on both sides: one ends with the optimizer, or when it is closed.

That all have the same. A rank whose optimizer had its parameters in another order would write its new values
over those of other parameters, and one with another learning rate would use it for its slice alone; nothing
later could tell. So ranks compare parameter groups as lines of text before they make an optimizer.
"""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, SparseAdam

from instep.net.process_group import Group
from instep.reduce.owners import owner_of
from instep.shard.layout import Cost, newton_schulz
from instep.state import homes
from instep.state.alignment import sharing
from instep.state.boxes import BoxHome, is_cut
from instep.state.elementwise import ELEMENTWISE, rounds_by_cut

REFUSED: dict[type[Optimizer], str] = {
    LBFGS: "its step is made of dot products over all parameters and calls the closure again and again: use "
    "torch.optim.LBFGS itself on every rank, whose state is then not sharded",
    SparseAdam: "its gradients are lists of rows, which have no fixed owner: make the embeddings with "
    "sparse=False and use Adam, or give their parameters to a torch.optim.SparseAdam beside this optimizer",
}

SHARED = (
    "share memory, and sharding would separate them: make them one Parameter, or give each values of its own"
)
SEEN = "_instep_seen_state"  # an attribute of an optimizer: the state that was looked at last


def stepping_cost(optimizer_cls: object) -> Cost | None:
    """What to balance ranks by, for a class that needs whole parameters; None for an elementwise one."""
    if not isinstance(optimizer_cls, type) or optimizer_cls in ELEMENTWISE:
        return None
    return newton_schulz if issubclass(optimizer_cls, Muon) else math.prod


def require_shardable(optimizer_cls: object, options: Mapping[str, Any]) -> None:
    """Raise unless this can be made a sharded optimizer.

    Raises:
        TypeError: it is not a class of optimizers.
        ValueError: one of those that are refused, or an option that is.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(
            f"optimizer_cls: expected a class such as torch.optim.AdamW, got {optimizer_cls!r}: pass the "
            "class, and its options as keywords"
        )
    for refused, reason in REFUSED.items():
        if issubclass(optimizer_cls, refused):
            raise ValueError(f"{optimizer_cls.__name__} cannot be sharded: {reason}")
    if options.get("differentiable"):
        raise ValueError(
            "differentiable=True cannot be sharded: the new values come from other ranks, and autograd "
            "cannot follow them there"
        )


def require_given_eps(optimizer_cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` where Adafactor would take its eps from the first parameter that a rank steps."""
    for i, group in enumerate(groups):
        dtypes = sorted({str(p.dtype) for p in group["params"] if p.requires_grad})
        is_given = not issubclass(optimizer_cls, Adafactor) or group.get("eps", (None,))[0] is not None
        if len(dtypes) > 1 and not is_given:
            raise ValueError(
                f"group {i} has parameters of {' and '.join(dtypes)}, and Adafactor takes the eps that it is "
                "not given from the first one that a rank steps: pass eps=(..., ...), or make a group for "
                "each dtype"
            )


def why_not_on_shards(optimizer: Optimizer, num_ranks: int) -> str | None:
    """Why ``optimizer`` cannot step shards of parameters on ``num_ranks``; None if it can."""
    kind = type(optimizer)
    try:
        require_shardable(kind, optimizer.defaults)
    except ValueError as refused:
        return str(refused)
    if stepping_cost(kind) is not None:
        looks = "looks" if kind.__module__.startswith("torch.optim") else "may look"
        return (
            f"{kind.__name__} {looks} at whole parameters, and fully_shard has cut these: make it "
            f"instep.ShardedOptimizer(parameters, {kind.__name__}), which steps each whole on one rank"
        )
    if num_ranks > 1 and rounds_by_cut(optimizer.param_groups):
        return (
            "is of 2 bytes per element, which torch's loops on several threads round by how a tensor is cut: "
            "pass fused=True to the optimizer, or keep float32 weights, with "
            "fully_shard(compute_dtype=torch.bfloat16)"
        )
    return None


def describe_step(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Two numbers that differ if ranks make other steps: for the gradients that are used, for the options."""
    presence = bytes(p.grad is not None for group in groups for p in group["params"])
    return [zlib.crc32(presence), zlib.crc32("; ".join(map(options_text, groups)).encode())]


def guard_state(optimizer: Optimizer) -> None:
    """From now on ``optimizer.state_dict()`` raises: it would be this rank's part, and be taken for all.

    Raises:
        ValueError: moments were loaded that are not those of this rank's shards.
    """
    seen = optimizer.__dict__.get(SEEN)
    if seen is optimizer.state:
        return
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != p.shape:
                raise ValueError(
                    f"optimizer.load_state_dict() was given {key!r} of shape {tuple(value.shape)} for a "
                    f"shard of shape {tuple(p.shape)}: load with instep.load(dir, model=model, "
                    "optimizer=optimizer), which cuts what was saved for any number of ranks"
                )
    if seen is None:
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
    optimizer.__dict__[SEEN] = optimizer.state


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise RuntimeError(
        f"{type(optimizer).__name__}.state_dict() of sharded parameters has this rank's part alone: save "
        "with instep.save(dir, model=model, optimizer=optimizer), for any number of ranks, or step with "
        "instep.ShardedOptimizer, whose state_dict() is whole"
    )


def require_whole_layers(module: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter of ``module`` is in a pipeline, or cut along tp or ep."""
    for name, p in module.named_parameters():
        if (there := homes.home(p)) is not None and there.replicas is not None:
            where = "of a layer cut along tp or ep" if isinstance(there, BoxHome) else "in a pipeline"
            raise ValueError(
                f"parameter {name!r} is {where} already, and fully_shard would divide it again: leave "
                "fully_shard out, and divide the optimizer's state with instep.ShardedOptimizer"
            )


def require_plain(name: str, p: Tensor) -> None:
    """Raise ``ValueError`` unless the parameter called ``name`` can be cut."""
    problem = None
    if type(p) is not nn.Parameter:
        problem = f"is a {type(p).__name__}: make it an nn.Parameter"
    elif p.layout != torch.strided or not homes.in_order(p.shape, homes.dense_strides(p)):
        problem = "is not contiguous in memory (channels_last, transposed): make it so with .contiguous()"
    elif p._backward_hooks or p._post_accumulate_grad_hooks:
        problem = "has a hook, which its shard would never call: edit gradients after backward instead"
    if problem is not None:
        raise ValueError(f"parameter {name!r} cannot be sharded: it {problem}, or use DataParallel")


def require_new(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` unless each trainable one of ``parameters`` can get memory of its own."""
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError("a parameter is given twice: pass tied parameters once, as module.parameters() does")
    trainable = [p for p in parameters if p.requires_grad]
    if any(map(claimant, trainable)):
        gc.collect()  # one that is part of a cycle, with its scheduler for instance, is gone only then
    for i, p in enumerate(trainable):
        if claimant(p) is not None:
            raise ValueError(
                f"trainable parameter {i}, shape {tuple(p.shape)}, belongs to another ShardedOptimizer: give "
                "each parameter to one, or close() the other first"
            )
    homeless = [p for p in trainable if homes.home(p) is None]
    if any(p.is_meta for p in homeless):
        raise ValueError("expected parameters in memory, got one on meta: materialise the module first")
    for p in trainable:
        shape, there = homes.shape_of(p), homes.home(p)
        strides = homes.dense_strides(p) if there is None else there.strides_of(p)
        if not homes.in_order(shape, strides):
            raise ValueError(
                f"a parameter of shape {tuple(shape)} is not contiguous in memory (channels_last, "
                "transposed), and would be cut across its order: make it so with .contiguous(), or use the "
                "optimizer itself, unsharded"
            )
    if any(len(group) > 1 for group in sharing(homeless)):
        raise ValueError(f"two parameters {SHARED}")


def require_apart(module: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter shares memory with another one, or with a buffer, of ``module``."""
    name_of = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    parameters = {id(p): p for p in module.parameters()}
    for group in sharing([*parameters.values(), *module.buffers()]):
        if len(group) > 1 and not parameters.keys().isdisjoint(map(id, group)):
            raise ValueError(f"{' and '.join(repr(name_of[id(x)]) for x in group)} {SHARED}")


def require_homes(parameters: Sequence[Tensor], group: Group, cost: Cost | None) -> None:
    """Raise ``ValueError`` unless ``group`` can step ``parameters`` where they live already.

    ``cost`` is that of an optimizer which needs whole parameters.
    """
    if cost is not None and any(map(is_cut, parameters)):
        raise ValueError(
            "the optimizer looks at whole parameters, and those of layers cut along tp or ep are parts: use "
            "an elementwise one, such as torch.optim.AdamW"
        )
    for space in homes.homes(parameters):
        if space.replicas is not None:
            if not set(group.ranks) <= set(space.replicas.data.ranks):
                raise ValueError(
                    f"each rank of a pipeline has layers of its own, ranks {list(space.replicas.data.ranks)} "
                    f"have the same ones, and the optimizer is for ranks {list(group.ranks)}: pass the mesh "
                    "of the pipeline as process_group"
                )
        elif space.group.ranks != group.ranks:
            raise ValueError(
                f"the parameters are divided among ranks {list(space.group.ranks)}, and the optimizer is for "
                f"ranks {list(group.ranks)}: pass both the same process_group"
            )


def require_usable(
    groups: Sequence[Mapping[str, Any]], owned: Mapping[Tensor, tuple[int, torch.Size] | None]
) -> None:
    """Raise if the parameters of ``groups`` cannot be stepped.

    ``owned``: those that can be, with address and shape where they are in flat memory.

    Raises:
        TypeError: a gradient is sparse.
        ValueError: a parameter was frozen and has a gradient, or other code has replaced its memory.
    """
    for i, group in enumerate(groups):
        for k, p in enumerate(group["params"]):
            gradient, place = p.grad, owned.get(p)
            if p not in owned and (p.requires_grad or gradient is not None):
                raise ValueError(
                    f"{_called(i, k, p)} was frozen when the ShardedOptimizer was made: unfreeze first, or "
                    "leave it out, and use add_param_group() when it is trainable"
                )
            if gradient is not None and gradient.layout != torch.strided:
                raise TypeError(
                    f"{_called(i, k, p)} has a sparse gradient: make the embedding with sparse=False, or "
                    "give its parameters to a torch.optim.SparseAdam beside this optimizer"
                )
            if place is not None and place != (p.data_ptr(), p.shape):
                raise ValueError(
                    f"{_called(i, k, p)} has other memory than when the ShardedOptimizer was made "
                    "(module.to(), .data = ..., vector_to_parameters, another optimizer): convert first, "
                    "then make the optimizer, and change values in place, p.copy_(values) under no_grad()"
                )


def _called(group: int, position: int, p: Tensor) -> str:
    return f"parameter {position} of group {group}, shape {tuple(p.shape)},"


def claimant(parameter: Tensor) -> Optimizer | None:
    """The sharded optimizer, which is not closed, that has ``parameter``."""
    owner = owner_of(parameter)
    return None if owner is None else owner.optimizer()


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameter groups as lines."""
    lines = []
    for i, group in enumerate(groups):
        lines.append(f"parameter group {i}: {options_text(group)}")
        names = group.get("param_names") or [""] * len(group["params"])
        for k, (name, p) in enumerate(zip(names, group["params"], strict=True)):
            called = f" {name!r}" if name else ""
            kind = "trainable" if p.requires_grad else "frozen"
            where = "in order" if homes.home(p) is None else "divided among ranks"
            dtype = str(p.dtype).removeprefix("torch.")
            lines.append(
                f"parameter {k} of group {i}{called}: shape {tuple(homes.shape_of(p))}, {dtype}, "
                f"{p.device.type}, {where}, {kind}"
            )
    return lines


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is said in a parameter group but which parameters it has."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def options_text(options: Mapping[str, Any]) -> str:
    """All options but the parameters, the same text for the same values."""
    own = group_options(options)
    return ", ".join(f"{key}={_plain(own[key])}" for key in sorted(own))


def _plain(value: object) -> str:
    if isinstance(value, Tensor):  # one on an accelerator would have to be waited for
        return repr(value.tolist()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)
    return f"a {type(value).__name__}"  # whose repr may have an address in it
