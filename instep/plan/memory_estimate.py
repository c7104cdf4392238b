"""How much memory a GPT takes to train, by formula.

Model states of float32, per parameter, on W ranks; the moments are AdamW's (SGD with momentum has 4, without
none). Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 3.1, without the halves.

    stage 0    weight 4      gradient 4      moments 8          16
    stage 1    4             4               8 / W              8 + 8 / W
    stage 2    4             4 / W           8 / W              4 + 12 / W
    stage 3    4 / W         4 / W           8 / W              16 / W, and what is gathered

Two units of stage 3 are gathered at a time, the one that computes and the next; and all that is in no block.

Activations of one micro-batch, floats per token that a block keeps for backward (h: width, f: feed-forward
width; attention by a fused kernel, which keeps no T x T matrix):

    norm  h | query, key, value from h, 3 h | mixed h, out from it | norm h | up from h | GELU f | down f
    2 norms in 2 h, 4 products in 3 h + f, and what they are made of: 3 h + f           = 8 h + 2 f

With f = 4 h that is 16 h floats, 64 bytes per token, block and unit of width: twice the 34 in half precision
of V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198,
section 4.1, less 2 for dropout masks. The two ends of the model add 2 h and the logits.

Where layers are cut over ``tp`` ranks, a rank has a share of the products' weights, of what they make, and of
what a row product is made of. Norms and what a column product is made of, 4 h, stay whole, unless ranks have
slices of the sequence (section 4.2.2 there).

Experts keep 2 h + 2 f per row: row, up, GELU, down. With equal loads there are K rows per token and half a
block of padding per expert; one of ``ep`` ranks has its share of them. The router keeps its input, h.

A block that is computed again (``checkpoint``) keeps its input alone, h floats, in float32; in backward one
block at a time has all of its own besides.
"""

from __future__ import annotations

from dataclasses import replace

from instep.models.config import EXPERT_BLOCK, GPTConfig, num_parameters

FLOAT_BYTES = 4


def formula(
    model: GPTConfig,
    moments: int,
    micro_size: int,
    *,
    autocast: bool = False,
    stage: int = 0,
    ranks: int = 1,
    tp: int = 1,
    sequence: bool = False,
    ep: int = 1,
) -> dict[str, int | float]:
    """Bytes of one of ``ranks`` ranks with sharding of ``stage``, whose optimizer keeps ``moments`` floats
    per parameter; ``bytes_per_parameter`` is of what stays, without ``gathered``. Layers are cut over ``tp``
    ranks, with sequence parallelism if ``sequence``, and experts over ``ep``."""
    size = FLOAT_BYTES * parameters_of_rank(model, tp, ep)
    kept = {
        "parameters": (3, size),
        "gradients": (2, size),
        "optimizer": (1, moments * size),
    }
    states = {name: -(-whole // ranks) if stage >= cut else whole for name, (cut, whole) in kept.items()}
    each = round(sum(states.values()) / num_parameters(model), 2)
    return {
        "bytes_per_parameter": int(each) if each.is_integer() else each,
        **states,
        "gathered": _gathered_bytes(model) if stage >= 3 and ranks > 1 else 0,
        "activations": activation_bytes(
            model, micro_size, autocast=autocast, tp=tp, sequence=sequence, ep=ep
        ),
    }


def parameters_of_rank(model: GPTConfig, tp: int, ep: int = 1) -> int:
    """Number of weights of one of ``tp * ep`` ranks that share all layers; what is not cut is on each."""
    h, f, tables = model.width, model.d_ff, 1 if model.tied else 2
    dense = 0 if model.experts else 2 * h * f + f
    cut = tables * model.vocab_size * h + model.layers * (4 * h * h + 3 * h + dense)
    experts = model.layers * model.experts * 2 * h * f
    return num_parameters(model) - cut - experts + -(-cut // tp) + experts // ep


def _gathered_bytes(model: GPTConfig) -> int:
    """Of all that is in no block, and of two blocks."""
    block = num_parameters(replace(model, layers=model.layers + 1)) - num_parameters(model)
    rest = num_parameters(model) - model.layers * block
    return FLOAT_BYTES * (rest + min(model.layers, 2) * block)


def activation_bytes(
    model: GPTConfig,
    micro_size: int,
    *,
    autocast: bool = False,
    tp: int = 1,
    sequence: bool = False,
    ep: int = 1,
) -> int:
    """What a micro-batch keeps for backward when forward has ended.

    Each dropout keeps its mask as numbers, as on CPUs. ``autocast`` halves all but the norms and the
    embedding, and keeps the converted weights of the products.
    """
    h, layers, vocabulary = model.width, model.layers, model.vocab_size
    item, drops = (2 if autocast else FLOAT_BYTES), int(model.dropout > 0)
    ends = (h + h * drops + vocabulary // tp) * FLOAT_BYTES + h * item
    converted = vocabulary * h * item if autocast else 0
    blocks = layers * block_bytes(model, micro_size, autocast=autocast, tp=tp, sequence=sequence, ep=ep)
    if model.checkpoint:
        blocks = micro_size * model.context * layers * h * FLOAT_BYTES
    return micro_size * model.context * ends + converted + blocks


def block_bytes(
    model: GPTConfig,
    micro_size: int,
    *,
    autocast: bool = False,
    tp: int = 1,
    sequence: bool = False,
    ep: int = 1,
) -> int:
    """What one block keeps of a micro-batch; with ``checkpoint``, while backward is in it."""
    h, f, tokens = model.width, model.d_ff, micro_size * model.context
    item, drops, slices = (2 if autocast else FLOAT_BYTES), int(model.dropout > 0), tp if sequence else 1
    alike = (
        h * FLOAT_BYTES + (h + h * drops) * item
    )  # of attention, and of a feed-forward network; on all ranks
    attention = alike // slices + 4 * h * item // tp
    converted = 4 * h * h * item // tp if autocast else 0
    if not model.experts:
        converted += 2 * h * f * item // tp if autocast else 0
        return tokens * (attention + alike // slices + 2 * f * item // tp) + converted
    router = 2 * h * FLOAT_BYTES + h * drops * item
    rows = (tokens * model.top_k + model.experts * EXPERT_BLOCK // 2) // ep
    converted += 2 * h * f * model.experts // ep * item if autocast else 0
    return tokens * (attention + router) + rows * (2 * h + 2 * f) * item + converted
