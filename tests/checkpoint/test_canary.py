"""The canary: the same hash at every time and on every rank, and nothing of the process notices."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from instep.checkpoint.canary import canary

CPU = torch.device("cpu")


def test_it_is_the_same_whatever_the_process_does_and_draws_no_random_number() -> None:
    torch.rand(3)
    state = torch.get_rng_state()
    expected = canary(CPU)
    with torch.no_grad():
        assert canary(CPU) == expected
    with torch.inference_mode():
        assert canary(CPU) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("function", ["gelu", "layer_norm", "scaled_dot_product_attention", "cross_entropy"])
def test_a_small_flaw_in_one_kernel_is_seen(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, right = canary(CPU), getattr(F, function)
    monkeypatch.setattr(F, function, lambda *args, **options: right(*args, **options) * (1 + 2**-20))
    assert canary(CPU) != expected
