"""What the step layer refuses in words: each with the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from tests.kinds import KINDS, WRAPPERS
from tests.parity import world_of_one


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().mean().backward()


def under_compiled_autograd(model: nn.Module) -> None:
    with compiled_autograd._enable(partial(torch.compile, backend="eager")):
        backward(model)


REFUSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "compiled autograd": (under_compiled_autograd, r"set torch\._dynamo\.config\.compiled_autograd = False"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")  # of what torch compiles
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_is_refused_and_the_model_trains_on(kind: str, case: str) -> None:
    use, words = REFUSED[case]
    model, _ = KINDS[kind].make(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), world_of_one())
    with pytest.raises((RuntimeError, ValueError), match=words):
        use(model)
    model.zero_grad()
    backward(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.close()
