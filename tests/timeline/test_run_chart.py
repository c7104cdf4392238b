"""Charts of a run: whatever figures it has, a picture comes of them."""

import pytest

from instep.timeline.run_chart import curve, stacked_parts

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("steps", "values", "dots"),
    [
        ([0, 1, 2], [5.0, None, 4.0], [[0, 5.0], [2, None]]),
        ([7], [1.5], []),
        ([None, 1], [None, None], []),
        ([0, 1 << 62], [-1e308, 1e308], [[0, 1e308]]),
        ([0, 1], [0.0, 0.0], []),
        ([], [], []),
    ],
)
@pytest.mark.parametrize("from_zero", [True, False])
def test_a_curve_of_any_figures(steps, values, dots, from_zero):
    assert curve(steps, values, dots, from_zero=from_zero).startswith(PNG)


@pytest.mark.parametrize(("steps", "compute"), [([0, 1, 2], [900.0, 5.0, None]), ([4], [None])])
def test_parts_stack_up(steps, compute):
    assert stacked_parts(steps, {"compute": compute, "host": [1.0] * len(steps)}).startswith(PNG)
