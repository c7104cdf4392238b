"""``x.conj()`` and the imaginary part of one are views whose memory has other values than they show.

As a parameter such a view cannot be seen as bytes, so wrapping ended in torch's own words, for models that
torch's DDP trains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.memory import as_bytes
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import numbers
from tests.replicate.replicas import assert_backwards, equal_everywhere
from tests.world import world


class Lazy(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        values = numbers(6, key=key, dtype=torch.complex64)
        self.conjugate = nn.Parameter(values.conj())
        self.negative = nn.Parameter(values.clone().conj().imag)
        self.tied = nn.Parameter(numbers(6, key=key, dtype=torch.complex64))
        self.register_buffer("its_conjugate", self.tied.detach().conj())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conjugate.imag + self.negative * self.tied.imag + self.its_conjugate.imag


@world(2)
def test_parameters_that_are_lazy_are_trained_and_tied_ones_stay_tied(mesh: Mesh) -> None:
    expected = [x.resolve_conj().resolve_neg() for x in Lazy("0").state_dict().values()]
    model = DataParallel(Lazy(str(mesh.rank)), process_group=mesh)
    module = model.module
    for x, y in zip(module.state_dict().values(), expected, strict=True):
        assert torch.equal(x, y)
    assert_backwards(mesh, model, times=2)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert equal_everywhere(mesh, module.state_dict().values())
    assert torch.equal(module.its_conjugate, module.tied.detach().conj())


def test_the_bytes_of_a_lazy_view_are_those_of_what_it_shows() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert as_bytes(x).tolist() == as_bytes(torch.tensor([1 - 2j, 3 + 1j])).tolist()
    assert as_bytes(x.imag).tolist() == as_bytes(torch.tensor([-2.0, 1.0])).tolist()
