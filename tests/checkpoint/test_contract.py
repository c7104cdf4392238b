"""The numerical configuration: what it holds, what it leaves out, and how a difference is told."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from instep.checkpoint.canary import canary
from instep.checkpoint.contract import (
    UNKNOWN,
    binding,
    changes,
    describe,
    module_fields,
    optimizer_fields,
    require_same,
)
from instep.checkpoint.manifest import canonical, differences, fingerprint, parse_json
from instep.errors import ContractBroken
from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from tests.world import world

SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.1]) | st.sampled_from("ab1")
)
FIELDS = st.dictionaries(st.sampled_from("xyz"), SCALARS)


def test_the_description_has_the_callers_fields_and_those_of_the_process() -> None:
    fields = describe(config={"batch.micro_size": 4}, threads=1, device="cpu")
    assert fields["batch.micro_size"] == 4
    assert (fields["device"], fields["threads"], fields["torch"]) == ("cpu", 1, torch.__version__)
    assert platform.python_version().startswith(f"{fields['python']}.")
    assert fields["cpu.capability"] == torch.backends.cpu.get_cpu_capability()
    assert parse_json(canonical(fields), 1 << 20) == fields


@given(FIELDS, FIELDS)
def test_fingerprints_are_equal_exactly_when_there_are_no_differences(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (differences(a, b) == [])


def test_differences_read_like_sentences() -> None:
    saved = {"batch.micro_size": 4, "optim.name": "adamw", "optim.lr": 1, "same": None}
    now = {"batch.micro_size": 8, "optim.lr": 1.0, "same": None, "model.width": 64}
    assert differences(saved, now) == [
        "batch.micro_size: 4 in the checkpoint, 8 now",
        "model.width: absent in the checkpoint, 64 now",
        "optim.lr: 1 in the checkpoint, 1.0 now",
        'optim.name: "adamw" in the checkpoint, absent now',
    ]


SWITCHES = [
    (torch.set_flush_denormal, "flush_denormal", (True, False)),
    (torch.backends.cuda.enable_flash_sdp, "attention.flash", (False, True)),
    (lambda on: torch.set_autocast_enabled("cpu", on), "autocast_by_default", (True, False)),
    (
        lambda on: setattr(torch.backends.mkldnn, "deterministic", on),
        "cpu.onednn_deterministic",
        (True, False),
    ),
]


@pytest.mark.parametrize(("switch", "name", "values"), SWITCHES, ids=[name for _, name, _ in SWITCHES])
def test_a_switch_of_torch_is_a_field_of_its_own(switch: Any, name: str, values: tuple[Any, Any]) -> None:
    before = describe(config={}, threads=1, device="cpu")
    switch(values[0])
    try:
        after = describe(config={}, threads=1, device="cpu")
    finally:
        switch(values[1])
    assert [line.split(":")[0] for line in differences(before, after)] == [name]
    assert describe(config={}, threads=1, device="cpu") == before


def test_a_changed_layer_is_refused_by_name() -> None:
    def fields(*layers: nn.Module) -> dict[str, Any]:
        return describe(config={}, threads=1, device="cpu", module=nn.Sequential(*layers))

    before = fields(nn.Linear(3, 4), nn.LayerNorm(4))
    rest = repr(nn.LayerNorm(4)).partition("eps=1e-05")[2]  # torch 2.10 does not name the bias
    assert differences(before, fields(nn.Linear(3, 4), nn.LayerNorm(4, eps=1e-6))) == [
        f'model.layer.1: "LayerNorm((4,), eps=1e-05{rest}" in the checkpoint, '
        f'"LayerNorm((4,), eps=1e-06{rest}" now'
    ]


class Doubled(nn.Sequential):
    """A model whose code is its own."""


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_a_module_that_is_divided_is_described_as_the_whole_one(mesh: Mesh, stage: int) -> None:
    whole, divided = (Doubled(nn.Linear(3, 4)) for _ in range(2))
    expected = describe(config={}, threads=1, device="cpu", module=whole)
    assert f"model.code.{__name__}" in expected
    fully_shard(divided, mesh, stage)
    assert describe(config={}, threads=1, device="cpu", module=divided) == expected


def fields_of(**options: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], foreach=False, **options)
    return optimizer_fields(optimizer, optimizer)


def test_options_and_another_implementation_of_an_optimizer_are_named() -> None:
    before = fields_of(lr=1.0, fused=False)
    assert before["kind"] == "torch.optim.adamw.AdamW" and before["groups.0.betas"] == "(0.9, 0.999)"
    assert differences(before, fields_of(lr=torch.tensor(0.5), fused=True)) == [
        "fused: false in the checkpoint, true now",
        "groups.0.lr: 1.0 in the checkpoint, 0.5 now",
    ]


SEVERITIES = {
    "refused": ["seed", "optimizer.groups.0.lr", "data.batch_size", "model.layer.0", "default_dtype"],
    "warned": ["torch", "cpu.kind", "threads", "environment.MKL_CBWR", "libraries.mkl"],
    "noted": ["steps", "script.code", "model.code.train", "optimizer.critic.code"],
}


@pytest.mark.parametrize("severity", SEVERITIES)
def test_a_change_is_refused_warned_of_or_noted(severity: str) -> None:
    names = SEVERITIES[severity]
    found = changes(dict.fromkeys(names, 1), dict.fromkeys(names, 2), ("then", "now"))
    assert {name: len(getattr(found, name)) for name in SEVERITIES} == {
        name: len(names) if name == severity else 0 for name in SEVERITIES
    }
    assert binding(dict.fromkeys(names, 1)) == ({} if severity == "noted" else dict.fromkeys(names, 1))


@world(3)
@pytest.mark.parametrize(
    ("threads", "words"),
    [
        ((1, 2, 1), "rank 1 would compute other bits than the others; .*: 1 on rank 0, 2 on rank 1$"),
        ((2, 1, 1), "rank 0 would compute other bits than the others; .*: 1 on rank 1, 2 on rank 0$"),
        ((1, 2, 3), "ranks 1, 2 would .* than rank 0, and no majority says which is right; .*, 2 on rank 1$"),
    ],
)
def test_what_is_not_the_same_is_raised_with_the_ranks_that_differ(
    mesh: Mesh, threads: tuple[int, ...], words: str
) -> None:
    with pytest.raises(
        ContractBroken, match="(?s)" + (r"rank 0 says which" if mesh.rank else words)
    ) as caught:
        require_same(mesh.world.group, {"torch": "2", "threads": threads[mesh.rank]})
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)


def test_the_gpu_its_libraries_and_their_flags_are_in_the_description(monkeypatch):
    card = SimpleNamespace(name="a card", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    fields = describe(config={}, threads=1, device="cuda:0")
    assert (fields["device"], fields["gpu.kind"], fields["gpu.multiprocessors"]) == ("cuda", "a card", 132)
    names = ("strict", "driver", "cuda", "cublas", "blas", "workspace", "cudnn", "cudnn_flags", "precision")
    assert {f"gpu.{name}" for name in (*names, "matmul_reduced")} <= fields.keys()
    assert "attention.cudnn" in fields


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


def fields_of_file(tmp_path: Path, source: str) -> dict[str, Any]:
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
    found = fields_of_file(tmp_path, SOURCE)
    code = {name for name in found if name.startswith("model.code.")}
    assert code == {f"model.code.{FILE}"}
    assert {name: value for name, value in found.items() if name not in code} == {
        "model.layer.inner": "Inner()",
        "model.layer.linear": "Linear(in_features=2, out_features=3, bias=True)",
        "model.parameter.linear.weight": "float32 [3, 2]",
        "model.parameter.linear.bias": "float32 [3]",
        "model.buffer.mask": "float32 [2]",
    }
    assert names(found, fields_of_file(tmp_path, SOURCE.replace("2 * x", "3 * x"))) == [*code]


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


CPU = torch.device("cpu")


def test_it_is_the_same_whatever_the_process_does_and_draws_no_random_number() -> None:
    torch.rand(3)
    state = torch.get_rng_state()
    expected = canary(CPU)
    with torch.no_grad():
        assert canary(CPU) == expected
    with torch.inference_mode():
        assert canary(CPU) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("function", ["gelu", "layer_norm", "scaled_dot_product_attention", "cross_entropy"])
def test_a_small_flaw_in_one_kernel_is_seen(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, right = canary(CPU), getattr(F, function)
    monkeypatch.setattr(F, function, lambda *args, **options: right(*args, **options) * (1 + 2**-20))
    assert canary(CPU) != expected
