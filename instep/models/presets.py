"""Transformer sizes that papers and benchmarks use, by name.

``GPTConfig(context=1024, **preset("small")._asdict())`` is the usual way from a name to a model.

Sources: small to xl, A. Radford et al., "Language models are unsupervised multitask learners", 2019, table 2;
2.7B, T. Brown et al., "Language models are few-shot learners", NeurIPS 2020, table 2.1. Numbers of heads that
the first does not print are those of its released models.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PRESETS", "Preset", "preset"]


class Preset(NamedTuple):
    """d_model, d_ff, number of blocks and of attention heads."""

    width: int
    ff_width: int
    layers: int
    heads: int


PRESETS = {
    "small": Preset(width=768, ff_width=3072, layers=12, heads=12),
    "medium": Preset(width=1024, ff_width=4096, layers=24, heads=16),
    "large": Preset(width=1280, ff_width=5120, layers=36, heads=20),
    "xl": Preset(width=1600, ff_width=6400, layers=48, heads=25),
    "2.7B": Preset(width=2560, ff_width=10240, layers=32, heads=32),
}


def preset(name: str) -> Preset:
    """The size called ``name``; ``ValueError`` that lists the names for one that is not there."""
    if name not in PRESETS:
        raise ValueError(f"expected a size among {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
