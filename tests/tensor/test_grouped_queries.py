"""Grouped queries in the manner of Llama: several heads of queries read one head of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep import tensor
from instep.mesh.mesh import Mesh
from instep.state.hash import tensor_digest
from tests.parity import filled
from tests.tensor.test_gradients import SINGLE, expect_same, gradients_of_one
from tests.tensor.trained import MICRO_BATCHES, VOCABULARY, tokens, whole_gradients
from tests.world import world

WIDTH, HEAD, QUERIES, KEYS, HIDDEN, CHUNKS = 64, 16, 8, 4, 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, QUERIES * HEAD, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KEYS * HEAD, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(QUERIES * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in layers)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(), GatedMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class SmallLlama(nn.Module):
    """With the names of ``transformers.LlamaForCausalLM``, and called like it."""

    config = SimpleNamespace(num_attention_heads=QUERIES, num_key_value_heads=KEYS)

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(Layer() for _ in range(2))
        parts = {"embed_tokens": nn.Embedding(VOCABULARY, WIDTH), "layers": layers, "norm": nn.RMSNorm(WIDTH)}
        self.model = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> dict[str, Tensor]:
        assert not use_cache
        parts: Any = self.model
        x = parts["embed_tokens"](input_ids)
        for layer in parts["layers"]:
            x = layer(x)
        return {"logits": self.lm_head(parts["norm"](x))}


def llama_of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=QUERIES,
        num_key_value_heads=KEYS,
        head_dim=HEAD,
    )
    return transformers.LlamaForCausalLM(config)


KINDS: dict[str, Callable[[], nn.Module]] = {"small": SmallLlama, "transformers": llama_of_transformers}


def loss_of(model: Any, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False)["logits"]
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def cut_llama(mesh: Mesh, kind: str) -> nn.Module:
    net = filled(KINDS[kind]())
    return tensor.shard(net, mesh, tensor.llama_plan(net), CHUNKS)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries_have_the_gradients_of_one_process(kind: str) -> None:
    expected = gradients_of_one(filled(KINDS[kind]()), lambda net: loss_of(net, tokens(0)))
    for tp in (2, 4):
        world(tp, tp=tp)(has_gradients)(kind=kind, expected=expected)


def has_gradients(mesh: Mesh, kind: str, expected: dict[str, Tensor]) -> None:
    net = cut_llama(mesh, kind)
    loss_of(net, tokens(0)).backward()
    expect_same(whole_gradients(net), expected, SINGLE)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries_have_the_bits_of_one_rank(kind: str) -> None:
    found: dict[tuple[int, int], bytes] = {}
    for tp in (1, 2, 4):
        world(tp, tp=tp)(trained)(kind=kind, found=found)
    assert len(found) == 1 + 2 + 4
    assert len(set(found.values())) == 1


def trained(mesh: Mesh, kind: str, found: dict[tuple[int, int], bytes]) -> None:
    net = cut_llama(mesh, kind)
    model = instep.DataParallel(net, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        for micro_batch in model.micro_batches(MICRO_BATCHES):
            loss_of(model, tokens(micro_batch.index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = instep.full_state_dict(net)
    found[mesh.size, mesh.rank] = b"".join(tensor_digest(weights[name]) for name in sorted(weights))
