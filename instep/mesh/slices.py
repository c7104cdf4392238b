"""Which part of a flat tensor a rank holds: arithmetic only."""

from __future__ import annotations


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple


def slice_length(num_elements: int, parts: int, multiple: int) -> int:
    """Length of each of ``parts`` equal slices that hold ``num_elements``, a multiple of ``multiple``.

    The flat tensor is padded to ``parts * slice_length`` so that every slice has the same length and
    starts on an aligned address.
    """
    return round_up(max(-(-num_elements // parts), 1), multiple)
