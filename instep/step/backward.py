"""What a wrapper does when forward and backward run, in either step mode.

*Declared*: inside ``micro_batches`` every gradient belongs to the open micro-batch, and the loop says when it
and the step end. *Undeclared*: a backward whose forward ran with synchronisation on is one step; every rank
contributes one leaf of the sum tree, whatever its ``.grad`` has accumulated, and the step ends with the
backward.

When does a backward that involves the module begin and end, and under which flag did its forward run? A
parameter's hook knows neither: it may fire inside a nested backward (reentrant checkpointing), and what it
queues for "the end" then comes at the end of the nested one. The gradient of the module's *output* belongs to
the outermost backward, and comes first. So a forward hook on the module leaves a hook on every output, with
what was true at that moment (the mark); the first one to fire queues the end. Where forward was bypassed, the
first parameter hook does. An output that is a leaf of the graph gets no hook: a parameter that forward
returns, or an input, outlives the forward, and would collect one each time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instep.events import BUFFERS, Span
from instep.hook import Hook, weakly
from instep.net.device import generators, marks_for
from instep.net.lane import Lane
from instep.net.process_group import Group
from instep.rng.keys import LeafKeys
from instep.state.sampled_digest import tensors_in
from instep.step import optimizer_guard
from instep.step.agreement import BROADCAST, SharedBuffers
from instep.step.micro_batches import DataSource, DeclaredStep, MicroBatch
from instep.step.nesting import require_outermost
from instep.step.parameter_registry import ParameterRegistry
from instep.step.reduction import Reduction, StepPlan

NO_TASK = -1


def is_in_backward() -> bool:
    """Whether autograd calls this code: for a GPU in a thread of its own, while the caller's waits."""
    return torch._C._current_graph_task_id() != NO_TASK


def require_eager_autograd() -> None:
    """Raise ``RuntimeError`` in a backward that torch compiles."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # to import it takes a second
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "compiled autograd is on, and would compile the hooks that exchange gradients: set "
            "torch._dynamo.config.compiled_autograd = False; torch.compile of the module works without it"
        )


def guard_hooks() -> None:
    """Make torch.compile guard on module hooks: otherwise code compiled for a block without hooks is reused
    for one whose hooks gather its weights."""
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()


Mark: TypeAlias = tuple[bool, int | None]
"""What was true when a forward ran: synchronisation on or off, and the open micro-batch."""


class Backward:
    """Steers the reducer by what the hooks of the module and its parameters report.

    In forward: every output gets a hook with the mark of this forward. In backward: the first output that is
    reached, or the first parameter, queues the end; then, gradient by gradient, the reducer is told; at the
    end it exchanges, if the mark says so. A backward that raised has no end: the next forward, or
    ``look_back``, finds that it began.

    ``sync`` is the switch behind ``no_sync``; ``step_mode`` the one of the last step. ``hooks`` are to be
    removed when the wrapper goes. ``changes`` names what a step changes here. ``records``: forwards and
    backwards become events; else the wrapper records them, which knows more.
    """

    changes: ClassVar[tuple[str, ...]] = ("sync", "step_mode")

    def __init__(
        self,
        declared: DeclaredStep,
        *,
        broadcast: bool,
        records: bool = True,
    ) -> None:
        guard_hooks()
        self.module = declared.module
        self.reducer = declared.reducer
        self.declared = declared
        self.registry = declared.registry
        self.records = records
        self.sync = True
        self.step_mode: str | None = None
        ranks = self.reducer.data_ranks
        self._plan = StepPlan(False, len(set(ranks)), tuple(range(r, r + 1) for r in ranks))
        shares = broadcast and self.reducer.group.size > 1
        self._buffers = SharedBuffers(self.registry, self.reducer.group) if shares else None
        self._runs = False  # a backward
        self._task = NO_TASK  # the outermost one of it
        self._marks: list[Mark] = []  # of the outputs that it has come to
        self._open: dict[str, Span] = {}
        # Hooks live on the module, which may outlive its wrapper: they must not keep it alive.
        self._output_hook = weakly(self._output_reached)
        self.reducer.is_nested = weakly(self._is_nested)
        this = weakref.ref(self)
        self._gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_gradient_came, this, i))
            for i, parameter in enumerate(self.reducer.parameters)
        ]
        self.hooks: list[Any] = [
            self.module.register_forward_pre_hook(Hook(weakly(self._forward_begins)), with_kwargs=True),
            self.module.register_forward_hook(Hook(weakly(self._forward_ended))),
            *declared.keys.hooks,
            declared.statistics,
            *self._gradient_hooks,
        ]

    def synchronise(self) -> None:
        """Exchange what ``.grad`` has accumulated, unless that is done. Collective."""
        if self.declared.micro_batch is not None:
            raise ValueError("sync_gradients() inside micro_batches(): the loop itself exchanges, at its end")
        reducer = self.reducer
        if any(reducer.local) or reducer.given_up or not reducer.exchanges:
            self._begin()
            self._finish()

    def look_back(self) -> None:
        """If the last backward has raised, do now what the next forward would do about it."""
        if self._runs and not is_in_backward():
            self._runs = False
            self._marks.clear()
            self.reducer.backward_ended()
            if self.declared.micro_batch is None:
                self.reducer.leave()
                self.reducer.interrupted()

    def _is_nested(self) -> bool:
        """Whether a backward inside this one runs now, as of a reentrant checkpoint."""
        return self._runs and torch._C._current_graph_task_id() != self._task

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._runs:
            self.look_back()
        if torch.is_grad_enabled() and not self._runs:  # not what a backward computes again
            if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
                require_outermost(self.reducer.optimizer_parameters)
            self.reducer.recorder.ensure_step()
            self._start("forward")
            if self.declared.inputs.waits:
                self.declared.inputs.given((args, kwargs))

    def _forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._stop("forward")
        self.registry.check(in_forward=True)
        self._go_last()
        reached = partial(self._output_hook, self._mark())
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(reached)

    def _go_last(self) -> None:
        """Users' hooks on gradients run before ours, also those that came later: they may edit ``.grad``."""
        for parameter, handle in zip(self.reducer.parameters, self._gradient_hooks, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def _output_reached(self, mark: Mark, gradient: Tensor) -> None:
        """Backward has come to an output of the forward that left ``mark``.

        That counts when a gradient comes: ``autograd.grad`` reaches outputs too, and accumulates none.
        """
        if not self._runs:
            self._backward_begins()
        self._marks.append(mark)

    def _backward_begins(self) -> None:
        require_eager_autograd()
        self.registry.check()
        self._runs = True
        self._task = torch._C._current_graph_task_id()
        self._start("backward")
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._runs = False
        self._stop("backward")
        self._marks.clear()
        self.reducer.backward_ended()
        if self.declared.micro_batch is None and self.reducer.plan is not None:
            self._finish()

    def _obey(self, mark: Mark) -> None:
        """Begin the exchange if forward wanted one; check that this backward belongs to that forward."""
        (sync, then), micro_batch = mark, self.declared.micro_batch
        now = None if micro_batch is None else micro_batch.index
        if then != now:
            raise ValueError(
                f"backward in {_name(now)} went into the forward of {_name(then)}: "
                "in a declared step each micro-batch has a loss of its own, with backward inside the loop"
            )
        if now is None and sync and self.reducer.plan is None:
            self._begin()

    def _begin(self) -> None:
        self.step_mode = "undeclared"
        self.reducer.begin(self._plan)
        if self.declared.inputs.looks:
            self.declared.inputs.begin(self._plan.leaves, declared=False)
        self.reducer.open_leaf(self.reducer.data_ranks[self.reducer.group.rank], last=True)

    def _finish(self) -> None:
        shared = self._buffers
        try:
            self.reducer.close_leaf()
            if shared is not None:
                self.reducer.buffers = shared.checksum()
            self.reducer.finish()
        except BaseException:
            self.reducer.leave()
            raise
        if self.declared.inputs.looks:
            group = self.reducer.group
            self.declared.inputs.compare(self.reducer.exchange.input_digests, group.ranks, group.rank)
        said = self.reducer.exchange.buffers
        if shared is not None and shared.differ(said):
            with self.reducer.recorder.span(BUFFERS, lane="host"):
                self.reducer.lane.run(BROADCAST, lambda: shared.exchange(said)).wait()

    def _mark(self) -> Mark:
        micro_batch = self.declared.micro_batch
        return self.sync, None if micro_batch is None else micro_batch.index

    def _start(self, name: str) -> None:
        """A span begins: "forward" or "backward"."""
        if (raised := self._open.pop(name, None)) is not None:
            raised.cancel()
        if self.records:
            micro_batch = self.declared.micro_batch
            leaf = -1 if micro_batch is None else micro_batch.index
            self._open[name] = self.reducer.recorder.span(name, lane="compute", leaf=leaf).begin()

    def _stop(self, name: str) -> None:
        if (span := self._open.pop(name, None)) is not None:
            span.end()


class StepSession:
    """What the steps of one wrapper share: plan, random numbers, groups in use, one way to leave, one end.

    They are those of ``module`` by ``reducer``, which says who adds up which gradients; the rest of a step is
    the same for all wrappers. ``close`` ends them, or the collection of ``wrapper``.

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
        iterator = self.declared.run(num_micro_batches, step)
        self.declared.iterators.add(iterator)
        if (yield from iterator):
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


def _gradient_came(reference: weakref.ref[Backward], i: int, parameter: Tensor) -> None:
    """Autograd has accumulated into ``.grad`` of parameter i. Runs once per parameter: keep it flat."""
    self = reference()
    if self is None:
        return
    if not self._runs:  # forward was bypassed
        self._backward_begins()
        self._marks.append(self._mark())
    try:
        while self._marks:
            self._obey(self._marks.pop())
        if (declared := self.declared).micro_batch is not None and declared.weight_taken is None:
            declared.gradient_came()
        hooks = parameter._post_accumulate_grad_hooks
        # A hook that has returned something has left none, and torch is about to say so.
        is_last = bool(hooks) and (len(hooks) == 1 or next(reversed(hooks)) == self._gradient_hooks[i].id)
        self.reducer.arrived(i, settles=is_last)
    except BaseException:
        self.reducer.leave()
        raise


def _name(micro_batch: int | None) -> str:
    return "no micro-batch" if micro_batch is None else f"micro-batch {micro_batch}"
