"""The transformer: shapes, causality, weights by name, blocks, recomputation."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.models.config import GPTConfig, num_parameters
from instep.models.transformer import GPT, Block, Embedding, Head

TINY: dict[str, Any] = {"vocab_size": 32, "context": 8, "layers": 2, "width": 16, "heads": 2}


def tiny(**changes: float) -> GPT:
    return GPT(GPTConfig(**TINY | changes))


def init_all(model: GPT, names: list[str]) -> None:
    parameters = dict(model.named_parameters())
    for name in names:
        model.init_parameter(name, parameters[name], torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize("shape", [(3, 8), (1, 1), (2, 5)])
def test_logits_have_one_row_per_token(shape: tuple[int, int]) -> None:
    assert tiny()(torch.randint(32, shape)).shape == (*shape, 32)


def test_a_window_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"T <= context\(8\), got \(3, 9\)"):
        tiny()(torch.randint(32, (3, 9)))


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
    assert weights["embedding.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.3.feed_forward.up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    for residual in ("attention.out", "feed_forward.down"):
        assert weights[f"blocks.3.{residual}.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_an_untrained_model_expects_nothing() -> None:
    torch.manual_seed(0)
    tokens, targets = torch.randint(32, (2, 50, 8))
    loss = F.cross_entropy(tiny()(tokens).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(torch.tensor(32.0).log().item(), abs=0.1)


def test_embedding_blocks_and_head_declare_themselves() -> None:
    declared = [type(module) for module in tiny().modules() if getattr(module, "rng_block", False)]
    assert declared == [Embedding, Block, Block, Head]


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


def test_a_model_on_the_meta_device_costs_nothing() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(context=2048, width=2560, layers=2, heads=32))
    assert all(parameter.is_meta for parameter in model.parameters())
