"""``instep convert``: which checkpoint is taken, what is written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import instep
from instep.checkpoint import load
from instep.cli.main import main


class LoRA(nn.Module):
    """With the names that peft gives."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})


class Saved(nn.Module):
    """A head of which peft trains a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.original_module = nn.Linear(4, 2).requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(4, 2)})


def adapted() -> nn.Module:
    return nn.ModuleDict({"q": LoRA(), "head": Saved()})


def weights(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    folder.mkdir()
    (folder / name).write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def test_the_newest_checkpoint_of_a_run_becomes_a_file_after_each_byte_is_verified_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model, out = nn.Linear(2, 2), tmp_path / "model.safetensors"
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        instep.save(tmp_path / "run" / "checkpoints", step=step, model=model)
    hashed = Mock(wraps=load._verify_hash)
    monkeypatch.setattr(load, "_verify_hash", hashed)
    assert convert(tmp_path / "run", "--out", out) == 0
    assert torch.equal(load_file(out)["weight"], model.weight)
    assert capsys.readouterr().out.startswith(f"{out}: step 2, from {tmp_path / 'run'}")
    assert convert(tmp_path / "run" / "checkpoints" / "step-00000001", "--out", tmp_path / "first") == 0
    files = [call.args[0] for call in hashed.call_args_list]
    assert len(files) == len(set(files)) > 0
    assert (load_file(tmp_path / "first")["weight"] == 1).all()


def test_a_model_becomes_a_folder_with_frozen_weights_from_the_base(tmp_path: Path):
    base = weights(tmp_path / "base", {"model_type": "any", "torch_dtype": "bfloat16"})
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    save_file({"0.weight": model[0].weight, "0.bias": model[0].bias}, base / "model.safetensors")
    path = instep.save(tmp_path / "checkpoints", step=1, frozen=False, model=model)
    words = (path, "--to", "transformers", "--weights", base, "--out")
    assert convert(*words, tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "any",
        "dtype": "float32",
    }
    assert (tmp_path / "out" / "tokenizer.json").exists()
    save_file({"0.weight": model[0].weight + 1, "0.bias": model[0].bias}, base / "model.safetensors")
    assert convert(*words, tmp_path / "other") == 3
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("frozen", [True, False])
def test_adapters_become_a_folder_under_the_names_of_peft(tmp_path: Path, frozen: bool):
    config = weights(tmp_path / "base", {"peft_type": "LORA", "bias": "none"}, "adapter_config.json")
    model = adapted()
    path = instep.save(tmp_path / "checkpoints", step=1, frozen=frozen, model=model)
    assert convert(path, "--to", "transformers", "--weights", config, "--out", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == {"q.lora_A.weight", "q.lora_B.weight", "head.weight", "head.bias"}
    assert torch.equal(found["head.bias"], model["head"].modules_to_save["default"].bias)
    assert torch.equal(found["q.lora_A.weight"], model["q"].lora_A["default"].weight)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["RUN", "--to", "transformers", "--out", "OUT"], 2, "need each other: pass both"),
        (["none", "--out", "OUT"], 2, "none is no folder: expected a run"),
        (["EMPTY", "--out", "OUT"], 2, "has no checkpoint: expected a run"),
        (["EMPTY/step-00000001", "--out", "OUT"], 3, r"manifest\.json: cannot be read"),
        (["RUN", "--out", "RUN"], 2, "is never overwritten"),
        (["RUN", "--to", "transformers", "--weights", "none", "--out", "OUT"], 2, "none is no folder: exp"),
        (
            ["RUN", "--to", "transformers", "--weights", "EMPTY", "--out", "OUT"],
            2,
            r"has no adapter_config\.json, it has nothing: model\.peft_config",
        ),
        (
            ["RUN", "--to", "transformers", "--weights", "DORA", "--out", "OUT"],
            2,
            "expected adapters of plain LoRA, got use_dora=True: load the checkpoint in the script",
        ),
    ],
)
def test_what_is_missing_is_named_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
):
    (tmp_path / "EMPTY").mkdir()
    weights(tmp_path / "DORA", {"peft_type": "LORA", "use_dora": True}, "adapter_config.json")
    instep.save(tmp_path / "RUN" / "checkpoints", step=1, model=adapted())
    placed = [str(tmp_path / word) if word[:2].isupper() else word for word in words]
    assert convert(*placed) == code
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert len(said.splitlines()) == 1
