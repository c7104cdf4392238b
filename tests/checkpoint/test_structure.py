"""The fields of a model: they move with what it computes, and with nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    assert code == {f"model.code.{FILE}"}
    assert {name: value for name, value in found.items() if name not in code} == {
        "model.layer.inner": "Inner()",
        "model.layer.linear": "Linear(in_features=2, out_features=3, bias=True)",
        "model.parameter.linear.weight": "float32 [3, 2]",
        "model.parameter.linear.bias": "float32 [3]",
        "model.buffer.mask": "float32 [2]",
    }


def test_another_file_is_another_field(tmp_path: Path) -> None:
    changed = names(fields(tmp_path, SOURCE), fields(tmp_path, SOURCE.replace("2 * x", "3 * x")))
    assert changed == [f"model.code.{FILE}"]


def test_a_frozen_parameter_and_a_dtype_are_told_apart() -> None:
    before, after = nn.Linear(2, 3), nn.Linear(2, 3).double()
    after.bias.requires_grad_(False)
    assert names(module_fields(before), module_fields(after)) == [
        "model.frozen.bias",
        "model.parameter.bias",
        "model.parameter.weight",
    ]


def test_a_class_of_no_file_says_so_and_an_optimizer_of_one_s_own_comes_with_its_file() -> None:
    class Mine(torch.optim.SGD):
        pass

    made = type("Made", (nn.Module,), {"__module__": "nowhere"})
    assert module_fields(made())["model.code.nowhere"] == UNKNOWN
    optimizer = Mine([nn.Parameter(torch.ones(1))], lr=1.0)
    found = optimizer_fields(optimizer, optimizer)
    assert found["kind"] == f"{__name__}.{Mine.__qualname__}" and found["code"] != UNKNOWN
