"""The presets are the sizes that were published."""

import pytest

from instep.models.config import GPTConfig, num_parameters
from instep.models.presets import PRESETS, preset


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
