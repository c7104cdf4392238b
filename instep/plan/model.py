"""What a transformer is made of: its weights and what its forward keeps for backward, one line each.

Every number of ``instep plan`` is a sum over these lines, so the arithmetic can be printed. Letters: h width,
f feed-forward width, k width of keys and of values, V vocabulary, T tokens of a micro-batch, E experts, K
experts per token. Attention is by a fused kernel, which keeps no T x T matrix, unless ``attention="eager"``.

    norm h | query, key, value from h, h + 2 k | mixed h, out from it | norm h | up from h | GELU f | down f

In float32 and with f = 4 h, k = h that is 16 h floats, 64 bytes per token, block and unit of width: twice the
34 in half precision of V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", arXiv 2205.05198, section 4.1, less 2 for dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from instep.models.config import EXPERT_BLOCK, GPTConfig


class Weights(NamedTuple):
    """``size`` numbers; ``cut`` over the ranks of an axis: "tp", "ep", or "" for a copy on each rank."""

    name: str
    form: str
    size: int
    cut: str = ""


class Saved(NamedTuple):
    """``size`` numbers of one micro-batch, in the ``kind`` "compute", "residual" (the sum that runs through
    the blocks) or "logits" of a recipe; ``cut`` as of weights, or "sequence": over tp if that slices it."""

    name: str
    form: str
    size: int
    kind: str = "compute"
    cut: str = ""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The model; ``heads = 0`` leaves attention out, ``vocab_size = 0`` embedding and output layer."""

    layers: int = 12
    """Number of blocks."""
    width: int = 768
    """Length of a token's vector between the blocks (d_model, h)."""
    ff_width: int = 0
    """Width inside the feed-forward part (d_ff, f); 0: four times width."""
    heads: int = 12
    """Number of attention heads; 0: blocks without attention."""
    kv_heads: int = 0
    """Heads of keys and values, where several heads share one; 0: as many as heads."""
    vocab_size: int = 50257
    """Number of tokens; 0: neither embedding nor output layer."""
    context: int = 1024
    """Tokens of a window."""
    activation: Literal["gelu", "swiglu", "none"] = "gelu"
    """Between the products of the feed-forward part; swiglu has three products, none is linear."""
    norm: Literal["layer", "rms", "none"] = "layer"
    """Before attention and feed-forward, and before the output layer."""
    bias: bool = True
    """Whether products have biases; not those of experts."""
    positions: bool = True
    """Whether positions are learned, a vector each."""
    tied: bool = True
    """Whether the output layer uses the embedding's weights."""
    attention: Literal["fused", "eager"] = "fused"
    """eager keeps the matrix of attention weights of every head."""
    dropout: float = 0.0
    """Dropout of the embedding and of both branches of a block; a mask has the size of a number."""
    experts: int = 0
    """Experts in the place of each feed-forward part; 0: none."""
    top_k: int = 2
    """Experts per token."""
    checkpoint: bool = False
    """Compute each block again in backward; a block then keeps its input alone."""

    def check(self) -> None:
        """Raise ``ValueError`` for a shape that cannot be built, with one that can."""
        for name, least in (("layers", 1), ("width", 1), ("context", 1), ("ff_width", 0), ("heads", 0),
                            ("kv_heads", 0), ("vocab_size", 0), ("experts", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"model.{name}: expected {least} or more, got {getattr(self, name)}")
        if self.heads and self.width % self.heads:
            near = next(n for n in range(self.heads, 0, -1) if self.width % n == 0)
            wider = -(-self.width // self.heads) * self.heads
            raise ValueError(
                f"model.heads: expected heads to divide width, got width({self.width}) % heads({self.heads}) "
                f"= {self.width % self.heads}: {near} heads would, or width {wider}"
            )
        if self.heads and self.heads % (self.kv_heads or self.heads):
            near = next(n for n in range(min(self.kv_heads, self.heads), 0, -1) if self.heads % n == 0)
            wanted = f"a divisor of heads({self.heads}), got {self.kv_heads}: {near} is one"
            raise ValueError(f"model.kv_heads: expected {wanted}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout: expected 0 <= dropout < 1, got {self.dropout}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"model.top_k: expected 1 to experts({self.experts}), got {self.top_k}")

    @property
    def d_ff(self) -> int:
        """f: ``ff_width``, or its default."""
        return self.ff_width or 4 * self.width

    @property
    def kv_width(self) -> int:
        """k: what a token's keys have in all heads together, and its values."""
        return self.width * (self.kv_heads or self.heads) // self.heads if self.heads else 0

    @property
    def num_parameters(self) -> int:
        """All weights, tied ones counted once."""
        ends = sum(one.size for one in (*embedding(self), *head(self)))
        return ends + self.layers * sum(one.size for one in block(self))


def gpt(config: GPTConfig) -> Transformer:
    """The model of ``instep train``."""
    ends = "vocab_size", "context", "tied"
    same = "layers", "width", "heads", "dropout", "experts", "top_k", "checkpoint", *ends
    return Transformer(ff_width=config.d_ff, **{name: getattr(config, name) for name in same})


def embedding(model: Transformer) -> list[Weights]:
    """The weights before the first block."""
    h, vocab, places = model.width, model.vocab_size, model.context * (model.positions and model.heads > 0)
    lines = [Weights("tokens", "V h", vocab * h, "tp"), Weights("positions", "context h", places * h)]
    return [line for line in lines if line.size and vocab]


def head(model: Transformer) -> list[Weights]:
    """The weights after the last block, without the embedding's where tied."""
    output = 0 if model.tied else model.vocab_size * model.width
    lines = [Weights("last norm", *_norm(model)), Weights("output", "V h", output, "tp")]
    return [line for line in lines if line.size and model.vocab_size]


def block(model: Transformer) -> list[Weights]:
    """The weights of one block."""
    h, f, k, one = model.width, model.d_ff, model.kv_width, int(model.bias)
    norms = (1 + (model.heads > 0)) * _norm(model)[1]
    lines = [Weights("norms", f"{1 + (model.heads > 0)} x {_norm(model)[0]}", norms)]
    if model.heads:
        lines += [
            Weights("query, key, value", "h (h + 2 k)", h * (h + 2 * k), "tp"),
            Weights("out", "h h", h * h, "tp"),
            Weights("biases of query, key, value", "h + 2 k", one * (h + 2 * k), "tp"),
            Weights("bias of out", "h", one * h),
        ]
    ups = 2 if model.activation == "swiglu" else 1
    into = f"{ups} h f" if ups > 1 else "h f"
    if model.experts:
        lines += [
            Weights("router", "E h", model.experts * h),
            Weights("up of experts", f"E {into}", model.experts * ups * h * f, "ep"),
            Weights("down of experts", "E f h", model.experts * f * h, "ep"),
        ]
    else:
        lines += [
            Weights("gate and up" if ups > 1 else "up", into, ups * h * f, "tp"),
            Weights("down", "f h", f * h, "tp"),
            Weights("bias of up", "f", one * ups * f, "tp"),
            Weights("bias of down", "h", one * h),
        ]
    return [line for line in lines if line.size]


def _norm(model: Transformer) -> tuple[str, int]:
    return {"layer": ("2 h", 2 * model.width), "rms": ("h", model.width), "none": ("0", 0)}[model.norm]


def kept_by_block(model: Transformer, tokens: int, *, converted: bool = False) -> list[Saved]:
    """What a block keeps of a micro-batch of ``tokens``; with ``converted``, weights too that were converted
    to the type of the products, as ``torch.autocast`` keeps them.

    Source for what tensor parallelism cuts: section 4.2 of the paper above.
    """
    h, k, heads = model.width, model.kv_width, model.heads
    drop = tokens * h * (model.dropout > 0)
    norm = tokens * h * (model.norm != "none")
    lines = []
    if heads:
        weights = tokens * heads * min(model.context, tokens) * (model.attention == "eager")
        lines += [
            Saved("input of norm", "T h", norm, "residual", "sequence"),
            Saved("input of query, key, value", "T h", tokens * h, cut="sequence"),
            Saved("query, key, value", "T (h + 2 k)", tokens * (h + 2 * k), cut="tp"),
            Saved("attention weights", "T heads context", weights, cut="tp"),
            Saved("input of out", "T h", tokens * h, cut="tp"),
            Saved("dropout mask", "T h", drop, cut="sequence"),
            Saved("converted weights", "h (2 h + 2 k)", converted * h * (2 * h + 2 * k), cut="tp"),
        ]
    cut = "" if model.experts else "sequence"  # a router reads whole windows
    lines += [Saved("input of norm", "T h", norm, "residual", cut), *_feed_forward(model, tokens, converted)]
    lines.append(Saved("dropout mask", "T h", drop, cut=cut))
    return [line for line in lines if line.size]


def _feed_forward(model: Transformer, tokens: int, converted: bool) -> list[Saved]:
    h, f = model.width, model.d_ff
    between = {"gelu": 1, "swiglu": 3, "none": 0}[model.activation]
    products = (3 if model.activation == "swiglu" else 2) * h * f
    middle = f"{between} f" if between > 1 else "f"
    if not model.experts:
        return [
            Saved("input of up", "T h", tokens * h, cut="sequence"),
            Saved("input of activation", f"T {middle}", tokens * between * f, cut="tp"),
            Saved("input of down", "T f", tokens * f, cut="tp"),
            Saved("converted weights", "h f each", converted * products, cut="tp"),
        ]
    # Equal loads, and half a block of padding per expert.
    rows = tokens * model.top_k + model.experts * EXPERT_BLOCK // 2
    return [
        Saved("input of router", "T h", tokens * h, "residual"),
        Saved("rows of experts", "(T K + padding) 2 h", rows * 2 * h, cut="ep"),
        Saved("input of activation", f"(T K + padding) {middle}", rows * between * f, cut="ep"),
        Saved("input of down", "(T K + padding) f", rows * f, cut="ep"),
        Saved("converted weights", "E h f each", converted * products * model.experts, cut="ep"),
    ]


def kept_by_ends(model: Transformer, tokens: int, *, converted: bool = False) -> list[Saved]:
    """What embedding and output layer keep of a micro-batch."""
    h, vocab = model.width, model.vocab_size
    drop = tokens * h * (model.dropout > 0)
    lines = [
        Saved("dropout mask of the embedding", "T h", drop, "residual"),
        Saved("input of the last norm", "T h", tokens * h * (model.norm != "none"), "residual"),
        Saved("input of the output layer", "T h", tokens * h),
        Saved("logits", "T V", tokens * vocab, "logits", "tp"),
        Saved("converted weights of the output layer", "V h", converted * vocab * h),
    ]
    return [line for line in lines if line.size and vocab]


# Architectures by name.
_LLAMA = Transformer(
    width=4096, layers=32, heads=32, kv_heads=8, ff_width=14336, vocab_size=128256, context=8192,
    activation="swiglu", norm="rms", bias=False, positions=False, tied=False,
)  # fmt: skip
MODELS = {
    # A. Radford et al., "Language models are unsupervised multitask learners", 2019, table 2.
    "gpt2-small": Transformer(),
    "gpt2-xl": Transformer(layers=48, width=1600, heads=25),
    # T. Brown et al., "Language models are few-shot learners", NeurIPS 2020, table 2.1.
    "gpt3-175b": Transformer(layers=96, width=12288, heads=96, context=2048),
    # A. Grattafiori et al., "The Llama 3 herd of models", arXiv 2407.21783, table 3.
    "llama3-8b": _LLAMA,
    "llama3-70b": replace(_LLAMA, layers=80, width=8192, ff_width=28672, heads=64),
    "llama3-405b": replace(_LLAMA, layers=126, width=16384, ff_width=53248, heads=128),
}
