"""A hook speaks for one module; copies of the module are silent."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn

from instep.hook import Hook


def counting(module: nn.Module) -> list[str]:
    """Notes of every forward of ``module``."""
    notes: list[str] = []
    module.register_forward_pre_hook(Hook(lambda *_: notes.append("forward")))
    return notes


def test_a_hook_hands_on_what_it_is_given_and_what_comes_back():
    assert Hook(lambda a, b: a - b)(5, 2) == 3


def test_a_deep_copy_of_a_module_is_silent():
    module = nn.Linear(2, 2)
    notes = counting(module)
    copy.deepcopy(module)(torch.ones(1, 2))
    assert notes == []
    module(torch.ones(1, 2))
    assert notes == ["forward"]


def test_a_module_with_a_closure_for_a_hook_can_be_sent_to_a_child_process():
    module = nn.Linear(2, 2)
    notes = counting(module)
    arrived = ForkingPickler.loads(ForkingPickler.dumps(copy.deepcopy(module)))
    assert torch.equal(arrived(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert notes == ["forward"]
