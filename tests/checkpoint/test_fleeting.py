"""A canary of a model that is on the meta device: the same hash, and never all of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.checkpoint.canary import ParametersOnDemand, canary
from instep.models.config import GPTConfig
from instep.models.transformer import GPT

CPU = torch.device("cpu")
SMALL = {"layers": 3, "width": 32, "heads": 2, "context": 8}
TOKENS = torch.arange(18).view(2, 9)


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def on_meta(config: GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.2}, {"checkpoint": True}, {"tied": False}], ids=str)
def test_it_is_the_canary_of_the_model_in_memory(changes: dict[str, object]) -> None:
    config = GPTConfig(**SMALL, **changes)  # type: ignore[arg-type]
    module, state = on_meta(config), torch.get_rng_state()
    expected = canary(GPT(config), loss_of, seed=3, device=CPU)
    torch.set_rng_state(state)
    assert canary(module, loss_of, seed=3, device=CPU) == expected
    assert canary(module, loss_of, seed=4, device=CPU) != expected
    assert all(p.is_meta for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_weights_have_no_gradient_and_count_all_the_same() -> None:
    modules = GPT(GPTConfig(**SMALL)), on_meta(GPTConfig(**SMALL))
    before = canary(modules[0], loss_of, seed=0, device=CPU)
    for module in modules:
        module.get_parameter("blocks.1.attention.qkv.weight").requires_grad_(False)
    one, other = (canary(module, loss_of, seed=0, device=CPU) for module in modules)
    assert one == other != before


def test_weights_of_one_unit_and_what_is_in_none_are_there_at_a_time() -> None:
    module = on_meta(GPTConfig(**SMALL))
    units: list[set[str]] = []

    def fill(name: str, x: Tensor) -> None:
        x.fill_(0.01)

    fleeting = ParametersOnDemand(module, fill, CPU)

    def there(*ignored: object) -> None:
        here = (n for n, p in module.named_parameters() if p.untyped_storage().nbytes() >= p.nbytes > 4)
        units.append({".".join(n.split(".")[:2]) for n in here if n.startswith("blocks.")})

    for m in module.modules():
        m.register_forward_hook(there)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(there)
    _, gradients = fleeting.gradients(loss_of)
    assert len(gradients) == len(list(module.parameters()))
    assert max(map(len, units)) == 1
    assert all(p.grad is None for p in module.parameters())


def test_a_second_gradient_in_one_backward_is_an_error() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    fleeting = ParametersOnDemand(module, lambda name, x: x.fill_(1.0), CPU)

    def twice(model: nn.Module) -> Tensor:
        loss = model(torch.ones(2, 3)).sum()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match="has got a second gradient in one backward"):
        fleeting.gradients(twice)
