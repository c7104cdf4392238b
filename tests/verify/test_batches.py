"""A batch as bytes: it comes back as it was, or is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.verify.batch import pack, unpack

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(2.5),
        {
            "x": torch.ones(2, 3, dtype=torch.bfloat16),
            "n": 3,
            "deep": [(torch.zeros(0), None), "s", True, 0.5],
        },
        (
            torch.arange(6).view(2, 3).t(),
            torch.tensor([True, False]),
            torch.complex(torch.ones(2), torch.ones(2)).conj(),
        ),
    ],
)
def test_a_batch_comes_back_as_it_was(batch: Any) -> None:
    again = unpack(*pack(batch), CPU)
    leaves, others = flat(batch), flat(again)
    assert len(leaves) == len(others) > 0
    for x, y in zip(leaves, others, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y


def flat(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [x.keys(), *(leaf for part in x.values() for leaf in flat(part))]
    if isinstance(x, list | tuple):
        return [type(x), *(leaf for part in x for leaf in flat(part))]
    return [x]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({1: torch.ones(1)}, "batch has the key 1"),
        ({"x": [SimpleNamespace()]}, r"batch\['x'\]\[0\] is a SimpleNamespace"),
        (torch.eye(2).to_sparse(), "batch is no dense tensor"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(batch: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        pack(batch)
