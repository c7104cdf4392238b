"""Drawn images: a function of their number alone, all classes, and a part that is held out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from instep.data.shapes import CLASSES, STENCIL, Shapes, _stencils


def test_an_image_depends_on_seed_and_number_alone() -> None:
    shapes, later = Shapes(30), Shapes(10, first=20)
    forwards = [shapes[i] for i in range(30)]
    assert all(torch.equal(later[i][0], forwards[20 + i][0]) for i in reversed(range(10)))
    assert [later[i][1] for i in range(10)] == [label for _, label in forwards[20:]]
    assert not any(torch.equal(image, Shapes(30, seed=1)[i][0]) for i, (image, _) in enumerate(forwards))


def test_every_class_comes_about_as_often() -> None:
    shapes = Shapes(1_000)
    labels = Counter(shapes[i][1] for i in range(1_000))
    assert sorted(labels) == list(range(len(CLASSES)))
    assert min(labels.values()) > 60 and max(labels.values()) < 140  # 100 +- 4.2 standard deviations


def test_images_are_bytes_in_three_colours_with_a_shape_to_see() -> None:
    shapes = Shapes(50)
    for i in range(50):
        image, _ = shapes[i]
        assert image.shape == (3, 32, 32) and image.dtype == torch.uint8
        assert image.float().std(dim=(1, 2)).max() > 20  # noise alone has 12


def test_the_area_of_a_stencil_is_that_of_its_shape() -> None:
    """By formula, of the circle, the square on its corner, the cross, the ring and the bar; REACH is 1.5."""
    areas = dict(zip(CLASSES, (_stencils().sum(axis=(1, 2)) * (3 / STENCIL) ** 2).tolist(), strict=True))
    expected = {"circle": 3.1416, "square": 2.0, "cross": 2 * 1.2 - 0.36, "ring": 3.1416 * 0.64, "bar": 1.32}
    assert {name: areas[name] for name in expected} == pytest.approx(expected, rel=0.02)
    assert len({round(area, 3) for area in areas.values()}) == len(CLASSES)


def test_a_number_outside_and_sizes_below_zero_are_refused() -> None:
    with pytest.raises(IndexError, match="from 0 to 4, got 5"):
        Shapes(5)[5]
    for wrong in ({"num_images": 0}, {"num_images": 1, "first": -1}, {"num_images": 1, "seed": -1}):
        with pytest.raises(ValueError, match="num_images of at least 1"):
            Shapes(**wrong)
