"""What the steps of one wrapper share: plan, random numbers, every group in use, one way to leave, one end.

A wrapper says by its reducer who adds up which gradients. The rest of a step is the same for all of them:

    backward    forwards and backwards, in either step mode          step/backward.py
    declared    micro-batches and the keys of their random numbers   step/micro_batches.py
    reducer     the plan, and bundles of gradients, each with its group. ``leave`` gives the step up: one
                header tells the ranks of all groups                 step/reduction.py
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from instep.net.device import generators, marks_for
from instep.net.lane import Lane
from instep.net.process_group import Group
from instep.rng.keys import LeafKeys
from instep.step import optimizer_guard
from instep.step.backward import Backward
from instep.step.micro_batches import DataSource, DeclaredStep, MicroBatch
from instep.step.parameter_registry import ParameterRegistry
from instep.step.reduction import Reduction


class StepSession:
    """The steps of ``module`` by ``reducer``, until ``close``, or until ``wrapper`` is collected.

    ``hooks`` and ``lanes`` end with it, and so do the reducer's groups. Other arguments are as for
    ``LeafKeys`` and ``Backward``.
    """

    def __init__(
        self,
        wrapper: object,
        module: nn.Module,
        reducer: Reduction,
        registry: ParameterRegistry,
        device: torch.device,
        *,
        seed: int,
        blocks: Mapping[nn.Module, int] | None = None,
        broadcast: bool = False,
        records: bool = True,
        lanes: Iterable[Lane] = (),
    ) -> None:
        reducer.recorder.marks = reducer.recorder.marks or marks_for(device)
        keys = LeafKeys(module, seed, generators(device), blocks)
        self.declared = DeclaredStep(module, reducer, keys, registry)
        self.backward = Backward(self.declared, broadcast=broadcast, records=records)
        self.hooks = self.backward.hooks
        lanes = [*lanes, reducer.lane]
        self.close = weakref.finalize(wrapper, _release, self.hooks, lanes, reducer.groups)
        optimizer_guard.watch(reducer, registry.frozen, self.close)

    def micro_batches(
        self, counter: Any, num_micro_batches: int | DataSource, step: int | None
    ) -> Iterator[MicroBatch]:
        """Those of this rank in declared step ``step``, by default and afterwards ``counter.next_step``."""
        self.backward.step_mode = "declared"
        step = counter.next_step if step is None else step
        if (yield from self.declared.run(num_micro_batches, step)):
            counter.next_step = step + 1

    def abandon(self) -> None:
        """Give up the step that is under way, tell no rank, and close."""
        self.declared.abandon()
        self.close()


def _release(hooks: Iterable[Any], lanes: Iterable[Lane], groups: Iterable[Group]) -> None:
    for hook in hooks:
        hook.remove()
    for group in groups:
        group.give_up()  # a program that ends after an error must not wait for its peers
    for lane in lanes:
        lane.close()
    for group in groups:
        group.close()
