"""examples/finetune.py: models of local folders, without a network; what is missing is named."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launched.command import ROOT, events, instep, summary

SCRIPT = ROOT / "examples" / "finetune.py"
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("peft") is None,
    reason="transformers or peft is not installed",
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, its tokenizer, and a data set."""
    import tokenizers
    import transformers

    path = tmp_path_factory.mktemp("given")
    words = [f"w{i}" for i in range(40)]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([" ".join(words)], vocab_size=300, special_tokens=["<pad>", "<eos>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=32
    ).save_pretrained(path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(bpe.get_vocab()), max_position_embeddings=32, num_key_value_heads=2, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path / "model")
    rows = [{"prompt": words[i], "completion": " ".join(words[: i + 1])} for i in range(16)]
    (path / "data").mkdir()
    (path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_ranks_of_which_one_is_killed_train_adapters_with_the_bits_of_one(given: Path, tmp_path: Path):
    words = [
        "--weights",
        given / "model",
        "--data",
        given / "data",
        "--lora",
        "--batch",
        4,
        "--micro-batch",
        2,
    ]
    for run_dir, options in (("one", ["-n", 1]), ("two", ["-n", 2, "--fault", "kill:rank=1,step=1"])):
        ended = instep("run", *options, "--run-dir", run_dir, SCRIPT, *words, cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert re.search(
            r"context 32 tokens: the most that the model takes; \d+ of 16 pairs were cut", ended.out
        )
    assert len(events(tmp_path / "two", "failure")) == 1
    assert summary(tmp_path / "one")["state_sha256"] == summary(tmp_path / "two")["state_sha256"]
    out = ["--to", "transformers", "--weights", "runs/finetune-config", "--out", "tuned"]
    ended = instep("convert", "two", *out, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "tuned").iterdir()
    }


@pytest.mark.parametrize(
    ("removed", "words", "message"),
    [
        ("model", [], "model is no folder: expected one that save_pretrained() has written"),
        ("model/config.json", [], "model has no config (config.json), it has: "),
        ("model/model.safetensors", [], "model has no weights (*.safetensors or *.bin), it has: "),
        (
            "model/tokenizer.json",
            [],
            "model has no tokenizer (tokenizer.json or vocab.* or *.model), it has: ",
        ),
        ("data", [], "data is not there: expected a .jsonl file, or a folder of them"),
        ("", ["--split", "test"], "data has no split test.jsonl, it has: train.jsonl"),
        ("", ["--columns", "prompt", "answer"], "1 has no column 'answer', it has: prompt, completion"),
    ],
)
def test_what_is_missing_is_named(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str, words: list[str], message: str
):
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    if removed:
        path = tmp_path / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = ["--weights", str(tmp_path / "model"), "--data", str(tmp_path / "data"), *words]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *said])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert message in str(ended.value.code)
