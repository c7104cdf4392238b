"""The pairs recipe: the same bits on any ranks and in every stage, its options, and its figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, models, pre_tokenizers

from instep.data.tokens import EncodedPair, PadTogether
from instep.launch.launch import launch
from instep.mesh.mesh import Mesh
from instep.recipes import pairs
from instep.recipes.pairs import evaluate, main, make_model, read_pairs
from instep.recipes.pairs_config import PairsConfig
from tests.data.test_tokens import TEXTS
from tests.models.test_pair_classifier import save_smollm2
from tests.world import world

SMALL = PairsConfig(
    steps=2, layers=2, width=32, heads=4, vocab_size=500, batch_size=24, micro_batch_size=4, dropout=0.1
)
FEW = [(TEXTS[i % 5], TEXTS[i * i % 6], i % 2) for i in range(30)]


def figures(where: Path) -> tuple[str, float, float, float]:
    """Of the run there: the hash of its state, and the last loss, accuracy and F1."""
    (summary,) = where.glob("runs/*/summary.json")
    last = json.loads((summary.parent / "steps.jsonl").read_text().splitlines()[-1])
    state = json.loads(summary.read_text())["state_sha256"]
    return state, last["loss"], last["accuracy"], last["f1"]


def train_on_few(config: PairsConfig, where: Path) -> Any:
    """The recipe on a few pairs, also in a process of its own."""
    where.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "read_pairs", lambda config: (FEW, FEW[:9]))
        patch.chdir(where)
        return main(config)


@pytest.mark.parametrize(("kind", "ranks", "stage"), [("bert", 3, 3), ("llama", 2, 1)])
def test_any_number_of_ranks_and_every_stage_ends_with_the_bits_of_one_process(kind, ranks, stage, tmp_path):
    config = replace(SMALL, model=kind)
    train_on_few(config, tmp_path / "alone")
    launch(train_on_few, (replace(config, shard_stage=stage), tmp_path / "many"), ranks=ranks)
    assert figures(tmp_path / "many") == figures(tmp_path / "alone")


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_computing_activations_again_moves_no_bit(kind, tmp_path):
    config = replace(SMALL, model=kind)
    train_on_few(config, tmp_path / "kept")
    train_on_few(replace(config, gradient_checkpointing=True), tmp_path / "again")
    assert figures(tmp_path / "again") == figures(tmp_path / "kept")


@pytest.mark.parametrize("changed", [{"bf16": True}, {"weigh": "tokens"}, {"seed": 1}])
def test_an_option_that_changes_the_numbers_is_heard(changed, tmp_path):
    train_on_few(SMALL, tmp_path / "before")
    model = train_on_few(replace(SMALL, **changed), tmp_path / "after")
    assert figures(tmp_path / "after")[:2] != figures(tmp_path / "before")[:2]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_frozen_blocks_stay_as_they_are(tmp_path):
    before, _ = make_model(replace(SMALL, freeze=1), FEW)
    after = train_on_few(replace(SMALL, freeze=1), tmp_path)
    for name, weight in after.state_dict().items():
        is_frozen = "embeddings" in name or "layer.0." in name
        assert torch.equal(weight, before.state_dict()[name]) == is_frozen, name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
def test_lora_trains_its_own_weights_and_the_classifier(tmp_path):
    pytest.importorskip("peft")
    before, _ = make_model(replace(SMALL, lora=2), FEW)
    after = train_on_few(replace(SMALL, lora=2, steps=3), tmp_path)
    was = before.state_dict()
    changed = {name for name, x in after.state_dict().items() if not torch.equal(x, was[name])}
    assert changed and all("lora_" in name or "modules_to_save" in name for name in changed)


def test_weights_of_a_folder_are_trained_on(tmp_path):
    weights = save_smollm2(tmp_path / "weights")
    words = ["<|endoftext|>", *sorted({word for text in TEXTS for word in text.split()})]
    numbered = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "weights" / "tokenizer.json"))
    model = train_on_few(replace(SMALL, weights=tmp_path / "weights", lr=1e-4), tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (model.state_dict()[name] - weights[name].float()).abs().max().item()
    assert 0 < moved < 1e-3


def test_pairs_laid_out_as_mrpc_are_read_from_a_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, rows in (("train", FEW), ("validation", FEW[:3])):
        lines = [f"{a},{b},{label},{i}" for i, (a, b, label) in enumerate(rows)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["sentence1,sentence2,label,idx", *lines]))
    assert read_pairs(PairsConfig(data=str(tmp_path))) == (FEW, FEW[:3])


def test_pairs_of_a_name_on_the_hub_are_those_of_its_part(monkeypatch):
    asked = []
    rows = [{"sentence1": a, "sentence2": b, "label": label, "idx": 0} for a, b, label in FEW]

    def load_dataset(*names: str) -> dict[str, Any]:
        asked.append(names)
        return {"train": rows, "validation": rows[:3], "test": []}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_pairs(PairsConfig(data="nyu-mll/glue:mrpc")) == (FEW, FEW[:3])
    assert asked == [("nyu-mll/glue", "mrpc")]


class SaysBySecond(nn.Module):
    """Says "the same" of a pair whose second token is even."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        even = (input_ids[:, 1] % 2 == 0).float()
        return SimpleNamespace(logits=torch.stack([1 - even, even], dim=1))


def batches_of_ten() -> list[dict[str, Any]]:
    """Four micro-batches; of pairs 0 to 9 the even ones are said to be the same, and 0, 2, 4 and 9 are."""
    encoded = [EncodedPair([1, i, 1], [0, 0, 0], int(i in (0, 2, 4, 9)), i) for i in range(10)]
    together = PadTogether(0, sentences=False)
    return [together(encoded[i : i + 3]) for i in range(0, 10, 3)]


def require_counts(mesh: Mesh) -> None:
    found = evaluate(SaysBySecond(), batches_of_ten(), SMALL, mesh)
    # said: 0 2 4 6 8; right of them 0 2 4; missed: 9
    assert found == {"accuracy": 7 / 10, "f1": 2 * 3 / (5 + 4)}


@world(1)
def test_accuracy_and_f1_count_each_pair_once_on_one_rank(mesh):
    require_counts(mesh)


@world(3)
def test_accuracy_and_f1_count_each_pair_once_on_three_ranks(mesh):
    require_counts(mesh)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batch_size": 30}, "batch_size 30 is no multiple of micro_batch_size 4"),
        ({"heads": 3}, "width 32 with heads 3"),
        ({"lora": 2, "freeze": 1}, "lora with freeze"),
        ({"shard_stage": 4}, "shard_stage: expected 0, 1, 2 or 3, got 4"),
        ({"model": "gpt"}, "model: expected one of bert, llama, got 'gpt'"),
        ({"steps": 0}, "steps: expected a number above 0, got 0"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_name(changed, said):
    with pytest.raises(ValueError, match=said):
        main(replace(SMALL, **changed))
