"""What optimizers keep, by the names of their parameters, and the shapes it must have.

A fused kernel asks only the parameter for its size: a moment of fewer elements lets it read and write beyond
them, and the process dies or, worse, does not. torch loads such a state without a word. So the shapes of
what comes from a file or from another rank are checked first, for all optimizers that torch brings along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import ASGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from instep.checkpoint.manifest import Json
from instep.checkpoint.tensors import Layout, Shape
from instep.errors import CheckpointRejected
from instep.state.homes import DividedOptimizer, shape_of

# What the first step makes, whatever the options are; later steps take it for granted.
NEEDED: dict[type[Optimizer], frozenset[str]] = {
    Adam: frozenset({"step", "exp_avg", "exp_avg_sq"}),  # AdamW is one
    NAdam: frozenset({"step", "mu_product", "exp_avg", "exp_avg_sq"}),
    RAdam: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    Adamax: frozenset({"step", "exp_avg", "exp_inf"}),
    Adadelta: frozenset({"step", "square_avg", "acc_delta"}),
    Adagrad: frozenset({"step", "sum"}),
    RMSprop: frozenset({"step", "square_avg"}),
    Rprop: frozenset({"step", "prev", "step_size"}),
    ASGD: frozenset({"step", "eta", "mu", "ax"}),
}
ONE_NUMBER = frozenset({"step", "eta", "mu", "mu_product"})
OPTIONS = "param_groups."  # of groups, where they are tensors
NO_OPTIMIZER = "none"  # in the place of its class
FORM = {"class": str, "groups": list, "scalars": dict, "objects": dict, "declared_steps": dict}
MAX_NUMBER = 2**1023  # an integer of JSON can be longer than a float
FACTORS = frozenset({"row_var", "col_var"})  # of Adafactor: a mean over one dimension


def split(full: str) -> tuple[str, str]:
    """``"exp_avg/block.0.weight"`` -> its key and its name; CheckpointRejected for another form."""
    key, slash, name = full.partition("/")
    if not slash:
        raise CheckpointRejected(f"expected a moment called key/parameter, got {full[:80]!r}")
    return key, name


def keep_dtypes(state: dict[str, Json], saved: Mapping[str, Json]) -> None:
    """Moments of ``state`` get the dtype that they have in ``saved``."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and state[key].dtype != value.dtype:
            state[key] = value.to(state[key].device)


def require_saved(
    steps: DividedOptimizer,
    groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, Tensor],
    names: Mapping[int, str],
    options: Json,
    layout: Layout,
) -> None:
    """CheckpointRejected unless the optimizers have the saved classes, groups, parameter names, kinds of
    options, and moments of these shapes.

    ``names`` are those of the ``parameters``, by identity.
    """
    if options["class"] == NO_OPTIMIZER:
        raise CheckpointRejected("the saved state has no optimizer: load without optimizer=...")
    if classes(steps) != options["class"]:
        raise CheckpointRejected(
            f"expected the optimizer of the checkpoint, {options['class'][:80]}, got {classes(steps)}: build "
            "that one, or load without an optimizer"
        )
    saved = [set(group["parameters"]) for group in options["groups"]]
    now = [{names[id(p)] for p in group["params"]} for group in groups]
    if len(saved) != len(now):
        raise CheckpointRejected(
            f"expected {len(saved)} parameter groups, got {len(now)}: build the saved ones"
        )
    for index, (before, after) in enumerate(zip(saved, now, strict=True)):
        if before != after:
            first = min(before ^ after)
            side = "the checkpoint" if first in before else "this optimizer"
            raise CheckpointRejected(
                f"parameter group {index}: expected {len(before)} parameters, got {len(after)}: only "
                f"{side} has {first!r}: build the groups that the checkpoint was made with"
            )
        _require_options(index, groups[index], options["groups"][index]["options"])
    by_group = [local for local in steps.locals for _ in local.param_groups]
    _require_sound(by_group, now, parameters, layout, options["scalars"])


def group_to_json(group: Mapping[str, Any], names: Mapping[int, str]) -> Json:
    """The names of the parameters of ``group``, and all options that are no tensors."""
    return {
        "parameters": [names[id(p)] for p in group["params"]],
        "options": {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)},
    }


def _require_sound(
    optimizers: Sequence[Optimizer],
    groups: Sequence[Iterable[str]],
    parameters: Mapping[str, Tensor],
    layout: Layout,
    scalars: Mapping[str, Json],
) -> None:
    """CheckpointRejected unless ``layout`` can be that of the state of ``optimizers``, each of which steps
    the group of ``parameters`` at its place in ``groups``.

    ``layout`` and ``scalars`` go by ``key/name of the parameter``, options of a group by
    ``param_groups.<index>/key``. Optimizers from elsewhere may keep any shape for a parameter.
    """
    by_option = {f"param_groups.{index}": optimizer for index, optimizer in enumerate(optimizers)}
    by_name = {name: optimizer for names, optimizer in zip(groups, optimizers, strict=True) for name in names}
    keys: dict[str, set[str]] = {}
    for full in (*layout, *scalars):
        key, name = split(full)
        if key in by_option:
            if full in layout and _is_of_torch(by_option[key]):
                _require_one_number(full, layout[full][0])
            continue
        if name not in by_name:
            raise CheckpointRejected(
                f"{key[:80]}: expected a moment of a parameter of this optimizer, got one of {name[:80]!r}"
            )
        keys.setdefault(name, set())
        if full in layout:
            keys[name].add(key)
        if _is_of_torch(by_name[name]):
            if full in layout:
                _require_shape(full, key, layout[full][0], tuple(shape_of(parameters[name])))
            else:
                _require_scalar(full, key, scalars[full])
    for name, held in keys.items():
        _require_complete(by_name[name], name, held)


def _is_of_torch(optimizer: Optimizer) -> bool:
    return any(
        base is not Optimizer and base.__module__.startswith("torch.optim") for base in _kinds(optimizer)
    )


def _kinds(optimizer: Optimizer) -> tuple[type, ...]:
    return type(optimizer).__mro__


def _require_shape(full: str, key: str, shape: Shape, parameter: Shape) -> None:
    if key in ONE_NUMBER:
        return _require_one_number(full, shape)
    fits = shape == parameter
    if key in FACTORS:
        fits = len(shape) == len(parameter) and all(map(_is_factor, shape, parameter))
    if not fits:
        raise CheckpointRejected(
            f"{full}: expected the shape {list(parameter)} of its parameter, got {list(shape)}: "
            "not a state of this optimizer"
        )


def _is_factor(size: int, parameter: int) -> bool:
    return size in (1, parameter)


def _require_one_number(full: str, shape: Shape) -> None:
    if any(size != 1 for size in shape):
        raise CheckpointRejected(
            f"{full}: expected one number, got {list(shape)}: not a state of this optimizer"
        )


def _require_scalar(full: str, key: str, value: Json) -> None:
    if value is not None and (key not in ONE_NUMBER or not isinstance(value, int | float)):
        raise CheckpointRejected(
            f"{full}: expected a tensor, got {repr(value)[:80]}: not a state of this optimizer"
        )


def _require_complete(optimizer: Optimizer, name: str, held: set[str]) -> None:
    needed = next((NEEDED[kind] for kind in _kinds(optimizer) if kind in NEEDED), frozenset())
    if not needed <= held:
        raise CheckpointRejected(
            f"{name}: expected the moments {', '.join(sorted(needed))}, got "
            f"{', '.join(sorted(held)) or 'none'}: not a state of this optimizer"
        )


def require_by_parameter(optimizer: Optimizer) -> None:
    """ValueError if it keeps something that belongs to no parameter, which nothing here would carry."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    other: Any = next((key for key in optimizer.state if id(key) not in known), None)
    if other is None and type(optimizer).state_dict is not Optimizer.state_dict:
        other = next((key for key in optimizer.state_dict() if key not in ("state", "param_groups")), None)
    if other is not None:
        what = f"a tensor of shape {list(other.shape)}" if isinstance(other, Tensor) else repr(other)
        raise ValueError(
            f"{type(optimizer).__name__} keeps state under {what}, which is none of its parameters, and "
            "would be lost: keep it in a parameter's state, or in an object of its own with state_dict() and "
            "load_state_dict(), and save that too"
        )


def plain(key: str) -> str:
    if "/" in key:
        raise ValueError(f"expected a name of optimizer state without a slash, got {key!r}")
    return key


def option(index: int, key: str) -> str:
    return f"param_groups.{index}/{key}"


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


def classes(steps: DividedOptimizer) -> str:
    """The class of each optimizer, in the order of the groups."""
    return ", ".join(type(local).__name__ for local in steps.locals) or NO_OPTIMIZER


def require_form(options: Json) -> None:
    """CheckpointRejected unless ``options`` have the form that ``TrainingState.options`` gives them."""
    sound = isinstance(options, dict) and {key: type(x) for key, x in options.items()} == FORM
    sound = sound and all(
        isinstance(group, dict)
        and {key: type(value) for key, value in group.items()} == {"parameters": list, "options": dict}
        and all(isinstance(name, str) for name in group["parameters"])
        for group in options["groups"]
    )
    counts = options["declared_steps"].values() if sound else ()
    if not sound or not all(type(count) is int and 0 <= count < 2**62 for count in counts):
        raise CheckpointRejected(
            f"expected {', '.join(FORM)} of a saved state, got {repr(options)[:80]}: take another checkpoint"
        )


def saved_groups(
    groups: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], options: Json
) -> Iterator[dict[str, Json]]:
    """The saved groups in the form that ``load_state_dict`` reads, over the parameters of ``groups``."""
    first = 0
    for index, (group, saved) in enumerate(zip(groups, options["groups"], strict=True)):
        found = {key: _like(group.get(key), value) for key, value in saved["options"].items()}
        prefix = option(index, "")
        found |= {full.removeprefix(prefix): t for full, t in tensors.items() if full.startswith(prefix)}
        count = len(group["params"])
        yield {**group, **found, "params": list(range(first, first + count))}
        first += count


def _like(current: object, saved: Json) -> Json:
    """JSON knows lists only; a tuple, as ``betas`` is one, becomes a tuple again."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved
