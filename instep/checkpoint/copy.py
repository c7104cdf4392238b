"""A whole training state as a list of tensors and a description, to be held in memory and put back.

A checkpoint on disk is found by name; a copy in memory, or on its way to another rank, is flat bytes and
somebody else's word for what they mean. So the two travel apart:

    description   {"step": 12, "layout": [["model:weight", [4, 3], "float32"], ...], "rest": {...}}   JSON
    tensors       in the order of the layout: the state dict's, ties once, then the optimizer's moments

``tensors`` are the live ones, to copy from. ``prepare`` (or ``views``, in memory that exists) makes the place
for a copy from its description alone, ``restore`` puts a copy into a module and an optimizer. A description
is believed only as far as it fits them: whoever sent it may have been hit in the middle of a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep import memory
from instep.checkpoint import state
from instep.checkpoint import tensors as files
from instep.checkpoint.manifest import Json, require_json
from instep.checkpoint.tensors import ALIGN_BYTES
from instep.errors import CheckpointRejected

Layout: TypeAlias = list[tuple[str, tuple[int, ...], torch.dtype]]

MODEL, OPTIMIZER = "model:", "optimizer:"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in files.DTYPES.values()}


def describe(module: nn.Module, optimizer: Optimizer | None, step: int) -> Json:
    """What :func:`tensors` are, and all of the state that is no tensor: see :func:`capture`."""
    return capture(module, optimizer, step)[0]


def capture(module: nn.Module, optimizer: Optimizer | None, step: int) -> tuple[Json, list[Tensor]]:
    """A description, ready for JSON, and the live tensors that it describes, detached: sources, not targets.

    ``step``: optimizer steps done. Moments that the optimizer has not made yet are not in it. ValueError if
    the optimizer holds what JSON cannot carry, or a tensor of a dtype that cannot be saved.
    """
    model, moments, rest = _parts(module, optimizer)
    live = [*model.values(), *(tensor.detach() for tensor in moments.values())]
    return description_of(model, moments, rest, step), live


def description_of(model: Mapping[str, Tensor], moments: Mapping[str, Tensor], rest: Json, step: int) -> Json:
    """The description of a state in dictionaries; its tensors are their values, one after the other."""
    named = {MODEL + name: tensor for name, tensor in model.items()}
    named |= {OPTIMIZER + name: tensor for name, tensor in moments.items()}
    layout = [[name, list(tensor.shape), _dtype_name(name, tensor)] for name, tensor in named.items()]
    require_json("optimizer", rest)
    return {"step": step, "layout": layout, "rest": rest}


def tensors(module: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """The live tensors, detached, in the order of ``describe(...)["layout"]``: see :func:`capture`."""
    return capture(module, optimizer, 0)[1]


def _parts(
    module: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Json]:
    firsts, _ = files.split_ties(state.model_tensors(module))
    return firsts, *(state.optimizer_state(module, optimizer) if optimizer else ({}, None))


def _dtype_name(name: str, tensor: Tensor) -> str:
    short = str(tensor.dtype).removeprefix("torch.")
    if short not in DTYPES:
        raise ValueError(f"{name}: expected a dtype among {', '.join(DTYPES)}, got {short}")
    return short


def nbytes(description: Json) -> int:
    """Bytes of memory that :func:`views` needs: each tensor begins at a multiple of 64."""
    return files.room((shape, dtype) for _, shape, dtype in _parse(description))


def prepare(description: Json, *, limit_bytes: int) -> list[Tensor]:
    """CPU memory for the tensors of ``description``, in its order, not initialised.

    CheckpointRejected, before anything is allocated, if they need more than ``limit_bytes``.
    """
    total = nbytes(description)
    _require(total <= limit_bytes, "layout", f"at most {limit_bytes} bytes", total)
    return views(description, memory.allocate(total, ALIGN_BYTES).tensor)


def views(description: Json, segment: Tensor) -> list[Tensor]:
    """The tensors of ``description`` inside ``segment``: flat uint8, at least :func:`nbytes` long.

    ValueError if it is shorter, or does not begin on a multiple of 64 bytes.
    """
    layout = [(shape, dtype) for _, shape, dtype in _parse(description)]
    total = files.room(layout)
    if segment.dtype != torch.uint8 or segment.ndim != 1 or segment.numel() < total:
        raise ValueError(
            f"expected a flat segment of at least {total} bytes, got {segment.dtype} {list(segment.shape)}"
        )
    if segment.data_ptr() % ALIGN_BYTES and total:
        raise ValueError(f"expected a segment at a multiple of {ALIGN_BYTES} bytes, got {segment.data_ptr()}")
    return list(files.views(layout, segment))


def restore(
    module: nn.Module, optimizer: Optimizer | None, description: Json, copies: Sequence[Tensor]
) -> int:
    """Put ``copies`` into the live parameters, buffers and moments, in place; return the step.

    Moments that the optimizer lacks are made, aligned, and what it has beyond the description is dropped.
    ``copies`` stay the caller's: nothing keeps a view of them. CheckpointRejected, and nothing has changed,
    unless the description is one of this very module and optimizer and the copies are as it says.
    """
    parsed = _parse(description)
    _require_copies(parsed, copies)
    named = dict(zip((name for name, _, _ in parsed), copies, strict=True))
    model = {n.removeprefix(MODEL): t for n, t in named.items() if n.startswith(MODEL)}
    moments = {n.removeprefix(OPTIMIZER): t for n, t in named.items() if n.startswith(OPTIMIZER)}
    own = state.model_tensors(module)
    firsts, ties = files.split_ties(own)
    _require_same(files.layout_of(firsts), files.layout_of(model))
    if optimizer is not None:
        state.require_fit(module, optimizer, description["rest"], files.layout_of(moments))
    state.unwrapped(module).load_state_dict({name: model[ties.get(name, name)] for name in own})
    if optimizer is not None:
        own_moments, _ = state.optimizer_state(module, optimizer)
        placed = {name: _placed(own_moments.get(name), copy) for name, copy in moments.items()}
        state.restore_optimizer(module, optimizer, placed, description["rest"])
    step: int = description["step"]
    return step


def _placed(live: Tensor | None, copy: Tensor) -> Tensor:
    """``copy``'s values in the live tensor if there is one like it, else in aligned memory of their own."""
    with torch.no_grad():
        if live is not None and (live.shape, live.dtype) == (copy.shape, copy.dtype):
            return live.copy_(copy)
        return files.aligned(copy)


def _require_copies(parsed: Layout, copies: Sequence[Tensor]) -> None:
    _require(len(copies) == len(parsed), "copies", f"{len(parsed)} tensors", len(copies))
    for (name, shape, dtype), copy in zip(parsed, copies, strict=True):
        _require(tuple(copy.shape) == shape, name, f"shape {list(shape)}", list(copy.shape))
        _require(copy.dtype == dtype, name, str(dtype), copy.dtype)


def _require_same(own: files.Layout, described: files.Layout) -> None:
    missing, unknown = sorted(own.keys() - described.keys()), sorted(described.keys() - own.keys())
    _require(not missing, "model", f"the tensor {missing[:1]}", "none of that name")
    _require(not unknown, "model", f"the {len(own)} tensors of this model", f"also {unknown[:1]}")
    for name, layout in own.items():
        _require(described[name] == layout, name, str(layout), described[name])


def _parse(description: Json) -> Layout:
    """The layout that a description from elsewhere says; CheckpointRejected if it is not sound."""
    is_one = isinstance(description, dict) and set(description) == {"step", "layout", "rest"}
    _require(is_one, "keys", "step, layout and rest", description)
    step, layout = description["step"], description["layout"]
    _require(_is_count(step), "step", "a whole number", step)
    _require(isinstance(layout, list), "layout", "a list", layout)
    parsed = [_parse_entry(entry) for entry in layout]
    _require(
        len({name for name, _, _ in parsed}) == len(parsed), "layout", "each name once", "a repeated one"
    )
    return parsed


def _parse_entry(entry: Json) -> tuple[str, tuple[int, ...], torch.dtype]:
    _require(isinstance(entry, list) and len(entry) == 3, "layout", "name, shape and dtype", entry)
    name, shape, dtype = entry
    named = isinstance(name, str) and name.startswith((MODEL, OPTIMIZER))
    _require(named, "layout", f"a name that begins with {MODEL} or {OPTIMIZER}", name)
    sizes = isinstance(shape, list) and all(map(_is_count, shape)) and files.is_bounded(shape)
    _require(sizes, name, "a shape that a tensor can have", shape)
    _require(isinstance(dtype, str) and dtype in DTYPES, name, f"a dtype among {', '.join(DTYPES)}", dtype)
    return name, tuple(shape), DTYPES[dtype]


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _require(ok: bool, where: str, expected: str, got: object) -> None:
    if not ok:
        shown = repr(got)[:80].encode("ascii", "backslashreplace").decode()
        raise CheckpointRejected(
            f"description of a copy: {where[:80]}: expected {expected}, got {shown}: use another copy"
        )
