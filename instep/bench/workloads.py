"""Workloads: the model and batch sizes of a measured training step. Pure.

One number decides how much there is to gain: the bytes of the gradients over the time of the computation. A
parameter costs 4 bytes of gradient and 6 floating point operations per token, so with few tokens per rank the
step is mostly communication, with many it is mostly computation.

Where the model is small a step is short, and what there is to gain is neither: it is what is done per step,
whatever its bytes. For that the models are stacks of square layers, of which a step is next to nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from instep.models.config import GPTConfig, num_parameters, preset
from instep.plan.memory_estimate import for_gpt, largest

TOKENS = 128
VOCAB = 256  # bytes
LAYERS = 10
HEAD_WIDTH = 64
UNITS = (HEAD_WIDTH, 32, 16, 8, 4, 2)  # a width is a multiple of the first that comes close
CLOSE = 1 / 8
NARROWEST = 16
FLOAT_BYTES = 4
OPTIMIZERS = {"sgd": 0, "adamw": 2}  # by the moments of a parameter


@dataclass(frozen=True)
class MLPConfig:
    """``layers`` linear layers of ``width`` by ``width``, ReLU between them."""

    layers: int
    width: int

    @property
    def num_parameters(self) -> int:
        return self.layers * (self.width + 1) * self.width

    def activation_bytes(self, batch: int) -> int:
        """What forward keeps: of each layer what goes in, and what ReLU makes of what comes out."""
        return 2 * FLOAT_BYTES * batch * self.layers * self.width


MLPS = {
    "mlp-0.02M": MLPConfig(layers=8, width=50),
    "mlp-0.53M": MLPConfig(layers=8, width=256),
    "mlp-8.4M": MLPConfig(layers=8, width=1024),
}


@dataclass(frozen=True)
class Workload:
    """One model and one batch per rank: ``batch`` windows of ``tokens``. The optimizer is of OPTIMIZERS.

    The model has the size that ``preset`` names, or else about ``params`` parameters. A preset of ``MLPS``
    has vectors in the place of windows. A turn (``steps_rank``) is ``steps`` steps, of which the mean counts:
    one where they are long enough to be timed one by one.
    """

    name: str
    params: int
    batch: int
    what: str
    tokens: int = TOKENS
    optimizer: str = "sgd"
    preset: str = ""
    vocab: int = VOCAB
    layers: int = LAYERS
    steps: int = 1

    @property
    def mlp(self) -> MLPConfig | None:
        """The model, where it is one of ``MLPS``."""
        return MLPS.get(self.preset)

    @property
    def model(self) -> GPTConfig | MLPConfig:
        """The model, of whatever kind."""
        return self.mlp or self.config

    @property
    def config(self) -> GPTConfig:
        """The model, where it is a GPT; ``ValueError`` where it is not."""
        if self.preset:
            return GPTConfig(vocab_size=self.vocab, context=self.tokens, **preset(self.preset)._asdict())
        return gpt_of_size(self.params, self.tokens, self.vocab, self.layers)

    @property
    def num_parameters(self) -> int:
        return self.mlp.num_parameters if self.mlp else num_parameters(self.config)

    @property
    def gradient_bytes(self) -> int:
        return FLOAT_BYTES * self.num_parameters

    @property
    def num_moments(self) -> int:
        """Floats per parameter that the optimizer keeps."""
        return OPTIMIZERS[self.optimizer]

    @property
    def model_text(self) -> str:
        """The model in words."""
        if self.mlp:
            return f"an MLP of {self.num_parameters / 1e6:.2g} M parameters"
        name = f"{self.preset}: " if self.preset else ""
        words = "" if self.vocab == VOCAB else f", a vocabulary of {self.vocab:,}"
        return f"{name}{self.num_parameters / 1e6:.3g} M parameters{words}"

    @property
    def text(self) -> str:
        """The model and the batch in words."""
        stepped = "" if self.optimizer == "sgd" else f", {self.optimizer}"
        fed = f"{self.batch} vectors" if self.mlp else f"{self.batch} x {self.tokens} tokens"
        return f"{self.model_text}, {fed} per rank{stepped}"

    def rank_bytes(self, copies: float) -> float:
        """What a rank takes that holds ``copies`` as large as the weights, and the activations of a batch."""
        if self.mlp:
            return copies * self.gradient_bytes + self.mlp.activation_bytes(self.batch)
        return copies * self.gradient_bytes + largest(for_gpt(self.config, self.batch)).of("activations")


WORKLOADS = {
    "communication": Workload("communication", 70_000_000, 1, "mostly communication"),
    "compute": Workload("compute", 70_000_000, 8, "mostly computation"),
    "given": Workload("given", 70_000_000, 1, "the batch that was asked for"),
    "buckets": Workload("buckets", 70_000_000, 1, "bucket sizes", tokens=64),
    "scaling": Workload("scaling", 20_000_000, 4, "more and more ranks"),
    # 80 MB take 0.64 s at 1 Gbit/s, and the computation about as long on one core.
    "link": Workload("link", 20_000_000, 4, "over a link"),
    # An operator takes microseconds, as long as Python takes to call it; or a millisecond and more.
    "python": Workload("python", 170_000, 1, "much Python", tokens=16, layers=24),
    "matrices": Workload("matrices", 6_500_000, 2, "little Python", layers=2),
    # Of a tiny step the first after others is not like those of a loop: caches are theirs, threads asleep.
    "mlp-0.02M": Workload("mlp-0.02M", 0, 32, "a tiny step", preset="mlp-0.02M", steps=10),
    "mlp-0.53M": Workload("mlp-0.53M", 0, 32, "a small step", preset="mlp-0.53M", steps=5),
    "mlp-8.4M": Workload("mlp-8.4M", 0, 32, "a step of some milliseconds", preset="mlp-8.4M", steps=2),
}


def workload(name: str, params: int | None = None, optimizer: str = "sgd") -> Workload:
    """The workload called ``name``, with another number of parameters if one is given."""
    found = replace(WORKLOADS[name], optimizer=optimizer)
    return found if params is None else replace(found, params=params)


def gpt_of_size(params: int, context: int, vocab: int = VOCAB, layers: int = LAYERS) -> GPTConfig:
    """A transformer of ``params`` parameters, give or take an eighth: ``layers`` blocks, as wide as it takes.

    Raises:
        ValueError: fewer parameters than the narrowest has.
    """
    narrowest = GPTConfig(vocab_size=vocab, context=context, layers=layers, width=NARROWEST, heads=1)
    if params < (least := num_parameters(narrowest)):
        raise ValueError(f"expected at least {least:,} parameters, got {params:,}")

    def count(width: int) -> int:
        return num_parameters(replace(narrowest, width=width))

    nearest = (_nearest(params, count, unit) for unit in UNITS)
    width = next(width for width in nearest if abs(count(width) / params - 1) <= CLOSE)
    divisors = [heads for heads in range(1, width + 1) if width % heads == 0]
    heads = min(divisors, key=lambda heads: abs(width / heads - HEAD_WIDTH))
    return replace(narrowest, width=width, heads=heads)


def _nearest(params: int, count: Callable[[int], int], unit: int) -> int:
    """The multiple of ``unit`` that, as a width, gives the number of parameters next to ``params``."""
    widths = range(unit, params, unit)
    wider = bisect_right(widths, params, key=count)
    return min(widths[max(wider - 1, 0) : wider + 1], key=lambda width: abs(count(width) - params))
