"""One step of an optimizer whose work is divided: each rank updates its slices, then all get the new weights.

gather     where ``fully_shard`` has cut what is stepped whole, its owners get it (``matrices.py``)
update     ``local``, an optimizer over this rank's pieces, steps them
vote       did it go well on all ranks, and was it the same step? Then no rank uses the old weights any more
share      the new slices travel to whoever keeps all of the weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Adafactor, Optimizer

from instep.events import PARAMETER_UPDATE, Recorder
from instep.shard import checks
from instep.shard.checks import group_options
from instep.shard.flat_parameters import ShardedParameters
from instep.shard.optimizer_status import FAILED, FINE, READY, REFUSED, OptimizerStatus, vote
from instep.step.optimizer_guard import meeting_of, require_reduced

Groups = Sequence[dict[str, Any]]


class ShardedUpdate:
    """Makes steps of the pieces of ``shards``, on all ranks or on none."""

    def __init__(self, shards: ShardedParameters, status: OptimizerStatus, recorder: Recorder) -> None:
        self._shards, self._status, self._recorder = shards, status, recorder

    def make(
        self,
        optimizer: Optimizer,
        local: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """``local`` steps its pieces of the parameters of ``optimizer``, with the options of its groups.

        Returns what ``closure()``, called first, has returned. Collective.

        Raises:
            as ``ShardedOptimizer.step``.
        """
        self._status.require_sound()
        self._status.meeting = meeting_of(optimizer, self._status.group)
        try:
            return self._make(optimizer, local, closure)
        finally:
            self._status.meeting = None  # else a reduction, with all its memory, outlives its wrapper

    def _make(
        self,
        optimizer: Optimizer,
        local: Optimizer,
        closure: Callable[[], Any] | None,
    ) -> Any:
        loss, raised, outcome = None, None, REFUSED
        groups = optimizer.param_groups
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                require_reduced(optimizer)
            self._check(groups)
            outcome = READY
        except BaseException as error:
            raised = error
        if self._shards.matrices:
            self._gather(outcome, raised, groups)
        if outcome == READY:
            outcome, raised = self._attempt(local, groups)
        if self._status.group.size > 1:
            self._exchange(outcome, raised, groups)
        elif raised is not None:
            self._status.broken = ""  # as with the plain optimizer: a loop that catches it may go on
            raise raised
        stepped = [p for p in self._shards.owned if p.grad is not None]
        if stepped:
            increment_version(stepped)  # a graph from before the step must not use the new values
        self._status.broken = ""
        self._status.steps += 1
        return loss

    def _check(self, groups: Groups) -> None:
        """Raise, before anything is changed, if this step cannot be made."""
        checks.require_usable(groups, set(map(id, self._shards.owned)))
        if (parameter := self._shards.moved()) is not None:
            raise checks.moved_error(groups, parameter)

    def _gather(self, outcome: int, raised: BaseException | None, groups: Groups) -> None:
        """Owners get what they step, or all ranks raise."""
        self._status.vote(vote(outcome, groups), raised)
        num_bytes = 2 * self._shards.bytes_to_share
        with self._recorder.span(PARAMETER_UPDATE, lane="host", num_bytes=num_bytes), self._status.together():
            for matrices in self._shards.matrices:
                matrices.gather(f"the weights and gradients of step {self._status.steps}")

    def _attempt(self, local: Optimizer, groups: Groups) -> tuple[int, BaseException | None]:
        """How it went, and what it raised."""
        self._status.broken = f"step {self._status.steps} was not completed"
        try:
            with self._recorder.span("update", lane="compute"):
                _step_pieces(self._shards, local, groups)
        except BaseException as error:
            return FAILED, error
        return FINE, None

    def _exchange(self, outcome: int, raised: BaseException | None, groups: Groups) -> None:
        """All ranks get the new values, or all raise."""
        num_bytes = self._shards.bytes_to_share
        with self._recorder.span(PARAMETER_UPDATE, lane="host", num_bytes=num_bytes):
            self._status.vote(vote(outcome, groups), raised)
            with self._status.together():
                self._shards.share(f"the new weights of step {self._status.steps}")


@contextmanager
def _rounded_alike(local: Optimizer) -> Iterator[None]:
    """Inside, no bits depend on how ``local``'s tensors are cut: where they would, there is one thread."""
    threads = torch.get_num_threads()
    if not checks.rounds_by_cut(local.param_groups):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _step_pieces(shards: ShardedParameters, local: Optimizer, groups: Groups) -> None:
    """``local`` steps the pieces of ``shards``, with the options that ``groups`` have now."""
    taken = [_taken_from_first(local, group) for group in groups]
    for group, own, alike in zip(groups, local.param_groups, taken, strict=True):
        own.update({**group_options(group), **alike})
    try:
        shards.set_gradients()
        with torch.no_grad(), nullcontext() if shards.cost else _rounded_alike(local):
            local.step()
    finally:
        shards.drop_gradients()
    for group, own, alike in zip(groups, local.param_groups, taken, strict=True):
        now = group_options(own)  # some count or adapt there
        group.update({key: value for key, value in now.items() if key not in alike})


def _taken_from_first(local: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Options that torch takes from the first parameter that is stepped: of all, not of a rank's pieces.

    Adafactor's first eps, unless it was given, is that of the first parameter's dtype, for the whole group;
    in its foreach form, of the first of the dtypes into which torch sorts them.
    """
    stepped = [p for p in group["params"] if p.grad is not None]
    if not isinstance(local, Adafactor) or group["eps"][0] is not None or not stepped:
        return {}
    dtype = stepped[0].dtype
    if group["foreach"] or (group["foreach"] is None and stepped[0].is_cuda):
        dtype = next(iter(local._group_tensors_by_device_and_dtype([stepped])))[1]
    return {"eps": (torch.finfo(dtype).eps, group["eps"][1])}
