"""The size of a transformer is checked when it is written down; the presets are those that were published."""

from typing import Any

import pytest

from instep.models.config import PRESETS, GPTConfig, num_parameters, preset

TINY: dict[str, Any] = {"context": 8, "layers": 2, "width": 16, "heads": 2}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 3}, r"width\(16\) % heads\(3\) = 1"),
        ({"layers": 0}, "layers >= 1, got 0"),
        ({"ff_width": 0}, "ff_width >= 1, got 0"),
        ({"dropout": 1.0}, "dropout < 1, got 1.0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**TINY | wrong)


def test_the_feed_forward_part_is_four_times_as_wide_unless_said() -> None:
    assert GPTConfig(**TINY).d_ff == 64
    assert GPTConfig(**TINY, ff_width=24).d_ff == 24


@pytest.mark.parametrize(
    ("name", "millions"),
    [("small", 124.44), ("medium", 354.82), ("large", 774.03), ("xl", 1557.61), ("2.7B", 2651)],
)
def test_presets_have_the_published_numbers_of_weights(name: str, millions: float) -> None:
    # 50257 tokens and a context of 1024, or 2048 for 2.7B, as published
    context = 2048 if name == "2.7B" else 1024
    config = GPTConfig(vocab_size=50257, context=context, **preset(name)._asdict())
    assert num_parameters(config) / 1e6 == pytest.approx(millions, rel=5e-4)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"small, medium, large, xl, 2\.7B, got 'tiny'"):
        preset("tiny")
    assert all(size.width % size.heads == 0 for size in PRESETS.values())
