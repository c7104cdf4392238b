"""A forward that raised was timed until the next one without gradients ended, minutes later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import instep


def test_a_forward_that_raised_leaves_no_event_behind():
    model = instep.DataParallel(nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 4))
    with torch.no_grad():
        model(torch.zeros(1, 3))
    assert not [event for event in model.recorder.events if event.name == "forward"]
    model(torch.zeros(1, 3))
    assert len([event for event in model.recorder.events if event.name == "forward"]) == 1
    model.close()
