"""Classifiers of sentence pairs: new ones, frozen parts, weights from a folder as SmolLM2 has it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import save_file

from instep.models.pair_classifier import freeze, load_classifier, new_classifier
from tests.parity import numbers

SIZES = {"vocab_size": 40, "pad": 0, "layers": 2, "width": 16, "heads": 4, "max_tokens": 12}
WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY, LAYERS = 24, 3, 1, 64, 32, 2
SMOLLM2 = {  # config.json of SmolLM2-360M, but for the sizes
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KEY_HEADS,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


def weights_of_smollm2() -> dict[str, Tensor]:
    """Tensors by the names that they have there; tied, so without an output layer."""
    key_width = WIDTH // HEADS * KEY_HEADS
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{x}_proj.weight": (WIDTH, WIDTH) for x in "qo"}
        shapes |= {f"{block}.self_attn.{x}_proj.weight": (key_width, WIDTH) for x in "kv"}
        shapes |= {f"{block}.mlp.{x}_proj.weight": (INNER, WIDTH) for x in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (WIDTH, INNER)}
        shapes |= {f"{block}.{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
    return {name: numbers(*shape, key=name).to(torch.bfloat16) for name, shape in shapes.items()}


def save_smollm2(folder: Path) -> dict[str, Tensor]:
    weights = weights_of_smollm2()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def test_weights_of_a_language_model_are_loaded_by_name_under_a_new_classifier(tmp_path):
    weights = save_smollm2(tmp_path)
    loaded = load_classifier(tmp_path).state_dict()
    assert set(loaded) - set(weights) == {"score.weight"} and set(weights) < set(loaded)
    assert loaded["score.weight"].shape == (2, WIDTH)
    for name, weight in weights.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], weight.float()), name


def test_a_loaded_model_computes_as_its_config_says(tmp_path):
    """The embedding, and a block of grouped-query attention with rotary positions, by hand."""
    weights = {name: weight.float() for name, weight in save_smollm2(tmp_path).items()}
    model = load_classifier(tmp_path).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        embedded = model.model.embed_tokens(tokens)
        turned = model.model.rotary_emb(embedded, torch.arange(5)[None])
        found = model.model.layers[0](embedded, position_embeddings=turned)
    expected = block_by_hand(weights, weights["model.embed_tokens.weight"][tokens])
    assert torch.allclose(found, expected, rtol=1e-4, atol=0.1)  # numbers are some hundreds


def block_by_hand(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The first block's output for ``x``, (1, T, width)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"model.layers.0.{name}.weight"]
        )

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"model.layers.0.{name}.weight"].T

    num_tokens, size = x.shape[1], WIDTH // HEADS
    angles = torch.arange(num_tokens)[:, None] / 100000 ** (torch.arange(0, size, 2) / size)  # (T, size / 2)
    normed = norm(x, "input_layernorm")
    heads = {}
    for name in "qkv":
        rows = project(normed, f"self_attn.{name}_proj")[0].unflatten(-1, (-1, size))  # (T, heads, size)
        left, right = rows.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        heads[name] = rows if name == "v" else turned
    later = torch.full((num_tokens, num_tokens), -torch.inf).triu(1)
    mixed = []
    for head in range(HEADS):
        query, key, value = heads["q"][:, head], heads["k"][:, 0], heads["v"][:, 0]
        mixed.append(((query @ key.T) / size**0.5 + later).softmax(-1) @ value)
    x = x + project(torch.cat(mixed, dim=-1)[None], "self_attn.o_proj")
    normed = norm(x, "post_attention_layernorm")
    gated = torch.nn.functional.silu(project(normed, "mlp.gate_proj")) * project(normed, "mlp.up_proj")
    return x + project(gated, "mlp.down_proj")


def test_a_model_without_padding_is_padded_with_its_end_of_text(tmp_path):
    save_smollm2(tmp_path)
    model = load_classifier(tmp_path).eval()
    assert model.config.pad_token_id == 0 and not model.config.use_cache
    alone = model(input_ids=torch.tensor([[3, 4]]), attention_mask=torch.tensor([[1, 1]])).logits
    padded = model(
        input_ids=torch.tensor([[3, 4, 0, 0], [3, 4, 5, 6]]),
        attention_mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
    ).logits
    assert torch.allclose(alone[0], padded[0], atol=1e-5) and not torch.allclose(padded[0], padded[1])


def test_weights_that_would_have_to_be_unpickled_are_refused(tmp_path):
    weights = save_smollm2(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_classifier(tmp_path)


def test_llama_shares_a_head_of_keys_between_two_of_queries():
    attention = new_classifier("llama", **SIZES).model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (16, 16)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (8, 16)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_frozen_model_trains_what_is_above(kind):
    model = new_classifier(kind, **SIZES)
    freeze(model, 1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all("embed" in name or ".0." in name for name in frozen)
    assert not any("embed" in name or "layers.0." in name or "layer.0." in name for name in trained)
    assert any(".1." in name for name in trained)
