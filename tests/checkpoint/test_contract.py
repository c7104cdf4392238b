"""The numerical configuration: what it holds, what it leaves out, and how a difference is said."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.checkpoint.contract import binding, changes, describe, optimizer_fields, require_same
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


def test_the_description_is_the_same_twice_and_moves_with_what_the_bits_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = describe(config={}, threads=1, device="cpu")
    assert describe(config={}, threads=1, device="cpu") == before
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert differences(before, describe(config={}, threads=2, device="cpu")) == [
        "deterministic: false in the checkpoint, true now",
        "threads: 1 in the checkpoint, 2 now",
    ]


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


def test_the_two_sides_have_the_names_that_are_given() -> None:
    assert differences({"a": 1}, {"a": 2}, ("on rank 0", "on rank 3")) == ["a: 1 on rank 0, 2 on rank 3"]


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


def test_kernel_libraries_are_named_with_their_builds() -> None:
    fields = describe(config={}, threads=1, device="cpu")
    assert str(fields["libraries.onednn"])[:1] == "v"
    assert f"Version {fields['libraries.mkl']}" in torch.__config__.show()


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
def test_what_must_be_the_same_may_be_the_same(mesh: Mesh) -> None:
    require_same(mesh.world.group, {"torch": "2", "threads": 1})


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
