"""Stage 1: every rank has all weights and all gradients, and a W-th of the optimizer's state.

Each updates the part of the weights that it has state for, then all get the new weights from their owners.

    rank 0   |= forward, backward =|~ gradients ~|= update 0 =|~ weights ~|= forward ...
    rank 1   |= forward, backward =|~ gradients ~|= update 1 =|~ weights ~|= forward ...

Bytes per parameter with Adam in float32: 4 for its weight, 4 for its gradient, 8 / W for its moments, where
plain data parallelism has 4 + 4 + 8. The update takes a W-th of the time. The price is an all-gather of the
weights beside the all-reduce of the gradients: 3 S (W-1)/W bytes per rank instead of 2, S bytes of weights.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from instep.events import PARAMETER_UPDATE
from instep.mesh.find import find_ranks
from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.shard import checks, claims
from instep.shard.groups import class_name, describe, options_text
from instep.shard.kinds import is_elementwise, placement, require_shardable
from instep.shard.ranks import num_rows, row_of
from instep.shard.saved import adopt_groups, format_sharded, format_whole, local_state, options, saved_lines
from instep.shard.shards import Shards
from instep.shard.space import in_memory_order
from instep.shard.standing import Standing
from instep.shard.state import LocalState, gather
from instep.shard.update import step_pieces
from instep.shard.verdict import FAILED, FINE, READY, REFUSED, vote
from instep.step.agree import agree, attempt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUILDING = "the comparison of sharded optimizers"
LOADING = "the comparison of optimizer states to load"


class ShardedOptimizer(Optimizer):
    """``optimizer_cls`` over ``params``, with its state and its update divided among the ranks.

        optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)

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
    cut (torch 2.13, AVX-512). In bfloat16 fused Adam, AdamW and Adagrad do; with several threads per rank
    the loops of SGD, RMSprop and ASGD round some elements in another way, and fused SGD with momentum
    differs from run to run even without sharding.

    Memory per rank of Adam in float32: 8 + 8 / W bytes per parameter instead of 16.

    Other classes (Adafactor, Muon, your own) get whole parameters, each on one rank: right for all that
    treat every parameter on its own. The ranks' loads then differ by up to the largest parameter, and flat
    memory is padded to the largest load. LBFGS and SparseAdam are refused.

    ``param_groups`` hold your own parameters, so schedulers, gradient clipping and gradient scalers work as
    ever. ``state`` shows nothing unless there is one rank; ``state_dict`` gathers it.

    Parameters are views of one memory: to save a single one without the others, clone it. With backend "shm"
    it is memory that a forked child shares, not copies.

    ``one_copy=True``, with backend "shm" on CPU: the weights are the same memory on all ranks, and the host
    has them once, whatever W is: with Adam 4 + 8 bytes per parameter in all, the padding of flat memory (at
    most 16 KB for a large parameter), and 4 W for gradients. Each rank updates its slice in place and nothing
    travels; a second message of 24 bytes, before the update, makes sure that no rank computes with the old
    weights any more, and that all mean the same step: what is found there leaves weights and moments as they
    were. Buffers stay each rank's own; ``DataParallel`` may wrap the module before or after. Whoever changes
    a weight outside of ``step`` changes it for all ranks: load values that are the same everywhere, and let
    no rank train on while another one loads. ``close`` gives each rank weights of its own again.

    Parameters of a module that ``fully_shard`` has divided stay where they are: the optimizer steps the
    slices that are there already, with the gradients that are there, and has to get all of its parameters.

    Args:
        params: as for ``optimizer_cls``: parameters, groups, or named parameters.
        optimizer_cls: the class; ``kwargs`` are its options.
        process_group: a mesh (its ``dp`` axis, or its ``shard`` axis if that is larger than 1),
            ``mesh[axis]``, a torch process group; None means the registered mesh, else torch's default
            group, else this process alone.
        one_copy: see above; nothing else for one rank.

    Raises:
        ValueError: the ranks differ, the class cannot be sharded, or a parameter has another sharded
            optimizer already, or is given twice; ``one_copy`` where ranks share no memory.
        TypeError: as ``optimizer_cls``.
        PeerLost: a rank did not come.
    """

    __module__ = "instep"

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        process_group: Mesh | ProcessGroup | None = None,
        *,
        one_copy: bool = False,
        **kwargs: Any,
    ) -> None:
        self._local: Optimizer | None = None  # until it is there, methods of the base fill ``param_groups``
        self._optimizer_cls = optimizer_cls
        self.group, self.recorder = find_ranks(row_of(process_group), what="making a ShardedOptimizer")
        self.num_rows = num_rows(process_group)  # that make the same steps, with one of which this rank is
        self._shards = Shards(self.group, placement(optimizer_cls), one_copy=one_copy)
        letting_go = weakref.finalize(self, self._shards.let_go)
        letting_go.atexit = False  # nobody would use the memory that it makes
        release = weakref.finalize(self, _release, self.group, self._shards.owned)
        self._standing = Standing(self.group, release, letting_go)
        try:
            _, problem = attempt(lambda: self._begin(params, kwargs))
            how = [
                f"class {class_name(optimizer_cls)}",
                f"options {options_text(kwargs)}",
                f"one_copy={one_copy}",
            ]
            self._agree(problem, how)
            self._build(kwargs)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> Shards:
        """The memory of its parameters, and this rank's pieces of them."""
        return self._shards

    @property
    def local_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """What ``optimizer_cls`` keeps for this rank's pieces, by ``Held.tensor``."""
        return self._inner.state

    @property
    def state(self) -> Any:
        """By parameter, what ``optimizer_cls`` keeps for it; ``RuntimeError`` where there are more ranks."""
        return LocalState(self._shards.held, self._inner, self.group.size)

    @state.setter
    def state(self, value: Any) -> None:
        if self._local is not None:
            raise RuntimeError("optimizer.state cannot be replaced: it is sharded; use load_state_dict()")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, as ``optimizer_cls`` makes it. Collective.

        Parameters without a gradient are left alone; which have one must be the same on all ranks.

        Raises:
            TypeError: a gradient is sparse.
            ValueError: a parameter was unfrozen, or its memory replaced, since construction.
            Desync: another rank raised, or has other options or gradients. Where weights or moments were
                changed already, every further step raises until a state is loaded.
            PeerLost: a rank did not come.
        """
        self._standing.require_sound()
        loss, raised, outcome = None, None, REFUSED
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._check()
            outcome = READY
        except BaseException as error:
            raised = error
        if self._shards.others_read:
            with self.recorder.span(PARAMETER_UPDATE, lane="host"):
                self._standing.vote(vote(outcome, self.param_groups), raised)
        if outcome == READY:
            outcome, raised = self._attempt_update()
        if self.group.size > 1:
            self._exchange(outcome, raised)
        elif raised is not None:
            self._standing.broken = ""  # as with the plain optimizer: whoever catches it may go on
            raise raised
        stepped = [p for p in self._shards.owned if p.grad is not None]
        if stepped:
            increment_version(stepped)  # a graph from before the step must not use the new values
        self._standing.broken = ""
        self._standing.steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``optimizer_cls``; gradients that are in slices are dropped, never set to zero."""
        for p in self._shards.owned:
            if claims.home(p) is not None:
                p.grad = None
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also update these parameters, in flat memory of their own. Collective, between two steps.

        Raises:
            ValueError: as at construction; the optimizer is then as before, unless ``optimizer_cls`` itself
                refuses the group, after which every step raises until a state is loaded.
        """
        if self._local is None:
            super().add_param_group(param_group)
            return
        self._standing.require_sound()
        before = len(self.param_groups)
        with self._standing.together():
            try:
                _, problem = attempt(lambda: self._add(param_group))
                self._agree(problem, [])
            except BaseException:
                del self.param_groups[before:]
                raise
            self._standing.broken = "a parameter group was added by half"
            (added,) = self._take(before)
            self._agree_made(lambda: self._inner.add_param_group(added))
            self._standing.broken = ""

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain ``optimizer_cls`` over the same parameters has it. Collective.

        Needs memory for all of it on every rank: 8 bytes per parameter for Adam in float32.
        """
        self._standing.require_sound()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._standing.together(), self.recorder.span("optimizer state", lane="host"):
            states = gather(self._shards, self._inner, self._parameters(), self.group)
        saved = format_whole(states, self.param_groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's pieces with their ranges, without communication: views, as in a plain state dict.

        ``{"sharded": {"rank", "world_size"}, "pieces": [{"parameter", "first", "last", "state"}, ...],
        "param_groups": [...]}``; ranges count elements in the order of memory.
        """
        self._standing.require_sound()
        return format_sharded(self._shards.held, self._inner, self.param_groups, self.group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: whole, of any world size or of ``optimizer_cls`` itself, or sharded. Collective.

        State of frozen parameters is not kept.

        Raises:
            ValueError: on all ranks, and nothing is changed: it does not fit, it was cut for other ranks, or
                the ranks pass different ones. After any other error every step raises until one is loaded.
        """
        self._standing.require_open()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        cut = is_elementwise(self._optimizer_cls)

        def prepare() -> dict[str, Any]:
            return local_state(state_dict, self._shards.held, self.param_groups, self.group, cut=cut)

        prepared, raised = attempt(prepare)
        with self._standing.together():
            agree(raised, saved_lines(state_dict) if prepared else [], self.group, LOADING)
            assert prepared is not None
            self._standing.broken = "a state was loaded by half"
            _, raised = attempt(lambda: self._inner.load_state_dict(prepared))
            agree(raised, [], self.group, LOADING)
        adopt_groups(self.param_groups, self._inner.param_groups, state_dict["param_groups"])
        self._standing.broken = ""
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def pieces(self) -> Iterator[tuple[Tensor, int, int, Tensor]]:
        """What this rank holds of the weights: parameter, first, last, and a flat view of these elements.

        ``first`` and ``last`` (exclusive) count the parameter's elements in the order of memory. All ranks'
        pieces together are every trainable parameter, once: an average of the weights that each rank keeps
        for its own pieces costs a W-th of a whole one.

            with torch.no_grad():
                for (_, _, _, mean), (_, _, _, new) in zip(means, optimizer.pieces()):
                    mean.lerp_(new, 0.01)
        """
        self._standing.require_sound()
        for held in self._shards.held.values():
            yield held.parameter, held.first, held.last, in_memory_order(held.tensor.detach())

    def close(self) -> None:
        """Give the group back; the parameters are free for another optimizer. Also happens when collected."""
        self._standing.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardedOptimizer holds a process group and one rank's part of the state: it cannot be copied "
            "or pickled; keep its state_dict()"
        )

    @property
    def _inner(self) -> Optimizer:
        assert self._local is not None
        return self._local

    def _begin(self, params: Iterable[Any], given: dict[str, Any]) -> None:
        require_shardable(self._optimizer_cls, given)
        super().__init__(params, dict(given))
        self._require_takeable(self._parameters())

    def _add(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._require_takeable(self.param_groups[-1]["params"])

    def _require_takeable(self, parameters: list[Tensor]) -> None:
        """Raise ``ValueError`` unless these can be sharded here."""
        checks.require_new(parameters)
        checks.require_homes(parameters, self._optimizer_cls, self.group)
        if self._shards.wants_one_copy:
            checks.require_one_copy(parameters, self.group)

    def _agree(self, problem: Exception | None, lines: list[str]) -> None:
        """All ranks have the same groups, of parameters that can be sharded, or all raise."""
        if problem is None:
            lines = [*lines, *describe(self.param_groups)]
        agree(problem, lines, self.group, BUILDING)

    def _build(self, given: dict[str, Any]) -> None:
        groups = self._take(0)

        def make() -> None:
            self._local = self._optimizer_cls(groups, **given)

        self._agree_made(make)
        self.defaults = self._inner.defaults

    def _take(self, first_group: int) -> list[dict[str, Any]]:
        """The parameters of the groups from ``first_group`` on move; the groups, with this rank's pieces."""
        known = len(self._shards.owned)
        pieces = self._shards.take(self.param_groups, first_group)
        claims.claim(self._shards.owned[known:], self)
        groups = self.param_groups[first_group:]
        return [{**options(group), "params": own} for group, own in zip(groups, pieces, strict=True)]

    def _agree_made(self, make: Callable[[], None]) -> None:
        """The local optimizers take their pieces, which some rank's may refuse, or all raise."""
        _, problem = attempt(make)
        agree(problem, [], self.group, "the making of local optimizers")
        for group, local in zip(self.param_groups, self._inner.param_groups, strict=True):
            for key, value in options(local).items():  # defaults, for whoever looks
                group.setdefault(key, value)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check(self) -> None:
        """Raise, before anything is changed, if this step cannot be made."""
        checks.require_usable(self.param_groups, set(map(id, self._shards.owned)))
        if (parameter := self._shards.moved()) is not None:
            raise checks.moved(self.param_groups, parameter)

    def _attempt_update(self) -> tuple[int, BaseException | None]:
        """How it went, and what it raised."""
        self._standing.broken = f"step {self._standing.steps} did not end"
        try:
            with self.recorder.span("update", lane="compute"):
                step_pieces(self._shards, self._inner, self.param_groups)
        except BaseException as error:
            return FAILED, error
        return FINE, None

    def _exchange(self, outcome: int, raised: BaseException | None) -> None:
        """All ranks get the new values, or all raise."""
        num_bytes = self._shards.bytes_to_share
        with self.recorder.span(PARAMETER_UPDATE, lane="host", num_bytes=num_bytes):
            self._standing.vote(vote(outcome, self.param_groups), raised)
            with self._standing.together():
                self._shards.share(f"the new weights of step {self._standing.steps}")


def _release(group: Group, parameters: list[Tensor]) -> None:
    claims.release(parameters)
    group.close()
