"""The fields of a model: they move with what it computes, and with nothing else."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep.checkpoint import contract
from instep.checkpoint.contract import UNKNOWN, module_fields, optimizer_fields
from instep.checkpoint.manifest import differences

SOURCE = '''
"""A model in a file."""
import torch
from torch import nn

def scale(x):
    return 2 * x

class Inner(nn.Module):
    """Doubles."""

    def forward(self, x):
        return scale(torch.relu(x))

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x):
        return self.linear(self.inner(x))
'''
FILE = "model_in_a_file"


def fields(tmp_path: Path, source: str) -> dict[str, Any]:
    """Those of the model that the file ``source`` defines."""
    path = tmp_path / f"{FILE}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(FILE, path)
    assert spec is not None and spec.loader is not None
    sys.modules[FILE] = importlib.util.module_from_spec(spec)
    try:
        exec(
            compile(source, path, "exec"), sys.modules[FILE].__dict__
        )  # no compiled file of an earlier source
        return module_fields(sys.modules[FILE].Outer())
    finally:
        del sys.modules[FILE]


def names(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [line.split(":")[0] for line in differences(a, b)]


def test_a_model_is_described_by_code_layers_parameters_and_buffers(tmp_path: Path) -> None:
    found = fields(tmp_path, SOURCE)
    code = {name for name in found if name.startswith("model.code.")}
    assert code == {f"model.code.{name}" for name in (FILE, "Inner", "Outer")}
    assert {name: value for name, value in found.items() if name not in code} == {
        "model.layer.inner": "Inner()",
        "model.layer.linear": "Linear(in_features=2, out_features=3, bias=True)",
        "model.parameter.linear.weight": "float32 [3, 2]",
        "model.parameter.linear.bias": "float32 [3]",
        "model.buffer.mask": "float32 [2]",
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("relu", "tanh", [FILE, "Inner"]),
        ("return 2 * x", "return 3 * x", [FILE]),
        ("self.linear(self.inner(x))", "self.inner(self.linear(x))", [FILE, "Outer"]),
        ('"""Doubles."""', '"""Twice as much."""', []),
        ("return 2 * x", "return (2  *\n    x)  # doubled", []),
    ],
    ids=["a layer", "a helper", "the order of layers", "a docstring", "a comment"],
)
def test_code_counts_and_prose_does_not(tmp_path: Path, before: str, after: str, expected: list[str]) -> None:
    changed = names(fields(tmp_path, SOURCE), fields(tmp_path, SOURCE.replace(before, after)))
    assert changed == sorted(f"model.code.{name}" for name in expected)


def test_a_frozen_parameter_and_a_dtype_are_told_apart() -> None:
    before, after = nn.Linear(2, 3), nn.Linear(2, 3).double()
    after.bias.requires_grad_(False)
    assert names(module_fields(before), module_fields(after)) == [
        "model.frozen.bias",
        "model.parameter.bias",
        "model.parameter.weight",
    ]


def test_a_class_inside_a_function_has_its_code_and_one_without_source_says_so() -> None:
    class Local(nn.Module):
        pass

    here = f"model.code.{Local.__qualname__}"
    assert module_fields(Local())[here] not in ("", UNKNOWN)
    made = type("Made", (nn.Module,), {"__module__": "nowhere"})
    assert module_fields(made())["model.code.Made"] == UNKNOWN


class Garbage:
    """Its end is Python code that runs in the midst of what collects it: there threads take turns."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        pass


def test_threads_describe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of these failed in CPython 3.11.7 before, within ``ast.parse``."""

    def described(_: int) -> object:
        Garbage()
        return optimizer_fields(Mine([nn.Parameter(torch.ones(1))]))

    class Mine(torch.optim.SGD):
        pass

    monkeypatch.setattr(contract, "_code_in", contract._code_in.__wrapped__)
    expected = described(0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(described, range(40))) == [expected] * 40
    finally:
        sys.setswitchinterval(before)


def test_an_optimizer_of_one_s_own_comes_with_its_code() -> None:
    class Mine(torch.optim.SGD):
        pass

    found = optimizer_fields(Mine([nn.Parameter(torch.ones(1))], lr=1.0, foreach=False))
    assert (found["optimizer.foreach"], found["optimizer.fused"]) == (False, None)
    assert found["optimizer.kind"] == f"{__name__}.{Mine.__qualname__}"
    assert found["optimizer.code"] != UNKNOWN
