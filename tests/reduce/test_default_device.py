"""A script may call torch.set_default_device("cuda"): what is ours stays on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import instep
from instep.net.process_group import alone
from instep.run.step import share


class Named(nn.Linear):
    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(generator=generator)


def test_the_default_device_is_for_the_script_s_tensors_alone() -> None:
    """Generators, norms and the order of rows are on the CPU, wherever the script makes its tensors."""
    net, again = Named(3, 2), Named(3, 2)
    instep.initialize(again, seed=1)
    net(torch.ones(3)).sum().backward()
    rows = torch.tensor([2.0, 1.0, 1.0])
    with torch.device("meta"):
        instep.initialize(net, seed=1)
        norm = instep.clip_grad_norm_(net.parameters(), 1.0)
        gathered = instep.gather(rows, index=[1, 0, 0])
        told = share({"stop": 1.0}, [2.0], alone())
    assert torch.equal(net.weight, again.weight)
    assert norm.item() == 8**0.5
    assert gathered.tolist() == [1.0, 2.0]
    assert told == ({"stop": 1.0}, [[2.0]])
