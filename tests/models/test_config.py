"""The shape of a transformer is checked when it is written down."""

from typing import Any

import pytest

from instep.models.config import GPTConfig

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
