"""What a model is made of, as fields of the contract, so that a changed layer is refused by its name.

    model.code.instep.models.transformer        of the whole file: helpers count, too
    model.code.FeedForward                      of each class that the model uses
    model.layer.blocks.0.feed_forward.up        Linear(in_features=128, out_features=512, bias=True)
    model.parameter.blocks.0.feed_forward.up.weight             float32 [512, 128]

Code is hashed without comments, docstrings and layout. torch's own classes are left out: they come with the
version of torch.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from threading import Lock
from types import ModuleType

import torch
from torch import Tensor, nn

from instep.checkpoint.manifest import Scalar

UNKNOWN = "no source"
SHORT = 16  # hex digits
# Before Python 3.11.9 two threads that parse at once break each other (python/cpython#106905).
PARSING = Lock()
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def module_fields(module: nn.Module) -> dict[str, Scalar]:
    """Code, layers, parameters and buffers of ``module``."""
    fields: dict[str, Scalar] = {}
    for path, layer in module.named_modules():
        kind = type(layer)
        if not kind.__module__.startswith("torch."):
            fields[f"model.code.{kind.__module__}"] = _code_of_file(kind.__module__)
            fields[f"model.code.{kind.__qualname__}"] = _code_of_class(kind)
        if not any(True for _ in layer.children()):
            fields[f"model.layer.{path or '(whole)'}"] = f"{kind.__name__}({layer.extra_repr()})"
    for name, x in _tensors(module):
        fields[name] = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return fields


def optimizer_fields(optimizer: torch.optim.Optimizer) -> dict[str, Scalar]:
    """Which optimizer it is, and which of torch's implementations: they differ in the last bit."""
    kind = type(optimizer)
    flags = {key: value for key, value in optimizer.defaults.items() if value is None or type(value) is bool}
    fields: dict[str, Scalar] = {f"optimizer.{key}": value for key, value in flags.items()}
    fields["optimizer.kind"] = f"{kind.__module__}.{kind.__qualname__}"
    if not kind.__module__.startswith("torch."):
        fields["optimizer.code"] = _code_of_class(kind)
    return fields


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, a tied one once and a frozen one marked, then buffers."""
    for name, p in module.named_parameters():
        yield f"model.{'parameter' if p.requires_grad else 'frozen'}.{name}", p
    for name, b in module.named_buffers():
        yield f"model.buffer.{name}", b


def _code_of_class(kind: type) -> str:
    with PARSING:
        known = _code_in(sys.modules.get(kind.__module__)).get(kind.__qualname__)
        if known is not None:
            return known
        try:  # a notebook has no file, and inspect knows its cells
            return _code_of(textwrap.dedent(inspect.getsource(kind)))[kind.__name__]
        except (OSError, TypeError, SyntaxError, KeyError):
            return UNKNOWN


def _code_of_file(name: str) -> str:
    with PARSING:
        return _code_in(sys.modules.get(name)).get("", UNKNOWN)


@cache
def _code_in(module: ModuleType | None) -> dict[str, str]:
    """Hashes of the file of ``module``: "" is the whole, the rest are its classes by qualified name."""
    try:
        return {} if module is None else _code_of(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}


def _code_of(source: str) -> dict[str, str]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return {
        name: hashlib.sha256(ast.dump(node).encode()).hexdigest()[:SHORT] for name, node in _classes(tree)
    }


def _classes(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The module as "", and the classes below it, those in functions too."""
    if isinstance(node, ast.Module):
        yield "", node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from _classes(child, prefix)
            continue
        name = f"{prefix}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield name, child
        yield from _classes(child, f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>.")
