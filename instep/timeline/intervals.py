"""Arithmetic of intervals of time: lists of (start, end) in integer nanoseconds.

A *set* is sorted, disjoint and has no empty interval; ``union`` makes one of any list. Nothing here is
slower than a sort, because it runs after every step of a training loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The set of what lies in any of the ``intervals``, which may overlap and be in any order."""
    found: list[Interval] = []
    begin = end = 0
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if start > end or not found:
            begin, end = start, stop
            found.append((begin, end))
        elif stop > end:
            end = stop
            found[-1] = (begin, end)
    return found


def difference(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
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


def intersection(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
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


def total_ns(these: Iterable[Interval]) -> int:
    """Nanoseconds in a set."""
    return sum([end - start for start, end in these])
