"""Checkpoints that go back to ``from_pretrained`` of transformers and peft, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.cli.main import main

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("peft") is None,
        reason="transformers or peft is not installed",
    ),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's, of transformers
]


def folder(path: Path, kind: str) -> Path:
    """Config and weights of a small model with random weights."""
    import transformers

    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    if kind == "causal":
        config: Any = transformers.LlamaConfig(**sizes, intermediate_size=16, num_key_value_heads=2)
        made: Any = transformers.LlamaForCausalLM(config)
    elif kind == "tied":
        config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        made = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(**sizes, intermediate_size=16)
        made = transformers.BertForSequenceClassification(config)
    made.save_pretrained(path)
    return path


def read(kind: str, path: Path) -> Any:
    import transformers

    auto = transformers.AutoModelForSequenceClassification
    if kind != "encoder":
        auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, local_files_only=True)


def step(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=torch.arange(8).view(1, 8)).logits.square().sum().backward()
    optimizer.step()
    return optimizer


def assert_same(ours: Any, expected: Any) -> None:
    found = ours.state_dict()
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], x) for name, x in expected.state_dict().items())


@pytest.mark.parametrize("kind", ["causal", "tied", "encoder"])
def test_a_model_goes_back_to_transformers(tmp_path: Path, kind: str):
    base = folder(tmp_path / "base", kind)
    model = read(kind, base)
    path = instep.save(tmp_path / "run", step=1, model=model, optimizer=step(model))
    words = ["--to", "transformers", "--weights", str(base), "--out", str(tmp_path / "out")]
    assert main(["convert", str(path), *words]) == 0
    assert_same(read(kind, tmp_path / "out"), model)


@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_adapters_go_back_to_peft(tmp_path: Path, kind: str):
    import peft

    base = folder(tmp_path / "base", kind)
    names = ["q_proj"] if kind == "causal" else ["query"]
    task = "CAUSAL_LM" if kind == "causal" else "SEQ_CLS"  # of which peft trains a copy of the head
    torch.manual_seed(0)
    model = peft.get_peft_model(read(kind, base), peft.LoraConfig(r=2, target_modules=names, task_type=task))
    path = instep.save(tmp_path / "run", step=1, frozen=False, model=model, optimizer=step(model))
    model.peft_config["default"].save_pretrained(str(tmp_path / "adapter"))
    words = ["--to", "transformers", "--weights", str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]
    assert main(["convert", str(path), *words]) == 0
    torch.manual_seed(1)
    assert_same(peft.PeftModel.from_pretrained(read(kind, base), str(tmp_path / "out")), model)
