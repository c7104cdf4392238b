"""One step of an optimizer whose work is divided: each rank updates its slices, then all get the new weights.

gather     where ``fully_shard`` has cut what is stepped whole, its owners get it (``matrices.py``)
update     ``local``, an optimizer over this rank's pieces, steps them
vote       did it go well on all ranks, and was it the same step? Then no rank uses the old weights any more
share      the new slices travel to whoever keeps all of the weights

After a failure between the update and the end of the exchange, ranks have weights of different steps, and no
further step is made.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from instep.errors import Desync, PeerLost
from instep.events import PARAMETER_UPDATE, Recorder
from instep.launch.rank_exit import mark_secondary
from instep.memory import bytes_of, tensor_of
from instep.net.process_group import Group
from instep.reduce.header import UPDATE
from instep.shard import checks
from instep.shard.checks import group_options, options_text
from instep.shard.flat_parameters import ShardedParameters
from instep.step.optimizer_guard import meeting_of, require_reduced
from instep.step.reduction import Reduction

Groups = Sequence[dict[str, Any]]
BROKEN = "the ranks' weights and moments are not of the same step any more: load both, or restart the run"
# How an update went on one rank; before it had changed anything: REFUSED, READY.
FINE, REFUSED, FAILED, READY = 0, 1, 2, 3


class ShardedUpdate:
    """Makes steps of the pieces of ``shards``, on all ranks of ``group`` or on none, until ``end`` is called.

    ``steps`` are those that it has made. ``broken`` says why weights and moments are not those of one step,
    "" if they are; it is set before they are written to, and cleared after.
    """

    def __init__(
        self, shards: ShardedParameters, group: Group, recorder: Recorder, end: weakref.finalize[Any, Any]
    ) -> None:
        self._shards, self._group, self._recorder, self._end = shards, group, recorder, end
        self.steps = 0
        self.broken = ""
        self._why_closed = ""

    def require_open(self) -> None:
        if not self._end.alive:
            raise RuntimeError(f"this ShardedOptimizer is closed{self._why_closed}: make another one")

    def require_sound(self) -> None:
        self.require_open()
        if self.broken:
            raise RuntimeError(f"this ShardedOptimizer cannot go on, because {self.broken}: {BROKEN}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around collective calls: a lost rank closes the optimizer, whose group is of no use without it."""
        try:
            yield
        except PeerLost as lost:
            self._why_closed = f", because {str(lost).splitlines()[0]}"
            self._end()
            raise

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
        self.require_sound()
        loss, raised, outcome = None, None, REFUSED
        groups = optimizer.param_groups
        vote = partial(self._vote, meeting_of(optimizer, self._group), groups)
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                require_reduced(optimizer)
            checks.require_usable(groups, set(map(id, self._shards.owned)))
            if (parameter := self._shards.moved()) is not None:
                raise checks.moved_error(groups, parameter)
            outcome = READY
        except BaseException as error:
            raised = error
        span = partial(self._recorder.span, PARAMETER_UPDATE, lane="host")
        if self._shards.matrices:
            vote(outcome, raised)
            with span(num_bytes=2 * self._shards.bytes_to_share), self.together():
                for matrices in self._shards.matrices:
                    matrices.gather(f"the weights and gradients of step {self.steps}")
        if outcome == READY:
            self.broken = f"step {self.steps} was not completed"
            try:
                with self._recorder.span("update", lane="compute"):
                    _step_pieces(self._shards, local, groups)
                outcome = FINE
            except BaseException as error:
                outcome, raised = FAILED, error
        if self._group.size > 1:
            with span(num_bytes=self._shards.bytes_to_share):
                vote(outcome, raised)
                with self.together():
                    self._shards.share(f"the new weights of step {self.steps}")
        elif raised is not None:
            self.broken = ""  # as with the plain optimizer: a loop that catches it may go on
            raise raised
        stepped = [p for p in self._shards.owned if p.grad is not None]
        if stepped:
            increment_version(stepped)  # a graph from before the step must not use the new values
        self.broken = ""
        self.steps += 1
        return loss

    def _vote(
        self, meeting: Reduction | None, groups: Groups, outcome: int, raised: BaseException | None
    ) -> None:
        """Raise on all ranks unless all make the same step, and none has ``raised``.

        A barrier too: when it returns, all ranks have come. Collective: 24 bytes. ``meeting`` is the
        reduction of the gradients, where one is over all ranks: one that makes no step goes on to its next
        exchange, and so it is met.

        Raises:
            Desync: on all ranks; also where one does something else at the ``meeting``.
            PeerLost: a rank did not come.
        """
        operation = f"the vote on step {self.steps}"
        presence = bytes(p.grad is not None for group in groups for p in group["params"])
        options = "; ".join(map(options_text, groups)).encode()
        words = [outcome, zlib.crc32(presence), zlib.crc32(options)]
        try:
            with self.together():
                if meeting is None:
                    mine, lengths = bytes_of(torch.tensor(words, device="cpu")), [24] * self._group.size
                    rows = self._group.all_gather_bytes(mine, operation, lengths=lengths)
                    votes = [tensor_of(row, torch.int64).tolist() for row in rows]
                else:
                    votes = meeting.rendezvous(UPDATE, operation, words)
        except (PeerLost, Desync) as told:
            if raised is None:
                raise
            raise raised from told
        ranks = (self._group if meeting is None else meeting.group).ranks
        failed = [str(rank) for rank, vote in zip(ranks, votes, strict=True) if vote[0] in (REFUSED, FAILED)]
        if failed:
            found = f"rank {', '.join(failed)} raised, its own traceback has the cause"
        else:
            found = _difference(ranks, votes)
        if found:
            changed = any(vote[0] in (FINE, FAILED) for vote in votes)
            self.broken = f"in step {self.steps} {found}" if changed else ""
            after = BROKEN if changed else "nothing was changed"
            error = Desync(f"step {self.steps} of the sharded optimizer: {found}; {after}")
            raise raised or (mark_secondary(error) if failed else error)


def _difference(ranks: Sequence[int], votes: Sequence[Sequence[int]]) -> str:
    """The first rank whose step is not that of the first, and why; "" if all make the same one."""
    options = "other options in its parameter groups, the learning rate for instance,"
    for k, what in (1, "gradients for other parameters"), (2, options):
        for rank, vote in zip(ranks, votes, strict=True):
            if vote[k] != votes[0][k]:
                return f"rank {rank} has {what} than rank {ranks[0]}: every rank has to make the same step"
    return ""


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
    for group, own in zip(groups, local.param_groups, strict=True):
        own.update(group_options(group))
    try:
        shards.set_gradients()
        with torch.no_grad(), nullcontext() if shards.cost else _rounded_alike(local):
            local.step()
    finally:
        shards.drop_gradients()
    for group, own in zip(groups, local.param_groups, strict=True):
        group.update(group_options(own))  # some count or adapt there
