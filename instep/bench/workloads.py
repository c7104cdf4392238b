"""Workloads: what a training step that is measured consists of, how large a model, how many tokens. Pure.

One number decides how much there is to gain: the bytes of the gradients over the time of the computation. A
parameter costs 4 bytes of gradient and 6 floating point operations per token, so with few tokens per rank the
step is mostly communication, with many it is mostly computation.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from instep.models.config import GPTConfig, num_parameters

TOKENS = 128
LAYERS = 10
HEAD_WIDTH = 64
UNITS = (HEAD_WIDTH, 32, 16, 8, 4, 2)  # a width is a multiple of the first that comes close
CLOSE = 1 / 8
NARROWEST = 16
FLOAT_BYTES = 4
OPTIMIZERS = {"sgd": 0, "adamw": 2}  # by the moments of a parameter


@dataclass(frozen=True)
class Workload:
    """One model and one batch per rank: ``batch`` windows of ``tokens``. The optimizer is of OPTIMIZERS."""

    name: str
    params: int
    batch: int
    what: str
    tokens: int = TOKENS
    optimizer: str = "sgd"

    @property
    def config(self) -> GPTConfig:
        return gpt_of_size(self.params, self.tokens)

    @property
    def gradient_bytes(self) -> int:
        return FLOAT_BYTES * num_parameters(self.config)

    @property
    def num_moments(self) -> int:
        """Floats per parameter that the optimizer keeps."""
        return OPTIMIZERS[self.optimizer]

    @property
    def text(self) -> str:
        """The model and the batch in words."""
        millions = num_parameters(self.config) / 1e6
        stepped = "" if self.optimizer == "sgd" else f", {self.optimizer}"
        return f"{millions:.3g} M parameters, {self.batch} x {self.tokens} tokens per rank{stepped}"


WORKLOADS = {
    "communication": Workload("communication", 70_000_000, 1, "mostly communication"),
    "compute": Workload("compute", 70_000_000, 8, "mostly computation"),
    # 80 MB take 0.64 s at 1 Gbit/s, and the computation about as long on one core.
    "link": Workload("link", 20_000_000, 4, "over a link"),
}


def workload(name: str, params: int | None = None, optimizer: str = "sgd") -> Workload:
    """The workload called ``name``, with another number of parameters if one is given."""
    found = replace(WORKLOADS[name], optimizer=optimizer)
    return found if params is None else replace(found, params=params)


def gpt_of_size(params: int, context: int) -> GPTConfig:
    """A transformer of ``params`` parameters, give or take an eighth: always ten blocks, as wide as it takes.

    Raises:
        ValueError: fewer parameters than the narrowest has.
    """
    least = _count(NARROWEST, context)
    if params < least:
        raise ValueError(f"expected at least {least:,} parameters, got {params:,}")
    nearest = (_nearest(params, context, unit) for unit in UNITS)
    width = next(width for width in nearest if abs(_count(width, context) / params - 1) <= CLOSE)
    divisors = [heads for heads in range(1, width + 1) if width % heads == 0]
    return _of(width, context, heads=min(divisors, key=lambda heads: abs(width / heads - HEAD_WIDTH)))


def _nearest(params: int, context: int, unit: int) -> int:
    """The multiple of ``unit`` that, as a width, gives the number of parameters next to ``params``."""
    widths = range(unit, params, unit)
    wider = bisect_right(widths, params, key=lambda width: _count(width, context))
    return min(widths[max(wider - 1, 0) : wider + 1], key=lambda width: abs(_count(width, context) - params))


def _count(width: int, context: int) -> int:
    return num_parameters(_of(width, context))


def _of(width: int, context: int, heads: int = 1) -> GPTConfig:
    return GPTConfig(context=context, layers=LAYERS, width=width, heads=heads)
