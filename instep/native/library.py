"""The compiled core as Python calls it, or None where there is none that fits.

``ctypes`` drops the interpreter's lock around a call, so other threads of the rank go on while it waits or
adds. Calls that take less than handing over the lock would (a load, a wake) keep it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from instep.native import build

THERE, MISSING, DIFFERENT, SHARED = 0, 1, 2, 3
MOST_RANKS = 64  # of an all-reduce
ADD, MULTIPLY = 0, 1
NO_SCALE, TIMES, DIVIDED = 0, 1, 2
TYPES = {4: 0, 8: 1}  # of floats, by their bytes
# Up to here a sum takes less than a thread may wait for the interpreter's lock.
_SHORT_BYTES = 32 << 10
Pairs = tuple[tuple[int, int], ...]


def _fields(names: str, **others: type) -> list[tuple[str, type]]:
    """Fields of a struct of ``core.c``: addresses and numbers, all of 64 bits."""
    return [(name, others.get(name, c_int64)) for name in names.split()]


class GroupView(ctypes.Structure):
    """``struct group`` of ``core.c``: where a group's words and halves lie in this process."""

    _fields_ = _fields("size rank blocks block_bytes done sleepers halves half_bytes spin_ns yields")


class _SumView(ctypes.Structure):
    """``struct sum`` of ``core.c``."""

    _fields_ = _fields(
        "type how finish number length num_values values num_pairs pairs root num_homes homes",
        number=c_double,
    )


class ReductionView(ctypes.Structure):
    """``struct reduction`` of ``core.c``: the state of an all-reduce."""

    _fields_ = _fields(
        "group type how finish number root x nbytes by_slices slot_bytes compare calls call_stride "
        "call_bytes location_bytes rounds pieces piece_bytes slice_bytes at stage",
        group=POINTER(GroupView),
        number=c_double,
    )


class Core:
    """The functions of a compiled core; addresses are those of this process."""

    def __init__(self, path: Path) -> None:
        waiting, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        short.instep_stamp.restype = ctypes.c_char_p
        self.stamp: str = short.instep_stamp().decode()
        word_and_number = (c_void_p, c_int64)
        self.load = _typed(short.instep_load, (c_void_p,), c_int64)
        self.store = _typed(short.instep_store, word_and_number, None)
        self.wake = _typed(short.instep_wake, (c_void_p,), None)
        self.spin = _typed(waiting.instep_spin, (c_void_p, c_int64, c_int64), c_int)
        self.sleep = _typed(waiting.instep_sleep, (c_void_p, c_int64, c_int64), None)
        round_of = (POINTER(GroupView), c_int64, c_int64)
        self.post_round = _typed(short.instep_post_round, round_of[:2], c_int)
        self.await_round = _typed(waiting.instep_await_round, round_of, c_int)
        self.all_reduce = _typed(waiting.instep_all_reduce, (POINTER(ReductionView), c_int64), c_int)
        self._add_up = _typed(waiting.instep_add_up, (POINTER(_SumView),), c_int)
        self._add_up_short = _typed(short.instep_add_up, (POINTER(_SumView),), c_int)

    def add_up(
        self,
        values: Sequence[int],
        pairs: Pairs,
        root: int,
        homes: Sequence[int],
        length: int,
        itemsize: int,
        how: int = ADD,
        finish: tuple[int, float] = (NO_SCALE, 1.0),
    ) -> bool:
        """What ``core.c`` does with a ``struct sum``; False if it could not, and nothing was written.

        ``values`` and ``homes`` are addresses of ``length`` floats of ``itemsize`` bytes.
        """
        view, _ = _sum_view(tuple(values), pairs, root, tuple(homes), length, itemsize, how, finish)
        is_short = length * itemsize * len(values) <= _SHORT_BYTES
        failed: int = (self._add_up_short if is_short else self._add_up)(byref(view))
        return not failed


@lru_cache(maxsize=256)
def _sum_view(*sum_: Any) -> tuple[_SumView, object]:
    """The arguments of ``add_up`` as C reads them, cached for a training's steps; and the memory behind."""
    values, pairs, root, homes, length, itemsize, how, finish = sum_
    from_, to = (c_void_p * len(values))(*values), (c_void_p * len(homes))(*homes)
    steps = (c_int32 * (2 * len(pairs)))(*(position for pair in pairs for position in pair))
    head = TYPES[itemsize], how, *finish, length, len(values), ctypes.addressof(from_)
    tail = len(pairs), ctypes.addressof(steps), root, len(homes), ctypes.addressof(to)
    return _SumView(*head, *tail), (from_, to, steps)


def _typed(function: ctypes._NamedFuncPointer, arguments: Sequence[type], result: type | None):  # type: ignore[no-untyped-def]
    function.argtypes, function.restype = arguments, result
    return function


@cache
def _found() -> tuple[Core | None, str]:
    return load(build.LIBRARY)


def core() -> Core | None:
    """The compiled core, or None: there is no library, or one of other source."""
    return _found()[0]


def absence() -> str:
    """Why ``core`` is None, or ""."""
    return _found()[1]


def load(path: Path) -> tuple[Core | None, str]:
    """The core in ``path``, or None and why there is none."""
    if not path.exists():
        return None, "it was not compiled"
    try:
        found, wanted = Core(path), build.stamp()
    except (OSError, AttributeError) as error:  # one that is no library, is of other functions, has no source
        return None, f"it cannot be loaded: {error}"
    if found.stamp != wanted:
        return None, "it was compiled from other source"
    return found, ""
