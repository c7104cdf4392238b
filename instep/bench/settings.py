"""What a training step consists of when steps are compared: how large a model, how many tokens. Pure.

One number decides how much there is to gain: the bytes of the gradients over the time of the computation. A
parameter costs 4 bytes of gradient and 6 floating point operations per token, so with few tokens per rank the
step is mostly communication, with many it is mostly computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from instep.models.config import GPTConfig, num_parameters

TOKENS = 128
LAYERS = 10
HEAD_WIDTH = 64
FLOAT_BYTES = 4
OPTIMIZERS = {"sgd": 0, "adamw": 2}  # by the moments of a parameter


@dataclass(frozen=True)
class Setting:
    """One model and one batch per rank: ``batch`` windows of ``tokens``. The optimizer is of OPTIMIZERS."""

    name: str
    params: int
    batch: int
    what: str
    tokens: int = TOKENS
    optimizer: str = "sgd"

    @property
    def config(self) -> GPTConfig:
        return shape(self.params, self.tokens)

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


SETTINGS = {
    "communication": Setting("communication", 70_000_000, 1, "mostly communication"),
    "compute": Setting("compute", 70_000_000, 8, "mostly computation"),
    # 80 MB take 0.64 s at 1 Gbit/s, and the computation about as long on one core.
    "link": Setting("link", 20_000_000, 4, "over a link"),
}


def setting(name: str, params: int | None = None, optimizer: str = "sgd") -> Setting:
    """The setting called ``name``, with another number of parameters if one is given."""
    found = replace(SETTINGS[name], optimizer=optimizer)
    return found if params is None else replace(found, params=params)


def shape(params: int, context: int) -> GPTConfig:
    """A transformer of about ``params`` parameters: always ten blocks, as wide as it takes.

    Raises:
        ValueError: fewer parameters than the narrowest has.
    """
    heads = max(1, round(math.sqrt(params / (12 * LAYERS)) / HEAD_WIDTH))
    config = GPTConfig(context=context, layers=LAYERS, width=heads * HEAD_WIDTH, heads=heads)
    if params < num_parameters(config) / 3:
        raise ValueError(f"expected at least {num_parameters(config) // 3:,} parameters, got {params:,}")
    return config
