"""``DataParallel``: the module that a training loop wraps, and the two contracts it can be used under."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.mesh.device import generators
from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.ordered.buckets import Caps
from instep.ordered.keys import LeafKeys
from instep.replicate import guard
from instep.replicate.buffers import OPERATION, broadcast_buffers
from instep.replicate.keywords import consume
from instep.replicate.leaves import DeclaredStep, Leaf
from instep.replicate.manifest import agree_on_structure, agree_on_values, broadcast_values
from instep.replicate.ranks import find_ranks
from instep.replicate.reducer import Options, Plan, Reducer
from instep.replicate.strategies import find
from instep.replicate.watch import Watch
from instep.work import Lane

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Mark(NamedTuple):
    """What was true when a forward ran."""

    sync: bool
    leaf: int | None


class DataParallel(nn.Module):
    """Trains ``module`` on every rank of a group with gradients that all ranks share.

    In an ordinary loop it does what torch's ``DistributedDataParallel`` does: when ``loss.backward()``
    returns, every ``.grad`` is the mean over the ranks. Inside ``for leaf in model.micro_batches(G)`` the
    step is *declared*: every ``.grad`` is the sum over G micro-batches divided by their weights, with the
    same bits on any number of ranks.

    At construction: the ranks compare their models and take rank 0's values. In forward: nothing but a
    hook on the output. In backward: gradients land in buckets, which the strategy sends; the call returns
    when they are reduced. Before an optimizer step: a gradient that was never exchanged raises.

    Defaults that differ from torch's: ``find_unused_parameters`` is None (a parameter that a rank does not
    use counts as zero there, with one warning; False raises, True is quiet), gradients are views of their
    buckets, ``state_dict`` and ``named_parameters`` have the module's own names.

    Args:
        module: on the device where it shall train.
        process_group: a mesh, ``mesh["dp"]``, or a torch process group; by default the ``dp`` axis of the
            registered mesh, else torch's default group, else this process alone.
        strategy: "naive", "flat", "overlap" or "bucketed"; the same bits, at another speed.
        bucket_cap_mb: bucket size in MiB; a number, one per bucket, or a callable on the parameters' sizes.
        ordered: sum in the fixed order of the sum tree. False is the backend's plain all-reduce.
        init_sync: True takes rank 0's parameters and buffers, "verify" raises if values differ, False does
            neither. Structure is always compared.
        find_unused_parameters: see above.
        broadcast_buffers: rank 0's buffers for all, once per synchronised undeclared step.
        seed: keys the random numbers of declared steps.
        timeout_s: deadline of every wait in seconds, where no mesh brings one.
        others: every other keyword of torch 2.13's ``DistributedDataParallel`` is accepted; one without
            effect warns, and what is not offered is refused with the reason.

    Raises:
        ValueError: the ranks hold different models, or an argument is unknown.
        PeerLost: a rank did not come.
    """

    __module__ = "instep"

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool | str = True,
        process_group: Mesh | ProcessGroup | None = None,
        bucket_cap_mb: Caps | None = None,
        find_unused_parameters: bool | None = None,
        *,
        strategy: str = "bucketed",
        ordered: bool = True,
        seed: int = 0,
        timeout_s: float | None = None,
        device_mesh: Any = None,
        bucket_cap_mb_list: Any = None,
        forward_sync_buffers: bool | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if init_sync not in (True, False, "verify"):
            raise ValueError(f"init_sync={init_sync!r}: expected True, False or 'verify'")
        if device_mesh is not None and process_group is not None:
            raise ValueError("pass process_group or device_mesh, not both")
        self.module = module
        self._arguments = {
            "process_group": process_group,
            "device_mesh": device_mesh,
            "strategy": strategy,
            "bucket_cap_mb": bucket_cap_mb_list or bucket_cap_mb,
            "ordered": ordered,
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": False not in (broadcast_buffers, forward_sync_buffers),
            "seed": seed,
            "timeout_s": timeout_s,
        }
        caps = bucket_cap_mb_list or bucket_cap_mb or 25
        self._options = Options(find(strategy), caps, ordered, find_unused_parameters)
        self._broadcast_buffers = False not in (broadcast_buffers, forward_sync_buffers)
        self._sync = True
        self._seed = seed
        self._next_step = 0
        self._warned_flag = False
        self._synchronised = True
        self.contract: str | None = None  # "declared" or "undeclared", after the first step
        self._register_load_state_dict_pre_hook(_accept_own_names)
        self._bind(device_mesh.get_group() if device_mesh is not None else process_group, timeout_s)
        keywords = {"device_ids": device_ids, "output_device": output_device, "dim": dim, **others}
        consume(keywords, warn=self.group.rank == 0)
        agree_on_structure(module, self.group)
        if init_sync == "verify":
            agree_on_values(module, self.group)
        elif init_sync:
            broadcast_values(module, self.group)

    def _bind(self, process_group: Mesh | ProcessGroup | None, timeout_s: float | None) -> None:
        """Take part in ``process_group``: hooks, reducer, keys."""
        self.group, self.recorder = find_ranks(process_group, timeout_s)
        trainable = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        names, parameters = [name for name, _ in trainable], [p for _, p in trainable]
        self._reducer = Reducer(names, parameters, self.group, self.recorder, self._options)
        device = parameters[0].device if parameters else torch.device("cpu")
        self._declared = DeclaredStep(
            self.module, self._reducer, LeafKeys(self.module, self._seed, generators(device))
        )
        guard.watch(self._reducer, self._frozen)
        # Hooks live on the module, which may outlive its wrapper: they must not keep it alive.
        self._watch = Watch(
            self.module,
            mark=_weakly(self._forward_ran),
            reached=_weakly(self._backward_reached),
            ended=_weakly(self._backward_ended),
            abandoned=_weakly(self._backward_raised),
        )
        came = _weakly(self._gradient_came)
        hooks = [p.register_post_accumulate_grad_hook(partial(came, i)) for i, p in enumerate(parameters)]
        hooks += [*self._watch.hooks, *self._declared.keys.hooks]
        self._unbind = weakref.finalize(self, _release, hooks, self._reducer.lane, self.group)

    def rebind(self, process_group: Mesh | ProcessGroup | None, timeout_s: float | None = None) -> None:
        """Go on over another group, between two steps; for survivors of a lost rank. Collective over it."""
        self._unbind()
        self._bind(process_group, timeout_s)
        agree_on_structure(self.module, self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def micro_batches(self, num_leaves: int, *, step: int | None = None) -> Iterator[Leaf]:
        """Declare a step of ``num_leaves`` micro-batches and yield those that this rank computes.

        All ranks must run the loop to its end; the last iteration leaves the reduced gradients in
        ``.grad``. Leaving early discards this rank's part and makes the others raise ``Desync``.

        Args:
            num_leaves: G, the number of micro-batches in the global batch; the bits depend on it.
            step: what the random numbers are keyed by; by default the declared steps so far.

        Raises:
            ValueError: a rule of declared steps is broken (a buffer changed in forward, a micro-batch
                without backward, a gradient left over from before).
        """
        if num_leaves < 1:
            raise ValueError(f"micro_batches({num_leaves}): expected at least one micro-batch")
        self.contract = "declared"
        step = self._next_step if step is None else step
        self._next_step = step + 1
        yield from self._declared.run(num_leaves, step)
        guard.reduced(self._reducer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them. Forward *and* backward belong inside, as in DDP."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def enable_grad_sync(self) -> None:
        """Exchange gradients in the backwards of forwards from now on."""
        self._sync = True

    def disable_grad_sync(self) -> None:
        """Only accumulate in the backwards of forwards from now on."""
        self._sync = False

    def sync_gradients(self) -> None:
        """Exchange what was accumulated since the last exchange; a second call does nothing. Collective."""
        if self._synchronised and self._reducer.exchanges:
            return
        self._begin()
        self._finish()

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Does nothing, and says so: uneven inputs are what ``micro_batches`` is for."""
        if self.group.rank == 0:
            warnings.warn(
                "join() has no effect: use model.micro_batches(G), where a rank may have fewer micro-batches "
                "than another, or none",
                stacklevel=3,
            )
        yield

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refused: a hook that replaces the reduction would replace what instep is for."""
        raise TypeError("register_comm_hook is not offered: choose a strategy, or ordered=False")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own, under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A wrapper of a copy of the module, over the same ranks. Collective."""
        return DataParallel(copy.deepcopy(self.module, memo), init_sync=False, **self._arguments)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DataParallel holds process groups and cannot be pickled: pickle model.module instead"
        )

    def close(self) -> None:
        """Remove the hooks, end the lane, give back the private group. Also happens when it is collected."""
        self._unbind()

    def _mark(self) -> Mark:
        leaf = self._declared.leaf
        return Mark(self._sync, None if leaf is None else leaf.index)

    def _forward_ran(self) -> Mark:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when the model was wrapped and is not now; its gradient "
                    "would stay on this rank: unfreeze first, then wrap"
                )
        return self._mark()

    def _backward_raised(self) -> None:
        self._reducer.leave()

    def _gradient_came(self, i: int, parameter: Tensor) -> None:
        self._watch.parameter_reached()
        self._synchronised = False
        if self._declared.leaf is not None:
            self._declared.leaf.gradients += 1
        try:
            self._reducer.arrived(i)
        except BaseException:
            self._reducer.leave()
            raise

    def _backward_reached(self, mark: Mark | None) -> None:
        """Backward has come to an output of the forward that left ``mark``, or (None) of no forward."""
        now = self._mark()
        mark = mark or now
        if now.leaf is not None or mark.leaf is not None:
            if mark.leaf != now.leaf:
                raise ValueError(
                    f"backward in {_leaf_name(now.leaf)} went into the forward of {_leaf_name(mark.leaf)}: "
                    "in a declared step each micro-batch has a loss of its own, with backward inside the loop"
                )
            return
        if mark.sync != now.sync and not self._warned_flag:
            self._warned_flag = True
            warnings.warn(
                f"no_sync was {_on(not mark.sync)} in forward and {_on(not now.sync)} in backward; forward's "
                f"decides, as in DDP: this backward is {'' if mark.sync else 'not '}synchronised",
                stacklevel=2,
            )
        if mark.sync and self._reducer.plan is None:
            self._begin()

    def _backward_ended(self) -> None:
        if self._declared.leaf is None and self._reducer.plan is not None:
            self._finish()

    def _begin(self) -> None:
        """An undeclared reduction begins: every rank contributes one leaf, its ``.grad``."""
        self.contract = "undeclared"
        size = self.group.size
        self._reducer.begin(Plan(False, size, [[r] for r in range(size)]), lambda: 1)
        self._reducer.open_leaf(self.group.rank, last=True)

    def _finish(self) -> None:
        self._reducer.close_leaf()
        self._reducer.finish()
        guard.reduced(self._reducer)
        self._synchronised = True
        if self._broadcast_buffers and self.group.size > 1 and any(True for _ in self.module.buffers()):
            group = self.group
            self._reducer.lane.submit(OPERATION, lambda: broadcast_buffers(self.module, group)).wait()


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _leaf_name(leaf: int | None) -> str:
    return "no micro-batch" if leaf is None else f"micro-batch {leaf}"


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as long as its object lives, then nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


def _release(hooks: list[Any], lane: Lane, group: Group) -> None:
    for hook in hooks:
        hook.remove()
    group.peers.given_up = True  # a program that ends after an error must not wait for its peers
    lane.close()
    group.pg = None  # which ends it


def _accept_own_names(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load state dicts with the module's own names, and those that other wrappers have prefixed."""
    assert isinstance(module, DataParallel)
    for name in module.module.state_dict(keep_vars=True):
        if prefix + name in state and f"{prefix}module.{name}" not in state:
            state[f"{prefix}module.{name}"] = state.pop(prefix + name)
