"""What an optimizer keeps for a parameter, and the shapes it must have.

A fused kernel asks only the parameter for its size: a moment of fewer elements lets it read and write beyond
them, and the process dies or, worse, does not. torch loads such a state without a word. So the shapes of
what comes from a file or from another rank are checked first, for all optimizers that torch brings along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import ASGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from instep.checkpoint.manifest import Json
from instep.checkpoint.tensors import Layout, Shape
from instep.errors import CheckpointRejected
from instep.state.homes import shape_of

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


def require_sound(
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
