"""Arithmetic of stretches of time: lists of (start, end) in integer nanoseconds.

A *set* is sorted, disjoint and has no empty stretch; ``union`` makes one of any list. Nothing here is
slower than a sort, because it runs after every step of a training loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

Stretch = tuple[int, int]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The set of what lies in any of the ``stretches``, which may overlap and be in any order."""
    found: list[Stretch] = []
    begin = end = 0
    for start, stop in sorted(stretches):
        if stop <= start:
            continue
        if start > end or not found:
            begin, end = start, stop
            found.append((begin, end))
        elif stop > end:
            end = stop
            found[-1] = (begin, end)
    return found


def minus(these: Sequence[Stretch], those: Sequence[Stretch]) -> list[Stretch]:
    """What of set ``these`` is not in set ``those``."""
    if not those:
        return list(these)
    found = []
    num = len(those)
    for start, end in these:
        at = max(bisect_left(those, (start,)) - 1, 0)  # the first that may reach beyond start
        while at < num:
            low, high = those[at]
            if low >= end:
                break
            if high > start:
                if low > start:
                    found.append((start, low))
                start = high
            at += 1
        if start < end:
            found.append((start, end))
    return found


def common(these: Sequence[Stretch], those: Sequence[Stretch]) -> list[Stretch]:
    """What is in both sets."""
    found = []
    i = j = 0
    while i < len(these) and j < len(those):
        low, high = max(these[i][0], those[j][0]), min(these[i][1], those[j][1])
        if low < high:
            found.append((low, high))
        if these[i][1] < those[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(these: Iterable[Stretch]) -> int:
    """Nanoseconds in a set."""
    return sum([end - start for start, end in these])
