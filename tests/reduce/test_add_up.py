"""How many calls a sum takes; that it has the right bits is tested in ``tests/native/test_sums.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instep.memory import PIECE_BYTES
from instep.reduce.node_format import BucketNodes
from instep.reduce.transport import add_up
from instep.reduce.tree import Sum
from tests.native.without import without_core

THREE = Sum((1, 2), ((0, 1), (0, 2)), ((0, 2), (0, 3)), 0)
PIECES = 3


class Arithmetic(TorchDispatchMode):
    """Counts additions and multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func._overloadpacket in (torch.ops.aten.add, torch.ops.aten.mul_)
        return func(*args, **(kwargs or {}))


def num_calls(device: str) -> int:
    values = [torch.zeros(PIECES * PIECE_BYTES // 4, device=device) for _ in range(3)]
    with without_core(), Arithmetic() as arithmetic:
        add_up(values, THREE, 0.5, [values[0]], BucketNodes(1, 1, torch.float32))
    return arithmetic.num_calls


def test_a_processor_adds_in_pieces_that_stay_in_its_cache():
    assert num_calls("cpu") == PIECES * 3


def test_a_device_adds_all_of_a_root_in_one_call():
    """To call it takes as long as to add some hundred kilobytes there."""
    assert num_calls("meta") == 3
