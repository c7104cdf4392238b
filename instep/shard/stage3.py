"""Stage 3: weights in slices, whole only while a unit computes; the next unit's come meanwhile.

    forward     gather 0 |= 0 =|= 1 =|= 2 =|= 3 =|            a unit goes when the one after it begins
                    ~ 1 ~|~ 2 ~|~ 3 ~|
    backward             |= 3 =|= 2 =|= 1 =|= 0 =|            ... and its gradients have come
                         |~ 2 ~|~ 1 ~|~ 0 ~|

The root unit stays from the begin of forward to the end of backward, and the last one between the two. Which
unit comes next is what came next the last time; a wrong guess costs its gather and no more.

What a rank needs it fetches alone (``gather``), or has mapped already (``unit``), so nothing here is
collective but the construction, and what is written to parameters. Any module with parameters in it may be
called, the whole one, a unit, or a layer of one: it finds its weights there. What is read anywhere else
gathers itself (``sliced``). In backward the gradient of a module's output brings its weights back, or else
the first node that needs one (``saved_weights``): when a unit goes decides about memory and time, never about
what is computed.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 5.3.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instep.events import Recorder
from instep.hook import Hook, weakly
from instep.net.agree import require_same_lines
from instep.net.lane import Lane
from instep.net.process_group import Group
from instep.shard.buffer_pool import BufferPool
from instep.shard.gather import (
    Gathers,
    ShardSource,
    find_source,
    is_inside_transform,
    require_outside_transform,
)
from instep.shard.materialise import Init, materialise
from instep.shard.partition import by_kind, entries, partition
from instep.shard.saved_weights import SavedWeights
from instep.shard.sliced import Alias, Live, Sliced, alias, own_classes
from instep.shard.state_dicts import StateDicts
from instep.shard.unit import Unit

NO_TASK = -1
Numbers = tuple[int, ...]
# What forwards and backwards leave behind for the next ones.
LEARNED = ("_next", "_previous", "_last", "_kept", "_ran", "_generation")
HOOKS = (
    "a module with weights in slices watches what autograd saves of them: with reshard_after_forward=False, "
    "where they stay until their gradients have come, or with stage=2 without compute_dtype, it does not"
)


ALIKE = ": pass materialise() the same seed on all ranks, or a function that fills alike on all"


class Stage3:
    """Keeps the weights of ``module`` in slices over ``group``, and brings them where they are used.

    At construction, collective: every floating-point parameter moves into a ``Unit``, with the values that
    it has on the group's first rank; with ``compute_dtype`` it has that dtype from now on, and its masters
    keep float32 or more. Those on the meta device get their values from ``materialise``. In forward and
    backward, hooks gather and free. The reducer of gradients says ``closed`` when all of a unit's have come.
    ``close`` ends it; the parameters then show nothing any more.

    Args:
        gather_group: a second group over the same ranks, which is closed with this.
        reshard_after_forward: False keeps every unit from forward to its gradients: more memory, no gather
            in backward.
        units: submodules that shall be units, instead of the entries of outermost lists.
        device: where parameters from the meta device live; by default the CPU.
        vacant: they take no memory yet.
        before: what kept these weights over another group, and is closed; its units are taken over, without
            values.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        gather_group: Group,
        recorder: Recorder,
        *,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        units: Sequence[nn.Module] | None = None,
        device: torch.device | None = None,
        vacant: bool = False,
        before: Stage3 | None = None,
    ) -> None:
        self.module, self._group = module, group
        self._storages: dict[int, Unit] = {}
        self._buffers = BufferPool()
        if before is None:
            self.members = [kind for unit in partition(module, units) for kind in by_kind(unit)]
            self.units = self._cut(compute_dtype, device, vacant)
        else:
            self.members, self.units = before.members, before.units
            for unit in self.units:
                unit.lay_out(group, self._storages, self._buffers)
        self._saved = SavedWeights(self.units, self._storages, weakly(self._unpacked))
        self._reshard = reshard_after_forward
        self._place = {id(p): unit for unit in self.units for p in unit.parameters}
        self._root = {unit.number for unit in self.units if unit.name == ""}
        self._needs = entries(module, self.members)
        source = find_source(group, gather_group, self.units)
        self._source = source
        target = self.units[0].flat.device if self.units else torch.device("cpu")
        self._gathers = Gathers(group, source, recorder, target)
        self._guess([x.module for x in self.members])
        self._last: Numbers = ()  # what was needed last, in this forward or backward
        self._inside = [0] * len(self.units)  # calls of modules that use the unit, and have not returned
        self._kept: set[int] = set()  # whose parameters are used where no module is called
        self._read: dict[int, Unit] = {}  # units that are here to be read outside of their modules
        self._were_read: set[int] = set()  # parameters, ever
        # All ranks come together before and after the masters change, between two exchanges of other things.
        self.meet: Callable[[str], object] = group.barrier
        self._in_backward = False
        self._closed: set[int] = set()  # whose gradients have all come in this backward
        self._came: set[int] = set()  # whose weights were whole in this backward
        self._ran: set[nn.Module] = set()  # whose forward began since the masters are what they are
        self._generation = 0
        self._around: dict[int, list[nn.Module]] = {i: [] for i in self._place}
        for m in module.modules():
            for p in m.parameters():
                self._around.get(id(p), []).append(m)
        for unit in self.units:
            unit.reader = weakref.ref(self)
        self._on_gradient = weakly(self._reached)
        self._states = StateDicts(module, self.units, self._gathers.whole, weakly(self._let_read_go))
        hooks = [*self._hook(), *self._states.hooks]
        self._close = weakref.finalize(self, _let_go, hooks, self._gathers.lane, source, gather_group)
        self._close.atexit = False  # at the end of a process its source waits itself

    def _cut(
        self, compute_dtype: torch.dtype | None, device: torch.device | None, vacant: bool
    ) -> list[Unit]:
        shared: dict[str, Any] = {
            "compute_dtype": compute_dtype,
            "device": device,
            "vacant": vacant,
            "storages": self._storages,
            "buffers": self._buffers,
        }
        return [Unit(i, kind, self._group, **shared) for i, kind in enumerate(self.members)]

    def materialise(
        self, init: Init | None = None, *, seed: int = 0, units: Sequence[Unit] | None = None
    ) -> None:
        """Give values to what was on the meta device, on every rank the same. Collective.

        One parameter at a time is whole, or one unit where submodules fill their own.

        Args:
            init: ``init(name, tensor)`` fills one whole parameter. By default the module's own
                ``init_parameter`` does (``instep.rng.keys.initialize``), else ``reset_parameters`` of the
                submodules, with torch's generators seeded by ``seed`` and the submodule's name.
            units: which; by default all that have none.

        Raises:
            ValueError: a submodule has no ``reset_parameters``, or one has a buffer on the meta device; or
                ranks have made different values, on all of them.
        """
        new = [unit for unit in self.units if not unit.materialised] if units is None else units
        made = materialise(self.module, new, init, seed)
        require_same_lines(self._group, "the first values of parameters", made, fix=ALIKE)

    def whole(self, parameter: Tensor) -> Tensor:
        """The master values of ``parameter``, gathered into new memory. Not collective."""
        unit = self._place[id(parameter)]
        found = self._gathers.whole(unit)
        return next(x for p, x in zip(unit.parameters, found, strict=True) if p is parameter).clone()

    @contextmanager
    def gathered(self, parameters: Iterable[Tensor] | None = None) -> Iterator[None]:
        """Inside, these parameters (all, by default) show their values, to be read. Not collective."""
        wanted = self._place.values() if parameters is None else [self._place[id(p)] for p in parameters]
        numbers = sorted({unit.number for unit in wanted})
        try:
            self._gathers.need([self.units[i] for i in numbers])
            self._begin_use(numbers)
            yield
        finally:
            self._end_use(numbers)
            self._free_all_but(set())

    def read(self, tensors: Sequence[Live], call: Callable[[], Any]) -> Any:
        """What ``call()`` returns, which uses ``tensors``: parameters outside of their modules, aliases.

        Not collective, unless it writes to them: then all ranks come together, and keep what was written.

        Raises:
            ValueError: the parameters have no values yet.
            RuntimeError: what was written would be lost.
            PeerLost: a rank did not come, or did not give its slice.
        """
        self._lend({x.instep_unit().number for x in tensors if isinstance(x, Sliced)})  # type: ignore[union-attr]
        self._were_read.update(id(x) for x in tensors if isinstance(x, Sliced))
        old = [x for x in tensors if isinstance(x, Alias) and self._shown_by(x) is None]
        versions = [x._version for x in old]
        self._saved.enter(self)
        try:
            with own_classes(tensors):
                found = call()
        finally:
            self._saved.leave(self)
        if versions != [x._version for x in old]:
            raise RuntimeError(
                "a view of a parameter in slices (p.data, p.detach()) was written to after its weights had "
                "gone, where that has no effect: take the view again from the parameter, where it is used"
            )
        self._keep_written()
        return self._watched(found)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, forwards and backwards that shall not count; then what is gathered now is so again.

        Not collective, and between backwards only.
        """
        shown = [unit for unit in self.units if unit.shown]
        before = {name: copy.copy(getattr(self, name)) for name in LEARNED}
        try:
            yield
        finally:
            self.ended()
            self._buffers.clear()
            for name, value in before.items():
                setattr(self, name, value)
            self._gathers.recover()
            self._gathers.need(shown)

    def closed(self, unit: Unit) -> None:
        """All gradients of ``unit`` have come: it goes when backward comes to another one, if not at once."""
        i = unit.number
        self._closed.add(i)
        self._kept.discard(i)
        if i not in self._root and i not in self._last and not self._inside[i]:
            unit.free()

    def ended(self) -> None:
        """Backward has ended, or will not: no weights are needed any more."""
        self._in_backward = False
        self._came.clear()
        self._closed.clear()
        self._kept.clear()
        self._last = ()
        self._free_all_but(set())

    def problem(self, parameter: Tensor) -> str | None:
        """Why the gradient that has just come for ``parameter`` cannot be right; None if it can."""
        unit = self._place.get(id(parameter))
        used = id(parameter) in self._were_read or any(m in self._ran for m in self._around[id(parameter)])
        if unit is None or used:
            return None
        return (
            f"parameter {unit.name_of(parameter)!r} was used outside of the forward of the module that it "
            "belongs to, where its weights are not gathered: call that module, or make all that uses the "
            "parameter one unit, with fully_shard(..., units=[...]), or have it in no unit, which is then "
            "the root's"
        )

    def close(self, *, wait: bool = True) -> None:
        """Remove the hooks, and ask for no more slices; give one's own until no rank asks any more.

        Without ``wait`` that ends at once: after a rank was lost, or if no rank gathers any more.
        """
        self._saved.closed = True
        self._saved.reset()
        if not wait:
            self._source.abandon()
        if (alive := self._close.detach()) is not None:
            _release(*alive[2])
        for unit in self.units:
            unit.free()
            unit.reader = None
        self._buffers.clear()
        self._saved.forget()

    def _hook(self) -> list[Any]:
        """Before and after the forward of whatever has parameters in it."""
        enter, leave = weakly(self._enter), weakly(self._leave)
        hooks: list[Any] = []
        for module, needs in self._needs.items():
            hooks.append(module.register_forward_pre_hook(Hook(partial(enter, needs)), prepend=True))
            hooks.append(module.register_forward_hook(Hook(partial(leave, needs)), always_call=True))
        return hooks

    def _guess(self, modules: Iterable[nn.Module]) -> None:
        """Until it is known better, modules run in the order of their registration."""
        order = list(dict.fromkeys(self._needs[m] for m in modules))
        self._next = dict(pairwise(order))
        self._previous = {after: before for before, after in pairwise(order)}

    def _enter(self, needs: Numbers, module: nn.Module, args: Any) -> None:
        """The forward of ``module`` begins."""
        backward = torch._C._current_graph_task_id() != NO_TASK
        outermost = not backward and module is self.module
        if outermost:
            self._saved.reset()
        if not any(self._inside) and self._generation != (now := sum(u.generation for u in self.units)):
            self._ran, self._generation = set(), now
        self._ran.add(module)
        if self._reshard:
            self._saved.enter(module)
        if not backward and self._in_backward:  # it raised
            self.ended()
        if outermost:
            self._gathers.recover()
            self._kept.clear()
            self._last = ()
        if backward:
            self._bring_back(needs)
        elif not all(self._inside[i] and self.units[i].shown for i in needs):
            self._bring(needs)
        self._begin_use(needs)

    def _leave(self, needs: Numbers, module: nn.Module, args: Any, output: Any) -> None:
        """The forward of ``module`` has ended, or was left by an exception."""
        self._saved.leave(module)
        self._end_use(needs)
        hooked = False
        watches = torch.is_grad_enabled() and not is_inside_transform()  # which has a backward of its own
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and watches and x.requires_grad and not x.is_leaf:
                x.register_hook(partial(self._on_gradient, needs))
                hooked = True
            elif isinstance(x, nn.Parameter) and id(x) in self._place:
                self._kept.add(self._place[id(x)].number)
        if torch._C._current_graph_task_id() != NO_TASK:
            return
        error = sys.exc_info()[1] if output is None else None
        raised = error is not None
        if error is not None and "saved tensor hooks" in str(error) and not any(self._inside):
            error.add_note(HOOKS)
        if not raised and not any(self._inside):
            self._require_unchanged()
        if torch.is_grad_enabled() and not hooked and not raised:
            self._kept.update(i for i in needs if self.units[i].trainable)
        if not any(self._inside):
            stay = {*self._root, *self._last, *self._used_for_backward()}
            self._free_all_but(stay if hooked else set())

    def _begin_use(self, needs: Iterable[int]) -> None:
        for i in needs:
            self._inside[i] += 1
            self.units[i].begin_use()

    def _end_use(self, needs: Iterable[int]) -> None:
        for i in needs:
            self._inside[i] = max(self._inside[i] - 1, 0)
            if not self._inside[i]:
                self.units[i].end_use()

    def _lend(self, needs: set[int]) -> None:
        """``needs`` have to be whole, for code outside of their modules; what was read before may go."""
        if all(self.units[i].shown for i in needs):
            return
        self._let_read_go()
        self._require_values(needs)
        self._gathers.recover()
        self._gathers.need([self.units[i] for i in sorted(needs)])
        self._read |= {i: self.units[i] for i in needs}

    def _let_read_go(self) -> None:
        """What was read may go, but for what is used elsewhere, which may still be written to."""
        for i, unit in list(self._read.items()):
            if not unit.is_used_elsewhere():
                if not self._inside[i] and i not in self._kept and i not in self._last:
                    unit.free()
                del self._read[i]

    def _shown_by(self, view: Tensor) -> Unit | None:
        """The unit whose gathered weights ``view`` is a part of."""
        try:
            return self._storages.get(view.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # it has no storage
            return None

    def _watched(self, found: Any) -> Any:
        """``found``, where views of gathered weights are aliases."""
        if isinstance(found, list | tuple):
            for x in found:
                self._watched(x)
        elif type(found) is Tensor:
            unit = self._shown_by(found)
            return found if unit is None else alias(found, unit)
        return found

    def _keep_written(self) -> None:
        """Keep the own slice of what was written outside of modules, on all ranks alike: collective then."""
        written = [(unit, name) for unit in self.units if (name := unit.written()) is not None]
        if not written:
            return
        unit, name = written[0]
        within = any(self._inside) or torch._C._current_graph_task_id() != NO_TASK
        if within or unit.dtype != unit.flat.dtype:
            for unit, _ in written:
                unit.free(changed=True)
            where = "in forward or backward" if within else f"in its rounded form, {unit.flat.dtype}"
            raise RuntimeError(
                f"parameter {name!r} was written to {where}, which would be lost: write to it between two "
                "steps, without compute_dtype; keep what forward changes in a buffer; or use stage=2"
            )
        self.meet(f"what was written to parameter {name!r}")  # no rank gathers the old values any more
        for unit, _ in written:
            unit.keep_written()
        self.meet(f"what was written to parameter {name!r}")  # all have the new ones
        for unit, _ in written:
            unit.rest(written=True)

    def _bring(self, needs: Numbers) -> None:
        """In forward: ``needs`` have to be whole; let go what is over, and begin what comes next."""
        for i in needs:
            require_outside_transform(self.units[i].name, self.units[i].names)
        if self._last and self._last != needs:
            self._next[self._last], self._previous[needs] = needs, self._last
        self._last = needs
        following = self._next.get(needs, ())
        stay = {*needs, *following, *self._used_for_backward()}
        self._free_all_but(stay | self._root if any(self._inside) else stay)
        self._require_values(needs)
        self._gathers.need([self.units[i] for i in needs])
        self._gathers.begin([self.units[i] for i in following])

    def _reached(self, needs: Numbers, gradient: Tensor) -> None:
        """Backward has come to an output of a module that has used ``needs``."""
        self._bring_back(needs)

    def _unpacked(self, unit: Unit) -> None:
        """A node of a graph has come to its turn, and needs what it has saved of ``unit``."""
        if torch._C._current_graph_task_id() != NO_TASK:
            self._begin_backward()
            self._came.add(unit.number)
        if not unit.shown:
            self._gathers.need([unit])

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._gathers.recover()
            torch.autograd.Variable._execution_engine.queue_callback(weakly(self.ended))

    def _bring_back(self, needs: Numbers) -> None:
        """In backward: ``needs`` have to be whole; begin what was used before them."""
        self._begin_backward()
        self._came.update(needs)
        if needs == self._last and all(self.units[i].shown for i in needs):
            return
        previous = self._previous.get(needs, ())
        if needs != self._last:
            stay = {*needs, *previous, *(set(self._last) - self._closed), *self._root}
            self._free_all_but(stay if self._reshard else {*range(len(self.units))})
        self._last = needs
        self._gathers.need([self.units[i] for i in needs])
        self._gathers.begin([self.units[i] for i in previous if i not in self._came])

    def _require_values(self, needs: Iterable[int]) -> None:
        for i in needs:
            if not self.units[i].materialised:
                raise ValueError(
                    f"parameter {self.units[i].names[0]!r} was on the meta device and has no values yet: "
                    "call materialise() on every rank, or load a checkpoint; under `instep run` it gets them "
                    "where the loop over run.steps begins"
                )

    def _require_unchanged(self) -> None:
        for unit in self.units:
            unit.look()
        changed = [unit for unit in self.units if unit.changed is not None]
        name = changed[0].changed if changed else None
        for unit in changed:
            unit.changed = None
            unit.free(changed=True)
        if name is not None:
            raise RuntimeError(
                f"parameter {name!r} was written to in forward, which is lost when its gathered weights go: "
                "keep what forward changes in a buffer, or use stage=2"
            )

    def _used_for_backward(self) -> set[int]:
        """What stays after forward because nothing is resharded there."""
        if self._reshard or not torch.is_grad_enabled():
            return set()
        return {unit.number for unit in self.units if unit.shown}

    def _free_all_but(self, stay: set[int]) -> None:
        if is_inside_transform():
            return
        for unit in self.units:
            i = unit.number
            if i not in stay and not unit.is_free and not self._inside[i] and i not in self._kept:
                unit.free()
            if not stay and unit.is_free:  # what has been computed is over
                unit.rest()


def _let_go(hooks: list[Any], lane: Lane, source: ShardSource, gather_group: Group) -> None:
    """As ``_release``, in whatever thread collects garbage, which must not wait for other ranks."""
    for hook in hooks:
        hook.remove()
    gather_group.give_up()
    farewell = partial(_release, [], lane, source, gather_group)
    threading.Thread(target=farewell, name="instep farewell", daemon=True).start()


def _release(hooks: list[Any], lane: Lane, source: ShardSource, gather_group: Group) -> None:
    for hook in hooks:
        hook.remove()
    gather_group.give_up()
    lane.close()
    source.close()
    gather_group.close()
