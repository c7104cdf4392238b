"""A module and its optimizer as named tensors and JSON, and back.

torch numbers an optimizer's parameters in the order of its groups, so a state saved by index goes to the
wrong parameters, without an error, after layers changed places. Here everything goes by the parameter's name:

    tensors   "exp_avg/block.0.weight", and "param_groups.0/lr" where a hyper-parameter is a tensor
    JSON      {"class": "AdamW", "groups": [{"parameters": [...], "options": {"lr": 0.001, ...}}],
               "scalars": {"key/block.0.weight": ...}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import moments
from instep.checkpoint.manifest import Json
from instep.checkpoint.tensors import Layout, layout_of
from instep.errors import CheckpointRejected

MAX_NUMBER = 2**1023  # an integer of JSON can be longer than a float


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a data-parallel wrapper: ``model.module`` if it holds all of ``model``'s tensors."""
    inner = getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        return model
    return inner if _identities(inner) == _identities(model) else model


def _identities(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unwrapped module; TypeError if it holds anything but tensors."""
    state = unwrapped(model).state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}: expected a tensor in the state dict, got {type(value).__name__}: pass it as extra"
            )
    return dict(state)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], Json]:
    """The optimizer's tensors by name, and the rest of it as JSON."""
    names = _parameter_names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Json] = {}
    for parameter, name in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            (tensors if isinstance(value, Tensor) else scalars)[f"{_plain(key)}/{name}"] = value
    for index, group in enumerate(optimizer.param_groups):
        tensors |= {_option(index, key): v for key, v in group.items() if isinstance(v, Tensor)}
    groups = optimizer_groups(model, optimizer)
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def optimizer_groups(model: nn.Module, optimizer: Optimizer) -> list[Json]:
    """The groups with their parameters' names and all options that are no tensors."""
    names = _parameter_names(model, optimizer)
    return [
        {
            "parameters": [names[p] for p in group["params"]],
            "options": {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)},
        }
        for group in optimizer.param_groups
    ]


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The name of each parameter of the optimizer, in the optimizer's order."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(model).named_parameters()}
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in owned:
        if parameter not in names:
            raise ValueError(
                f"expected an optimizer of this model's parameters, got one of shape {list(parameter.shape)} "
                "that the model does not have: pass the model that the optimizer was made for"
            )
    return {parameter: names[parameter] for parameter in owned}


def _plain(key: str) -> str:
    if "/" in key:
        raise ValueError(f"expected a name of optimizer state without a slash, got {key!r}")
    return key


def _option(index: int, key: str) -> str:
    return f"param_groups.{index}/{key}"


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], rest: Json
) -> None:
    """Give ``optimizer`` the state that :func:`optimizer_state` returned; nothing changes if it does not fit.

    Hyper-parameters come from the checkpoint too, as in ``Optimizer.load_state_dict``; state keeps the dtype
    it was saved in, where torch would cast it to that of the parameter.
    """
    names = _parameter_names(model, optimizer)
    require_fit(model, optimizer, rest, layout_of(tensors))
    state: dict[str, dict[str, Json]] = {}
    for full, value in (*rest["scalars"].items(), *tensors.items()):
        key, name = moments.split(full)
        state.setdefault(name, {})[key] = value
    groups = list(saved_groups(optimizer, tensors, rest))
    indices = {name: index for index, name in enumerate(names.values())}
    by_index = {indices[name]: entries for name, entries in state.items() if name in indices}
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})
    for parameter, name in names.items():
        keep_dtypes(optimizer.state.get(parameter, {}), state.get(name, {}))


def require_fit(
    model: nn.Module, optimizer: Optimizer, rest: Json, layout: Layout, local: Optimizer | None = None
) -> None:
    """CheckpointRejected unless ``optimizer`` has the saved class, groups, parameter names, kinds of options.

    ``layout`` is that of the saved tensors: their shapes must be those of this optimizer's moments. ``local``
    is what keeps the moments of a sharded ``optimizer``.
    """
    local = local or optimizer
    names = _parameter_names(model, optimizer)
    if not _is_saved_optimizer(rest):
        raise CheckpointRejected(
            "expected class, groups and scalars of an optimizer: take another checkpoint"
        )
    if type(local).__name__ != rest["class"]:
        raise CheckpointRejected(
            f"expected the optimizer of the checkpoint, {rest['class']}, got {type(local).__name__}: "
            "build that one, or load without an optimizer"
        )
    saved = [set(group["parameters"]) for group in rest["groups"]]
    now = [{names[p] for p in group["params"]} for group in optimizer.param_groups]
    if len(saved) != len(now):
        raise CheckpointRejected(
            f"expected {len(saved)} parameter groups, got {len(now)}: build the saved ones"
        )
    for index, (before, after) in enumerate(zip(saved, now, strict=True)):
        if before != after:
            first = min(before ^ after)
            side = "the checkpoint" if first in before else "this optimizer"
            raise CheckpointRejected(
                f"parameter group {index}: expected {len(before)} parameters, got {len(after)}: only {side} "
                f"has {first!r}: build the groups that the checkpoint was made with"
            )
        _require_options(index, optimizer.param_groups[index], rest["groups"][index]["options"])
    parameters = {name: parameter for parameter, name in names.items()}
    moments.require_sound(local, parameters, layout, rest["scalars"], len(now))


def _require_options(index: int, current: Mapping[str, object], saved: Mapping[str, Json]) -> None:
    """Options that are set now must have been of their kind; those a scheduler adds may be any."""
    for key, value in saved.items():
        if key in current and not _same_kind(current[key], value):
            raise CheckpointRejected(
                f"parameter group {index}: {key}: expected something like {current[key]!r}, got "
                f"{repr(value)[:80]}: not a state of this optimizer"
            )


def _same_kind(current: object, saved: Json) -> bool:
    if isinstance(current, tuple):
        pairs = isinstance(saved, list | tuple) and len(saved) == len(current)
        return pairs and all(map(_same_kind, current, saved))
    if isinstance(current, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(current, int | float | Tensor):
        return isinstance(saved, int | float) and abs(saved) <= MAX_NUMBER
    if current is None:  # a flag or a number that is left to torch
        return saved is None or isinstance(saved, int | float)
    return isinstance(saved, type(current))


def _is_saved_optimizer(rest: Json) -> bool:
    kinds = {"class": str, "groups": list, "scalars": dict}
    if not isinstance(rest, dict) or {key: type(value) for key, value in rest.items()} != kinds:
        return False
    return all(
        isinstance(group, dict)
        and {key: type(value) for key, value in group.items()} == {"parameters": list, "options": dict}
        and all(isinstance(name, str) for name in group["parameters"])
        for group in rest["groups"]
    )


def saved_groups(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], rest: Json
) -> Iterator[dict[str, Json]]:
    """The saved groups in the form that ``load_state_dict`` reads, over this optimizer's parameters."""
    first = 0
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, rest["groups"], strict=True)):
        options = {key: _like(group.get(key), value) for key, value in saved["options"].items()}
        prefix = _option(index, "")
        options |= {full.removeprefix(prefix): t for full, t in tensors.items() if full.startswith(prefix)}
        count = len(group["params"])
        yield {**group, **options, "params": list(range(first, first + count))}
        first += count


def _like(current: object, saved: Json) -> Json:
    """JSON knows lists only; a tuple, as ``betas`` is one, becomes a tuple again."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved


def keep_dtypes(state: dict[str, Json], saved: Mapping[str, Json]) -> None:
    """Moments of ``state`` get the dtype that they have in ``saved``."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and state[key].dtype != value.dtype:
            state[key] = value.to(state[key].device)
