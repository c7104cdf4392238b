"""Initial values depend on the generator, not on where or how the parameter is stored."""

import pytest
import torch

from instep.models.transformer import fill_normal


def filled(parameter: torch.Tensor) -> torch.Tensor:
    fill_normal(parameter, 0.02, torch.Generator().manual_seed(3))
    return parameter


def test_layout_and_alignment_do_not_change_the_values() -> None:
    plain = filled(torch.empty(24, 40))
    assert torch.equal(plain, filled(torch.empty(40, 24).t()))
    assert torch.equal(plain, filled(torch.empty(24 * 40 + 1)[1:].view(24, 40)))
    assert torch.equal(plain.to(torch.bfloat16), filled(torch.empty(24, 40, dtype=torch.bfloat16)))


def test_values_have_the_deviation_asked_for_and_the_default_generator_is_not_used() -> None:
    before = torch.get_rng_state()
    values = filled(torch.nn.Parameter(torch.empty(200, 200)))
    assert torch.equal(torch.get_rng_state(), before)
    assert values.std().item() == pytest.approx(0.02, rel=0.03)
    assert values.mean().item() == pytest.approx(0, abs=0.001)
