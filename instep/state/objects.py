"""Any object's ``state_dict()`` as tensors by name and JSON, and back: exactly, never pickled.

    {"best": inf, "betas": (0.9, 0.99), "shadow": {"w": tensor}}          of the object registered as "ema"

    tensors   "ema/shadow/w"
    JSON      {"best": {"$float": "inf"}, "betas": {"$tuple": [0.9, 0.99]},
               "shadow": {"w": {"$tensor": ["ema/shadow/w", "cpu"]}}}

JSON has lists, text, numbers and objects with text as keys, whose order is not kept. Other values of Python
become an object with one key that begins with ``$``. A subclass of a type would come back as the type alone,
so it is refused, as is anything that is neither data nor a tensor.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from instep.errors import CheckpointRejected
from instep.state.shards import Json
from instep.state.stored import CODES

MAX_LEVELS = 12  # of a state; each can take two of the JSON, and a manifest has room for 32
MAX_SIZE = 1 << 18  # of one object, outside of tensors: values, and characters of text
TENSOR, TUPLE, FLOAT = "$tensor", "$tuple", "$float"
PLAIN = (str, int, bool, type(None))
DICTS: dict[str, type[Any]] = {"$dict": dict, "$OrderedDict": OrderedDict, "$Counter": Counter}
NAMES = {kind: name for name, kind in DICTS.items()}


def take_apart(name: str, state: object) -> tuple[Json, dict[str, Tensor]]:
    """The JSON and the tensors of ``state``, which the object registered as ``name`` has given.

    Tensors are the live ones.

    Raises:
        ValueError: it has something that is neither data nor a tensor, by its path and type.
    """
    parts = _Parts(name)
    body = parts.take(state, name, 0)
    return body, parts.tensors


def put_together(name: str, body: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The state that ``take_apart`` was given, with ``tensors`` by their names.

    Raises:
        CheckpointRejected: ``take_apart`` did not make this.
    """
    try:
        return _together(body, tensors, 0)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise CheckpointRejected(
            f"the state of the object {name!r}: {str(reason)[:200]}: take another checkpoint"
        ) from error


def tensors_of(body: Json) -> Iterator[tuple[str, str]]:
    """The names of the tensors that ``body`` needs, each with the kind of device that it was on."""
    if isinstance(body, list):
        for each in body:
            yield from tensors_of(each)
    elif isinstance(body, dict):
        if set(body) == {TENSOR} and _is_reference(body[TENSOR]):
            yield body[TENSOR][0], body[TENSOR][1]
        else:
            yield from chain.from_iterable(map(tensors_of, body.values()))


class _Parts:
    """The tensors of one object's state, collected on the way through it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self._size = 0

    def take(self, value: Any, path: str, level: int) -> Json:
        """``value``, at ``path``, as JSON."""
        kind = type(value)
        self._size += len(value) if kind is str else 1
        if level > MAX_LEVELS:
            raise ValueError(
                f"{path[:200]}: expected at most {MAX_LEVELS} levels, got more: flatten the state"
            )
        if self._size > MAX_SIZE:
            raise ValueError(
                f"the state of {self.name!r}: expected at most {MAX_SIZE} values and characters outside of "
                "tensors, got more: keep long lists as a tensor, or out of state_dict()"
            )
        if kind is float and not math.isfinite(value):
            return {FLOAT: str(value)}
        if kind is float or kind in PLAIN:
            return value
        if kind is list or kind is tuple:
            found = [self.take(each, f"{path}/{i}", level + 1) for i, each in enumerate(value)]
            return found if kind is list else {TUPLE: found}
        if kind in NAMES:
            return self._take_dict(value, path, level)
        if isinstance(value, Tensor):
            return {TENSOR: [self._keep(path, value), value.device.type]}
        raise ValueError(
            f"{path[:200]}: expected data or a tensor in state_dict(), got {kind.__module__}."
            f"{kind.__qualname__}: leave it out of the state and make it anew in load_state_dict(), or give "
            "what it holds as numbers, text, lists, dicts and tensors"
        )

    def _take_dict(self, value: dict[Any, Any], path: str, level: int) -> Json:
        found = [
            (self.take(key, f"{path}, a key", level + 1), self.take(each, f"{path}/{key}", level + 1))
            for key, each in value.items()
        ]
        keys = list(value)
        plain = type(value) is dict and all(type(key) is str and key[:1] != "$" for key in keys)
        if plain and keys == sorted(keys):
            return dict(found)
        return {NAMES[type(value)]: list(chain.from_iterable(found))}

    def _keep(self, path: str, x: Tensor) -> str:
        """The name of the tensor ``x`` at ``path``; ValueError if files cannot hold it."""
        if x.layout != torch.strided or x.is_meta or x.is_quantized or x.dtype not in CODES.values():
            what = "a meta tensor" if x.is_meta else f"{x.layout}, {x.dtype}"
            raise ValueError(
                f"{path[:200]}: expected a dense tensor with values of a dtype that safetensors has, got "
                f"{what}: convert it in state_dict(), and back in load_state_dict()"
            )
        if path in self.tensors:
            raise ValueError(f"{path[:200]}: expected one tensor there, got two: give them keys that differ")
        self.tensors[path] = x.detach().resolve_conj().resolve_neg()
        return path


def _together(body: Json, tensors: Mapping[str, Tensor], level: int) -> Any:
    if level > 2 * MAX_LEVELS:
        raise ValueError(f"expected at most {MAX_LEVELS} levels, got more")
    if isinstance(body, list):
        return [_together(each, tensors, level + 1) for each in body]
    if not isinstance(body, dict):
        return body
    if not any(key.startswith("$") for key in body):
        return {key: _together(each, tensors, level + 1) for key, each in body.items()}
    if len(body) > 1:
        raise ValueError(f"expected one key, got {len(body)}")
    ((kind, value),) = body.items()
    if kind == FLOAT and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind == TENSOR and _is_reference(value):
        return tensors[value[0]]
    if (kind == TUPLE or kind in DICTS) and isinstance(value, list):
        inside = _together(value, tensors, level + 1)
        if kind == TUPLE:
            return tuple(inside)
        return DICTS[kind](dict(zip(inside[::2], inside[1::2], strict=True)))
    raise ValueError(f"expected a value as instep writes it, got {kind[:40]} of {repr(value)[:80]}")


def _is_reference(value: Json) -> bool:
    return isinstance(value, list) and [type(each) for each in value] == [str, str]
