"""The whole of a module and its optimizer: collected for a save, and put back from a checkpoint.

whole = collect(module, optimizer)
save(directory, model=whole.model, optimizer=whole.optimizer, extra={"optimizer": whole.rest}, ...)
restore(newest(directory), module, optimizer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import copy, load, state, tensors
from instep.checkpoint.load import Found
from instep.checkpoint.manifest import Json
from instep.checkpoint.moments import split
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE
from instep.errors import CheckpointRejected
from instep.ordered.hash import state_entries, state_sha256


@dataclass(frozen=True)
class Whole:
    """The live tensors of both, and what of the optimizer is no tensor (None without one)."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rest: Json


def collect(module: nn.Module, optimizer: Optimizer | None) -> Whole:
    """What a checkpoint of ``module`` and ``optimizer`` has to hold."""
    moments, rest = state.optimizer_state(module, optimizer) if optimizer else ({}, None)
    return Whole(state.model_tensors(module), moments, rest)


def hash_later(module: nn.Module, step: int) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], str]:
    """The hash of the whole state after ``step`` steps, as a function of copies of model and moments."""
    inner = state.unwrapped(module)
    own = [name for name, _ in state_entries(inner)]
    parameters = [name for name, _ in inner.named_parameters()]

    def digest(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> str:
        keys: dict[str, list[str]] = {}
        for full in sorted(optimizer):
            key, name = split(full)
            keys.setdefault(name, []).append(key)
        moments = [f"{key}/{name}" for name in parameters for key in keys.get(name, [])]
        entries = [(name, model[name]) for name in own] + [(full, optimizer[full]) for full in moments]
        return state_sha256(entries, step)

    return digest


def restore(found: Found, module: nn.Module, optimizer: Optimizer | None) -> None:
    """Load checkpoint ``found`` into ``module`` and, unless it is None, ``optimizer``, in place.

    Read are the files that its manifest vouches for. CheckpointRejected, and nothing has changed, if it is of
    another model or optimizer, or if all of it was read and does not have the hash that was saved.
    """
    own = state.model_tensors(module)
    firsts, ties = tensors.split_ties(own)
    model = load.read_tensors(found.path, MODEL_FILE, tensors.layout_of(firsts))
    moments, rest = _read_optimizer(found, module, optimizer) if optimizer is not None else ({}, None)
    if optimizer is not None or found.manifest.extra.get("optimizer") is None:
        _require_hash(found, module, {name: model[ties.get(name, name)] for name in own}, moments)
    description = copy.description_of(model, moments, rest, found.manifest.step)
    copy.restore(module, optimizer, description, [*model.values(), *moments.values()])


def _require_hash(
    found: Found, module: nn.Module, model: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    digest = hash_later(module, found.manifest.step)(model, moments)
    if digest != found.manifest.state_sha256:
        raise CheckpointRejected(
            f"{found.path}: expected a state of hash {found.manifest.state_sha256[:12]}..., got "
            f"{digest[:12]}... in its files: altered; take another checkpoint"
        )


def _read_optimizer(found: Found, module: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], Json]:
    rest = found.manifest.extra.get("optimizer")
    if rest is None:
        raise CheckpointRejected(
            f"{found.path}: expected the state of an optimizer, got none: load without an optimizer"
        )
    layout = load.layout(found.path, OPTIMIZER_FILE)
    state.require_fit(module, optimizer, rest, layout)
    return load.read_tensors(found.path, OPTIMIZER_FILE, layout), rest
