"""Plans for common models: the GPT of ``instep train``, and the Llama of Hugging Face."""

from __future__ import annotations

from typing import Any

from torch import nn

from instep.tensor.plan import Column, Row, Sequence, Style, Vocabulary, gather, scatter


def gpt_plan(model: Any, *, gathers_logits: bool = False) -> dict[str, Style]:
    """The plan for the GPT of ``instep train``.

    Args:
        model: an ``instep.models.transformer.GPT``.
        gathers_logits: all ranks get all logits, for an ordinary loss. By default they stay cut, for
            ``instep.tensor.cross_entropy``.

    Returns:
        Styles by the names of modules, for ``instep.tensor.shard``.

    Example:
        >>> from instep.models.transformer import GPT, GPTConfig
        >>> net = GPT(GPTConfig(context=64, layers=2, width=64, heads=4))
        >>> plan = instep.tensor.gpt_plan(net)
    """
    dense: dict[str, Style] = {
        "blocks.*.feed_forward_norm": Sequence(),
        "blocks.*.feed_forward.up": Column(),
        "blocks.*.feed_forward.down": Row(),
        "blocks.*.feed_forward.dropout": Sequence(),
    }
    experts: dict[str, Style] = {"blocks.*.feed_forward_norm": gather, "blocks.*.feed_forward": scatter}
    return {
        "embedding.tokens": Vocabulary(),
        "embedding": scatter,
        "blocks.*.attention_norm": Sequence(),
        "blocks.*.attention.qkv": Column(parts=3, heads=model.config.heads),
        "blocks.*.attention.out": Row(),
        "blocks.*.attention.dropout": Sequence(),
        **(experts if model.config.experts else dense),
        "head": gather,
        "head.out": Column(gathers_output=gathers_logits, is_vocabulary=True),
    }


def llama_plan(model: nn.Module) -> dict[str, Style]:
    """The plan for ``transformers.LlamaForCausalLM`` and models built like it (Mistral, Qwen2, SmolLM).

    Grouped queries: a rank has whole heads of queries, and the heads of keys and values that they read. The
    plan has no slices of the sequence, for ``sequence=True``.

    Args:
        model: with values, and a ``config`` as transformers has it.

    Returns:
        Styles by the names of modules, for ``instep.tensor.shard``.

    Example:
        >>> model = transformers.LlamaForCausalLM.from_pretrained("...")  # doctest: +SKIP
        >>> plan = instep.tensor.llama_plan(model)  # doctest: +SKIP
    """
    config: Any = model.config
    of_queries, of_keys = config.num_attention_heads, config.num_key_value_heads
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    return {
        "model.embed_tokens": Vocabulary(),
        f"{attention}.q_proj": Column(heads=of_queries),
        f"{attention}.k_proj": Column(heads=of_keys),
        f"{attention}.v_proj": Column(heads=of_keys),
        f"{attention}.o_proj": Row(),
        f"{mlp}.gate_proj": Column(),
        f"{mlp}.up_proj": Column(),
        f"{mlp}.down_proj": Row(),
        "lm_head": Column(gathers_output=True, is_vocabulary=True),
    }
