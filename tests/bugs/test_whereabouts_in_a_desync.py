"""Ranks that were out of step were told in which number, but not from which line of the program each came.

The line is what one looks for: the ``if`` around a backward that only some ranks take. One rank shows the
lines of all: on the terminal of several ranks the same table stood as many times.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.errors import Desync
from instep.replicate.wrapper import DataParallel
from tests.world import world


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_lines_of_all_ranks_stand_in_the_error(backend):
    world(3, backend=backend)(skips_an_optimizer_step)()


def skips_an_optimizer_step(mesh):
    model = DataParallel(nn.Linear(2, 1), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    if mesh.rank != 1:
        optimizer.step()
    optimizer.zero_grad()
    backward = lonely if mesh.rank == 1 else together
    with pytest.raises(Desync) as told:
        backward(model)
    model.close()
    sentence, *table = str(told.value).splitlines()
    assert "rank 1 is at optimizer step 0; ranks 0, 2: 1" in sentence
    if mesh.rank:
        assert not table and sentence.endswith(". Rank 0 shows where each rank stands")
        return
    head, *rows, last = table
    assert last.startswith("rank 1 is out of step. Each rank must call optimizer.step()")
    assert head.split() == ["rank", "where", "number", "shape", "site", "seconds", "state"]
    sites = {int(row.split()[0]): row for row in rows}
    assert sorted(sites) == [0, 1, 2]
    assert sites[1].endswith(" lonely") or " lonely " in sites[1]
    assert all(" together " in sites[rank] for rank in (0, 2))
    assert all("in the exchange of bucket 0" in row or "after the exchange" in row for row in rows)


def lonely(model):
    model(torch.ones(1, 2)).sum().backward()


def together(model):
    model(torch.ones(1, 2)).sum().backward()
