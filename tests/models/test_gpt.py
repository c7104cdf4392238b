"""The transformer: its sizes, causality, weights by name, recomputation."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.models.config import PRESETS, GPTConfig, num_parameters, preset
from instep.models.transformer import GPT, fill_normal


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 3}, r"width\(16\) % heads\(3\) = 1"),
        ({"layers": 0}, "layers >= 1, got 0"),
        ({"ff_width": 0}, "ff_width >= 1, got 0"),
        ({"dropout": 1.0}, "dropout < 1, got 1.0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**TINY | wrong)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("small", 124.44), ("medium", 354.82), ("large", 774.03), ("xl", 1557.61), ("2.7B", 2651)],
)
def test_presets_have_the_published_numbers_of_weights(name: str, millions: float) -> None:
    # 50257 tokens and a context of 1024, or 2048 for 2.7B, as published
    context = 2048 if name == "2.7B" else 1024
    config = GPTConfig(vocab_size=50257, context=context, **preset(name)._asdict())
    assert num_parameters(config) / 1e6 == pytest.approx(millions, rel=5e-4)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"small, medium, large, xl, 2\.7B, got 'tiny'"):
        preset("tiny")
    assert all(size.width % size.heads == 0 for size in PRESETS.values())


TINY: dict[str, Any] = {"vocab_size": 32, "context": 8, "layers": 2, "width": 16, "heads": 2}


def tiny(**changes: float) -> GPT:
    return GPT(GPTConfig(**TINY | changes))


def init_all(model: GPT, names: list[str]) -> None:
    parameters = dict(model.named_parameters())
    for name in names:
        model.init_parameter(name, parameters[name], torch.Generator().manual_seed(len(name)))


def test_a_future_token_does_not_change_past_logits() -> None:
    torch.manual_seed(0)
    model = tiny()
    tokens = torch.randint(32, (2, 8))
    logits = model(tokens)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 32
        difference = (model(changed) - logits).abs().amax(dim=(0, 2))  # one per token
        assert torch.all(difference[:place] == 0)
        assert difference[place] > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ff_width", [None, 24])
def test_the_number_of_weights_is_as_computed(tied: bool, ff_width: int | None) -> None:
    config = GPTConfig(**TINY, tied=tied, ff_width=ff_width)
    assert sum(p.numel() for p in GPT(config).parameters()) == num_parameters(config)


def test_a_tied_weight_is_one_parameter_that_both_ends_train() -> None:
    model = tiny()
    assert model.head.out.weight is model.embedding.tokens.weight
    assert "head.out.weight" not in dict(model.named_parameters())
    untied = tiny(tied=False)
    untied.load_state_dict(model.state_dict())
    tokens = torch.randint(32, (2, 8))
    for either in (model, untied):
        either(tokens).square().sum().backward()
    both = grad_of(untied.head.out.weight) + grad_of(untied.embedding.tokens.weight)
    torch.testing.assert_close(grad_of(model.embedding.tokens.weight), both)


def test_weights_by_name_do_not_depend_on_order_or_global_generator() -> None:
    torch.manual_seed(1)
    one = tiny()
    torch.manual_seed(2)
    other = tiny()
    names = [name for name, _ in one.named_parameters()]
    init_all(one, names)
    random.Random(0).shuffle(names)
    init_all(other, names)
    assert all(torch.equal(one.state_dict()[name], other.state_dict()[name]) for name in names)


def test_initial_weights_have_the_deviation_of_their_role() -> None:
    model = tiny(width=64, layers=8, vocab_size=256)
    weights = dict(model.named_parameters())
    assert torch.all(weights["blocks.0.attention.qkv.bias"] == 0)
    assert torch.all(weights["head.norm.weight"] == 1)
    assert weights["embedding.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert weights["blocks.3.feed_forward.up.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    for residual in ("attention.out", "feed_forward.down"):
        assert weights[f"blocks.3.{residual}.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)


def test_recomputed_blocks_give_the_same_gradient_bits() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(32, (2, 8))
    model = tiny()
    again = tiny(checkpoint=True)
    again.load_state_dict(model.state_dict())
    for expected, got in zip(gradients(model, tokens), gradients(again, tokens), strict=True):
        assert torch.equal(expected, got)


def gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return [grad_of(parameter) for parameter in model.parameters()]


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_dropout_acts_in_training_only_and_is_repeated_by_recomputation() -> None:
    tokens = torch.randint(32, (2, 8))
    model = tiny(dropout=0.5)
    again = tiny(dropout=0.5, checkpoint=True)
    again.load_state_dict(model.state_dict())
    assert not torch.equal(model(tokens), model(tokens))
    torch.manual_seed(4)
    expected = gradients(model, tokens)
    torch.manual_seed(4)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(again, tokens), strict=True))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def filled(parameter: torch.Tensor) -> torch.Tensor:
    fill_normal(parameter, 0.02, torch.Generator().manual_seed(3))
    return parameter


def test_layout_and_alignment_do_not_change_the_values() -> None:
    plain = filled(torch.empty(24, 40))
    assert torch.equal(plain, filled(torch.empty(40, 24).t()))
    assert torch.equal(plain, filled(torch.empty(24 * 40 + 1)[1:].view(24, 40)))
    assert torch.equal(plain.to(torch.bfloat16), filled(torch.empty(24, 40, dtype=torch.bfloat16)))
