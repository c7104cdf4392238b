"""Workloads: what a training step that is measured consists of, how large a model, how many tokens. Pure.

One number decides how much there is to gain: the bytes of the gradients over the time of the computation. A
parameter costs 4 bytes of gradient and 6 floating point operations per token, so with few tokens per rank the
step is mostly communication, with many it is mostly computation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from instep.models.config import GPTConfig, num_parameters, preset
from instep.recipes.memory_estimate import activation_bytes

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
class Workload:
    """One model and one batch per rank: ``batch`` windows of ``tokens``. The optimizer is of OPTIMIZERS.

    The model has the size that ``preset`` names, or else about ``params`` parameters.
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

    @property
    def config(self) -> GPTConfig:
        if self.preset:
            return GPTConfig(vocab_size=self.vocab, context=self.tokens, **preset(self.preset)._asdict())
        return gpt_of_size(self.params, self.tokens, self.vocab, self.layers)

    @property
    def gradient_bytes(self) -> int:
        return FLOAT_BYTES * num_parameters(self.config)

    @property
    def num_moments(self) -> int:
        """Floats per parameter that the optimizer keeps."""
        return OPTIMIZERS[self.optimizer]

    @property
    def model_text(self) -> str:
        """The model in words."""
        name = f"{self.preset}: " if self.preset else ""
        words = "" if self.vocab == VOCAB else f", a vocabulary of {self.vocab:,}"
        return f"{name}{num_parameters(self.config) / 1e6:.3g} M parameters{words}"

    @property
    def text(self) -> str:
        """The model and the batch in words."""
        stepped = "" if self.optimizer == "sgd" else f", {self.optimizer}"
        return f"{self.model_text}, {self.batch} x {self.tokens} tokens per rank{stepped}"

    def rank_bytes(self, copies: float) -> float:
        """What a rank takes that holds ``copies`` as large as the weights, and the activations of a batch."""
        return copies * self.gradient_bytes + activation_bytes(self.config, self.batch)


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
