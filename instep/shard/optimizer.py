"""Stage 1: every rank has all weights and all gradients, and a W-th of the optimizer's state.

Each updates the part of the weights that it has state for, then all get the new weights from their owners.

    rank 0   |= forward, backward =|~ gradients ~|= update 0 =|~ weights ~|= forward ...
    rank 1   |= forward, backward =|~ gradients ~|= update 1 =|~ weights ~|= forward ...

Bytes per parameter with Adam in float32: 4 for its weight, 4 for its gradient, 8 / W for its moments, where
plain data parallelism has 4 + 4 + 8. The update takes a W-th of the time. The price is an all-gather of the
weights beside the all-reduce of the gradients: 3 S (W-1)/W bytes per rank instead of 2, S bytes of weights.

In a step:

    gather     where ``fully_shard`` has cut what is stepped whole, its owners get it (``matrices.py``)
    update     ``optimizer_cls`` over this rank's pieces steps them
    vote       did it go well on all ranks, and was it the same step? Then no rank uses the old weights
    share      the new slices travel to whoever keeps all of the weights

After a failure between the update and the end of the exchange, ranks have weights of different steps, and no
further step is made.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from instep.errors import Desync, PeerLost
from instep.events import PARAMETER_UPDATE
from instep.launch.rank_exit import mark_secondary
from instep.memory import bytes_of, tensor_of
from instep.mesh.join import find_ranks
from instep.mesh.mesh import Mesh, mesh_for_replicas
from instep.net.agree import all_or_none, require_same_lines
from instep.net.process_group import Group
from instep.reduce.header import UPDATE
from instep.reduce.owners import entry, nobody
from instep.shard import checks
from instep.shard.checks import describe_groups, group_options, options_text
from instep.shard.flat_parameters import FlatParameters, ShardedParameters
from instep.shard.optimizer_state import (
    adopt_groups,
    format_sharded,
    gather_state,
    local_state,
    numbered,
    saved_lines,
)
from instep.shard.shard_groups import mesh_for_shards, num_shard_groups, shard_group_of
from instep.shard.unit import Unit
from instep.state import homes
from instep.state.elementwise import rounds_by_cut
from instep.state.homes import DividedOptimizer
from instep.state.shards import elements
from instep.step.optimizer_guard import meeting_of, require_every_rank_steps
from instep.step.parameter_registry import requiring
from instep.step.reduction import Reduction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


MAKING = "the making of a sharded optimizer"
OPTIMIZERS = "sharded optimizers"
LOADING = "the loading of an optimizer state"
BROKEN = "the ranks' weights and moments are not of the same step any more: load both, or restart the run"
# How an update went on one rank; before it had changed anything: REFUSED, READY.
FINE, REFUSED, FAILED, READY = 0, 1, 2, 3


class ShardedOptimizer(Optimizer):
    """``optimizer_cls`` over ``params``, with its state and its update divided among the ranks.

    At construction: ranks compare parameters, groups and options. The trainable parameters move into flat
    memory, one per dtype and device, with the values of the group's first rank; they stay the same
    ``Parameter`` objects, but what aliased their memory (a view, a pointer) does not follow. The flat memory
    is cut into W equal slices on edges of 4096 elements. Frozen parameters stay where they are.

    In ``step``: the gradients, which have to be reduced already (``DataParallel`` does) and are full on all
    ranks, are used in place. Each rank's ``optimizer_cls`` steps the pieces of parameters in its slice, with
    the groups' options of this moment. One message of 24 bytes per rank tells whether that went well
    everywhere; then the new weights travel: S (W-1)/W bytes per rank in one step, or, where ranks share
    memory (backend "shm"), as many written to the other ranks' memory and a barrier. World size 1 does
    none of this.

    After it: all ranks have the same weights, for the elementwise classes of torch.optim the bits that
    ``optimizer_cls`` itself gives. In float32 and float64 all implementations give them however a tensor is
    cut (torch 2.13, AVX-512), and in bfloat16 and float16 those with one thread. With several threads per
    rank, loops (all but ``fused=True``) would round some elements of these in another way, depending on where
    a tensor is cut: so they make the update on one thread, for any number of ranks, and give the bits that
    ``optimizer_cls`` has on one thread. Fused SGD with momentum differs there from run to run by itself.

    Memory per rank of Adam in float32: 8 + 8 / W bytes per parameter instead of 16.

    Other classes (Muon, Adafactor, your own) get whole parameters, each on one rank, its owner: right for all
    that treat every parameter on its own. Owners are balanced by the work of a step, for Muon that of Newton
    and Schulz. Flat memory is padded to the owner with most. LBFGS and SparseAdam are refused.

    ``param_groups`` hold your own parameters, so schedulers, gradient clipping and gradient scalers work as
    ever. ``state`` shows nothing unless there is one rank; ``state_dict`` gathers it.

    Parameters are views of one memory: to save a single one without the others, clone it. With backend "shm"
    it is memory that a forked child shares, not copies.

    Over the shards of a module of ``fully_shard`` nothing moves: an elementwise class steps them in place, as
    a plain ``optimizer_cls`` would, and has a whole ``state_dict`` beside. For another class the owner of a
    parameter gathers its weights and its gradient for the step, and the other ranks get their new shards.

    Of the parameters of a ``Pipeline`` each rank steps a part of those of its layers: they are divided among
    the ranks that have the same ones. ``state_dict`` is that of all layers.

    Args:
        params: as for ``optimizer_cls``: parameters, groups, or named parameters.
        optimizer_cls: the class, of torch or your own.
        process_group: a mesh (its ``dp`` axis, or its ``shard`` axis if that is larger than 1),
            ``mesh[axis]``, a torch process group; None means the registered mesh, else torch's default
            group, else this process alone.
        kwargs: the options of ``optimizer_cls``.

    Raises:
        ValueError: the ranks differ, the class cannot be sharded, or a parameter has another sharded
            optimizer already, or is given twice.
        TypeError: as ``optimizer_cls``.
        PeerLost: a rank did not come.

    Example:
        >>> model = instep.DataParallel(model)
        >>> optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        >>> loss_function(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> len(optimizer.shards.held), len(optimizer.local_state), len(optimizer.state)  # of one rank: all 6
        (6, 6, 6)
        >>> sorted(optimizer.state_dict())
        ['param_groups', 'state']
    """

    __module__ = "instep"
    shards: ShardedParameters  # the memory of its parameters, and this rank's pieces of them

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        process_group: Mesh | ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self._local: Optimizer | None = None  # until it is there, methods of the base fill ``param_groups``
        self._optimizer_cls = optimizer_cls
        self._given = kwargs
        self._to_take: list[Tensor] = []  # what it had before a ``_join`` that has not succeeded yet

        def prepare() -> None:
            checks.require_shardable(optimizer_cls, kwargs)
            Optimizer.__init__(self, params, dict(kwargs))
            self._require_takeable(self.param_groups)

        self._take_part(process_group, prepare, again=False)

    def _take_part(
        self, process_group: Mesh | ProcessGroup | None, prepare: Callable[[], None], *, again: bool
    ) -> None:
        """Make the local optimizer in a new group, with nothing of a state yet. Collective.

        Ranks have the same class, options and groups, and ``prepare()`` succeeds on all, or all raise.
        """
        self._asked, process_group = process_group, mesh_for_shards(process_group)
        self.group, self.recorder = find_ranks(
            shard_group_of(process_group), what="making a ShardedOptimizer"
        )
        # They make the same steps, and this rank is in one of them.
        self.num_shard_groups = num_shard_groups(process_group)
        kind = self._optimizer_cls
        self.shards = ShardedParameters(self.group, checks.stepping_cost(kind), aligned=not again)
        self._release = weakref.finalize(self, _release, self.group, self.shards.owned)
        self._steps = 0  # that it has made
        self._broken = ""  # why weights and moments are not those of one step: set before they are written to
        self._why_closed = ""
        try:
            all_or_none(self.group, MAKING, prepare, errors=(ValueError,))
            groups = self.param_groups
            if again:  # options are those of each rank's last step, a learning rate say, until a state is put
                groups = [{"params": group["params"]} for group in groups]
            lines = [f"class {kind.__module__}.{kind.__qualname__}", f"options {options_text(self._given)}"]
            require_same_lines(self._everyone, OPTIMIZERS, [*lines, *describe_groups(groups)])
            pieces = self._take(0)

            def make() -> None:
                self._local = kind(pieces, **self._given)

            self._agree_made(make)
            self.defaults = self._inner.defaults
        except BaseException:
            self.close()
            raise

    @property
    def _everyone(self) -> Group:
        """The ranks that have all of the state together: those of ``group``, and of other stages."""
        lived_in = homes.homes(self._parameters())
        return next((there.everyone for there in lived_in if there.replicas is not None), self.group)

    @property
    def local_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """What ``optimizer_cls`` keeps for this rank's pieces, by ``ParameterShard.tensor``."""
        return self._inner.state

    @property
    def state(self) -> Any:
        """By parameter, what ``optimizer_cls`` keeps for it; ``RuntimeError`` where there are more ranks."""
        if (num_ranks := self._everyone.size) > 1:
            raise RuntimeError(
                f"optimizer.state is spread over {num_ranks} ranks: call state_dict() on every rank for the "
                "whole of it, or sharded_state_dict() for this rank's pieces"
            )
        state, held = self._inner.state, self.shards.held.values()
        return {x.parameter: state[x.tensor] for x in held if x.tensor in state}

    @state.setter
    def state(self, value: Any) -> None:
        if self._local is not None:
            raise RuntimeError("optimizer.state cannot be replaced: it is sharded; use load_state_dict()")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, as ``optimizer_cls`` makes it. Collective.

        Parameters without a gradient are left alone; which have one must be the same on all ranks.

        Args:
            closure: as for ``optimizer_cls``: computes the loss again, with ``backward``, and returns it.

        Returns:
            What ``closure`` has returned, or None.

        Raises:
            TypeError: a gradient is sparse.
            ValueError: a parameter was unfrozen, or its memory replaced, since construction.
            Desync: another rank raised, or has other options or gradients. Where weights or moments were
                changed already, every further step raises until a state is loaded.
            PeerLost: a rank did not come.
        """
        self._require_sound()
        loss, raised, outcome = None, None, REFUSED
        groups = self.param_groups
        vote = partial(self._vote, meeting_of(self, self.group))
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            checks.require_usable(groups, self.shards.owned)
            outcome = READY
        except BaseException as error:
            raised = error
        span = partial(self.recorder.span, PARAMETER_UPDATE, lane="host")
        if self.shards.matrices:
            vote(outcome, raised)
            with span(num_bytes=2 * self.shards.bytes_to_share), self._together():
                for matrices in self.shards.matrices:
                    matrices.gather(f"the weights and gradients of step {self._steps}")
        if outcome == READY:
            self._broken = f"step {self._steps} was not completed"
            try:
                with self.recorder.span("update", lane="compute"):
                    _step_pieces(self.shards, self._inner, groups)
                outcome = FINE
            except BaseException as error:
                outcome, raised = FAILED, error
        if self.group.size > 1:
            with span(num_bytes=self.shards.bytes_to_share):
                vote(outcome, raised)
                with self._together():
                    self.shards.share(f"the new weights of step {self._steps}")
        elif raised is not None:
            self._broken = ""  # as with the plain optimizer: a loop that catches it may go on
            raise raised
        stepped = [p for p in self.shards.owned if p.grad is not None]
        if stepped:
            increment_version(stepped)  # a graph from before the step must not use the new values
        self._broken = ""
        self._steps += 1
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also update these parameters, in flat memory of their own. Collective, between two steps.

        Args:
            param_group: as for ``optimizer_cls``: ``{"params": [...], "lr": 1e-4}``.

        Raises:
            ValueError: as at construction; the optimizer is then as before, unless ``optimizer_cls`` itself
                refuses the group, after which every step raises until a state is loaded.
            PeerLost: a rank did not come.

        Example:
            >>> head = torch.nn.Linear(4, 2)
            >>> optimizer.add_param_group({"params": list(head.parameters()), "lr": 1e-4})
        """
        if self._local is None:
            super().add_param_group(param_group)
            return
        self._require_sound()
        before = len(self.param_groups)

        def prepare() -> None:
            Optimizer.add_param_group(self, param_group)
            self._require_takeable(self.param_groups[before:])

        with self._together():
            try:
                all_or_none(self.group, MAKING, prepare, errors=(ValueError,))
                require_same_lines(self._everyone, OPTIMIZERS, describe_groups(self.param_groups))
            except BaseException:
                del self.param_groups[before:]
                raise
            self._broken = "adding a parameter group failed half-way"
            (added,) = self._take(before)
            self._agree_made(lambda: self._inner.add_param_group(added))
            self._broken = ""

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain ``optimizer_cls`` over the same parameters has it. Collective.

        Needs memory for all of it on every rank: 8 bytes per parameter for Adam in float32.

        Raises:
            RuntimeError: the optimizer is closed, or a step was not completed on some rank.
            PeerLost: a rank did not come.
        """
        self._require_sound()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._together(), self.recorder.span("optimizer state", lane="host"):
            states = gather_state(self.shards, self._inner, self._parameters(), self._everyone)
        saved = {"state": states, "param_groups": numbered(self.param_groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's pieces with their ranges, without communication: views, as in a plain state dict.

        ``{"sharded": {"rank", "world_size"}, "pieces": [{"parameter", "first", "last", "state"}, ...],
        "param_groups": [...]}``; ranges count elements in logical order.

        Raises:
            RuntimeError: the optimizer is closed, or a step was not completed on some rank.

        Example:
            >>> [(piece["first"], piece["last"]) for piece in optimizer.sharded_state_dict()["pieces"]][:2]
            [(0, 768), (0, 96)]
        """
        self._require_sound()
        held, state = self.shards.held, self._inner.state
        states = {number: dict(state.get(x.tensor, {})) for number, x in held.items()}
        return format_sharded(held, states, self.param_groups, self.group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: whole, of any world size or of ``optimizer_cls`` itself, or sharded. Collective.

        State of frozen parameters is not kept.

        Args:
            state_dict: of ``state_dict``, ``sharded_state_dict`` or a plain optimizer; it is copied.

        Raises:
            ValueError: on all ranks, and nothing is changed: it does not fit, it was cut for other ranks,
                or the ranks pass different ones. After any other error
                every step raises until one is loaded.
            PeerLost: a rank did not come.

        Example:
            >>> optimizer.load_state_dict(optimizer.state_dict())
        """
        self._require_open()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict

        def prepare() -> dict[str, Any]:
            return local_state(
                state_dict, self.shards.held, self.param_groups, self.group, cut=self.shards.cost is None
            )

        with self._together():
            prepared = all_or_none(self._everyone, LOADING, prepare, errors=(ValueError,))
            require_same_lines(self._everyone, "optimizer states to load", saved_lines(state_dict))
            self._broken = "loading a state failed half-way"
            put = partial(self._inner.load_state_dict, prepared)
            all_or_none(self._everyone, LOADING, put, errors=(ValueError,))
        adopt_groups(self.param_groups, self._inner.param_groups, state_dict["param_groups"])
        self._broken = ""
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def pieces(self) -> Iterator[tuple[Tensor, int, int, Tensor]]:
        """What this rank holds of the weights.

        All ranks' pieces together are every trainable parameter, once: an average of the weights that each
        rank keeps for its own pieces costs a W-th of a whole one.

        Yields:
            (parameter, first, last, values): elements ``first`` to ``last`` (exclusive) of the parameter, in
            logical order; ``values`` are these, flat (last - first,), to be read.

        Raises:
            RuntimeError: the optimizer is closed, or a step was not completed on some rank.

        Example:
            >>> means = [values.clone() for _, _, _, values in optimizer.pieces()]
            >>> for mean, (_, _, _, values) in zip(means, optimizer.pieces()):  # after each step
            ...     mean = mean.lerp_(values, 0.01)
        """
        self._require_sound()
        spaces = (*homes.homes(self.shards.owned), *self.shards.spaces)
        there = (x for space in spaces if isinstance(space, Unit | FlatParameters) for x in space.held)
        for held in {x.parameter: x for x in there if x.parameter in self.shards.owned}.values():
            values = held.tensor.detach()
            yield held.parameter, held.first, held.last, elements(values, 0, values.numel())

    def close(self) -> None:
        """Give the group back; the parameters are free for another optimizer. Also happens when collected.

        Example:
            >>> state = optimizer.state_dict()
            >>> optimizer.close()
            >>> plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
            >>> plain.load_state_dict(state)
        """
        self._release()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardedOptimizer holds a process group and one rank's part of the state: it cannot be copied "
            "or pickled; keep its state_dict()"
        )

    def __instep_state__(self) -> DividedOptimizer:
        def load(states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
            self.load_state_dict(format_sharded(self.shards.held, states, groups, self.group))

        return DividedOptimizer(
            group=self.group,
            locals=(self._inner,),
            held=self.shards.held,
            homes=self.shards.spaces,
            num_replicas=self.num_shard_groups,
            load=load,
            leave=self._leave,
            join=self._join,
        )

    def _require_open(self) -> None:
        if not self._release.alive:
            raise RuntimeError(f"this ShardedOptimizer is closed{self._why_closed}: make another one")

    def _require_sound(self) -> None:
        self._require_open()
        if self._broken:
            raise RuntimeError(f"this ShardedOptimizer cannot go on, because {self._broken}: {BROKEN}")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around collective calls: a lost rank closes the optimizer, whose group is of no use without it."""
        try:
            yield
        except PeerLost as lost:
            self._why_closed = f", because {str(lost).splitlines()[0]}"
            self.close()
            raise

    def _vote(self, meeting: Reduction | None, outcome: int, raised: BaseException | None) -> None:
        """Raise on all ranks unless all make the same step, and none has ``raised``.

        A barrier too: when it returns, all ranks have come. Collective: 24 bytes. ``meeting`` is the
        reduction of the gradients, where one is over all ranks: a rank that skips the step reaches its next
        exchange instead, and the mismatch shows there.

        Raises:
            Desync: on all ranks; also where one does something else at the ``meeting``.
            PeerLost: a rank did not come.
        """
        operation = f"the vote on step {self._steps}"
        words = [outcome, *checks.describe_step(self.param_groups)]
        try:
            with self._together():
                if meeting is None:
                    mine, lengths = bytes_of(torch.tensor(words, device="cpu")), [24] * self.group.size
                    rows = self.group.all_gather_bytes(mine, operation, lengths=lengths)
                    votes = [tensor_of(row, torch.int64).tolist() for row in rows]
                else:
                    votes = meeting.rendezvous(UPDATE, operation, words)
        except (PeerLost, Desync) as told:
            if raised is None:
                raise
            raise raised from told
        ranks = (self.group if meeting is None else meeting.group).ranks
        failed = [str(rank) for rank, vote in zip(ranks, votes, strict=True) if vote[0] in (REFUSED, FAILED)]
        found = f"rank {', '.join(failed)} raised, its own traceback has the cause" if failed else ""
        options = "other options in its parameter groups, the learning rate for instance,"
        for k, what in (1, "gradients for other parameters"), (2, options):
            for rank, vote in zip(ranks, votes, strict=True):
                if not found and vote[k] != votes[0][k]:
                    found = (
                        f"rank {rank} has {what} than rank {ranks[0]}: every rank has to make the same step"
                    )
        if found:
            changed = any(vote[0] in (FINE, FAILED) for vote in votes)
            self._broken = f"in step {self._steps} {found}" if changed else ""
            after = BROKEN if changed else "nothing was changed"
            error = Desync(f"step {self._steps} of the sharded optimizer: {found}; {after}")
            raise raised or (mark_secondary(error) if failed else error)

    def _leave(self) -> None:
        self.close()
        self._inner.state.clear()

    def _join(self, mesh: Mesh) -> None:
        trained, parameters = self._to_take or [*self.shards.owned], self._parameters()
        self._to_take, known = trained, set(map(id, trained))
        with requiring(trained, [p for p in parameters if id(p) not in known]):
            self._take_part(mesh, partial(self._require_takeable, self.param_groups), again=True)
        self._to_take = []

    @property
    def _inner(self) -> Optimizer:
        assert self._local is not None
        return self._local

    def _require_takeable(self, groups: list[dict[str, Any]]) -> None:
        """Raise ``ValueError`` unless the parameters of these can be sharded here."""
        parameters = [p for group in groups for p in group["params"]]
        checks.require_given_eps(self._optimizer_cls, groups)
        if self._asked is None and self._everyone is self.group:
            mesh_for_replicas()  # which raises if its other axes have no use
        checks.require_new(parameters)
        require_every_rank_steps(parameters)
        checks.require_homes(parameters, self.group, checks.stepping_cost(self._optimizer_cls))

    def _take(self, first_group: int) -> list[dict[str, Any]]:
        """The parameters of the groups from ``first_group`` on move; the groups, with this rank's pieces."""
        pieces = self.shards.take(self.param_groups, first_group)
        for p in self.shards.owned:
            entry(p).optimizer = weakref.ref(self)
        groups = self.param_groups[first_group:]
        return [{**group_options(group), "params": own} for group, own in zip(groups, pieces, strict=True)]

    def _agree_made(self, make: Callable[[], None]) -> None:
        """The local optimizers take their pieces, which some rank's may refuse, or all raise."""
        all_or_none(self.group, "the making of local optimizers", make, errors=(ValueError,))
        for matrices in self.shards.matrices:
            matrices.release()
        for group, local in zip(self.param_groups, self._inner.param_groups, strict=True):
            for key, value in group_options(local).items():  # defaults, for code that looks them up
                group.setdefault(key, value)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def _step_pieces(shards: ShardedParameters, local: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """``local`` steps the pieces of ``shards``, with the options that ``groups`` have now.

    On one thread, where the bits would depend on how parameters are cut.
    """
    for group, own in zip(groups, local.param_groups, strict=True):
        own.update(group_options(group))
    num_threads = torch.get_num_threads()
    on_one = not shards.cost and rounds_by_cut(local.param_groups)
    try:
        if on_one:
            torch.set_num_threads(1)
        shards.set_gradients()
        with torch.no_grad():
            local.step()
    finally:
        if on_one:
            torch.set_num_threads(num_threads)
        for held in shards.held.values():
            held.tensor.grad = None  # pieces keep no gradient alive
    for group, own in zip(groups, local.param_groups, strict=True):
        group.update(group_options(own))  # some count or adapt there


def _release(group: Group, parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        entry(p).optimizer = nobody
    group.close()
