"""One step of a script, from ``with step:`` to its end: what it draws, which optimizers step, and whether.

begin      generators are keyed by (seed, step, rank), what is no tensor is noted
in it      before an optimizer's step: is it registered? is its gradient finite? then the state is of no step
end        ranks tell each other what each wishes, and how long it took; the step is counted

A step that is not to be applied goes to its end like any other: its optimizers find no gradients and change
nothing, while the script's schedules and averages go on. Nothing is raised that a script could catch.
recover    of a lost rank: if no tensor was touched, the state is what it was, and may be given to others
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.elastic.faults import FaultInjector, named, poison_gradients
from instep.events import BOOKKEEPING, COMPARISON, GLOBAL_LOSS, WAITS, Recorder
from instep.net.device import generators
from instep.net.process_group import Group
from instep.pipeline.actions import INPUT_GRADIENT, SPANS, WEIGHT_GRADIENT
from instep.record.step_lines import BUBBLE_MS, RESERVED, Made
from instep.reduce.norm import Clips, clipping, grad_norm, norm_over
from instep.replicate.gradient_hashes import GradientHashes, joined, observe_reduction, reductions_of
from instep.rng.generators import global_generators, seed_generator
from instep.rng.keys import derive
from instep.run.nonfinite import NonFiniteSearch
from instep.run.rank_state import Holds
from instep.run.script_training import ScriptTraining
from instep.run.unregistered import Unregistered
from instep.state.homes import autograd_leaf, offered
from instep.step.backward import is_in_backward
from instep.step.reduction import Reduction

WISHES = ("stop", "finish", "regroup", "copy")
OWN = "script"  # the phase of what is no span
PHASES = {
    **{name: name for name in ("data", "forward", "backward", "update")},
    **dict.fromkeys((SPANS[INPUT_GRADIENT], SPANS[WEIGHT_GRADIENT]), "backward"),  # of a stage
    **dict.fromkeys(WAITS, "exchange"),
}
NAMED = BOOKKEEPING | {"clip", "evaluate", "finish", COMPARISON, GLOBAL_LOSS}


class SpanPhases:
    """Tells the heartbeat in which phase the main thread is, by the spans that begin and end there.

    Or in a backward that it waits for: of a GPU's tensors, autograd executes that in a thread of its own.
    """

    def __init__(self, enter: Callable[[str], None]) -> None:
        self._enter = enter
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self.has_read = False  # what a loader gave, in this step

    def follow(self, recorder: Recorder) -> None:
        """Be told by ``recorder`` of the spans that say something."""
        recorder.watch, recorder.watched = self.watch, PHASES

    def begin(self, phase: str = OWN) -> None:
        """A step begins, in the script's own code; or another ``phase``, in which waits alone are told."""
        self._open, self.has_read = [phase], False
        self._enter(phase)

    def watch(self, name: str, begins: bool) -> None:
        """A span begins, or ends; of other threads, and of other names, nothing is told."""
        phase = PHASES.get(name)
        if phase is None or not self._open:
            return
        if threading.get_ident() != self._thread and not is_in_backward():
            return
        if self._open[0] != OWN and phase != "exchange":
            return
        if begins:
            self.has_read |= phase == "data"
            self._open.append(phase)
        elif len(self._open) > 1:
            self._open.pop()
        self._enter(self._open[-1])

    def end(self) -> None:
        """What follows tells its phases itself."""
        self._open = []

    def own(self) -> None:
        """The script's own code goes on."""
        self._enter(OWN)


class StepWork:
    """The step that is under way, of one ``training``; ``wishes`` are asked at its end.

    ``recovers``: this process goes on when another rank is lost, and then has to know what it has touched.
    """

    def __init__(
        self, training: ScriptTraining, injector: FaultInjector | None = None, *, recovers: bool = True
    ) -> None:
        self.training, self.recovers = training, recovers
        self.injector, self.search = injector or FaultInjector(()), NonFiniteSearch(training)
        self.phases = SpanPhases(training.heartbeat.report)
        self.wishes: dict[str, Callable[[], bool]] = {}
        self._optimizers = {id(x): name for name, x in training.registered.optimizers.items()}
        self._unregistered = Unregistered(training.registered)
        self.thread = threading.get_ident()
        self._is_open = False
        self._watching = ExitStack()
        self.hashes: dict[str, GradientHashes] = {}  # of the last step that was watched, by reduction
        self._step_begun, self._mark, self.held = -1, object(), Holds.INITIAL
        self._modes: list[str] = []
        self._logged: dict[str, float] = {}
        self._norms: list[float] = []  # of each update
        self._clips = Clips(Recorder())
        self._skipped = ""  # why this step is not applied

    def log(self, figures: Mapping[str, Any]) -> None:
        """Figures of this step."""
        if not self._is_open:
            raise RuntimeError(
                "step.log: expected to be called inside of `with step:`: what is logged is a part of the step"
            )
        for name, value in figures.items():
            if name in RESERVED:
                raise ValueError(
                    f"step.log: {name}: the run records a field of this name itself: choose another name"
                )
            if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
                value = value.item()
            if isinstance(value, bool) or not isinstance(value, int | float):
                shape = f" of shape {list(value.shape)}: take its mean()" if hasattr(value, "shape") else ""
                raise ValueError(f"step.log: {name}: expected a number, got {type(value).__name__}{shape}")
            self._logged[name] = float(value)

    def span(self, name: str) -> AbstractContextManager[object]:
        """A span of the script's own code."""
        if not self._is_open:
            raise RuntimeError("step.span: expected to be called inside of `with step:`")
        if name in PHASES or name in NAMED:
            raise ValueError(f"step.span: {name!r} is a span of instep's own: take another name")
        return self.training.mesh.recorder.span(name, lane="host")

    @property
    def reduced(self) -> dict[str, Reduction]:
        """What reduces gradients of which some rank has each whole, so that it can be hashed."""
        return {key: x for key, x in reductions_of(self.training.registered.models) if not x.sharded}

    def begin(self, watched: Mapping[str, Reduction]) -> None:
        """The step begins; every gradient of what is ``watched`` is hashed."""
        training = self.training
        training.seen, self.hashes = None, {}
        known = self.reduced if training.config.record.leaves else {}
        for key, reduction in (known | dict(watched)).items():
            self.hashes[key] = self._watching.enter_context(observe_reduction(reduction))
        self._inject()
        self._watching.enter_context(self.search.watched())  # past what was injected
        self._unregistered.begin()
        training.timing.begin(training.steps_done)
        with training.timing.bookkeeping("begin"):
            self._began = time.monotonic()
            self._logged, self._norms, self._judged, self._skipped = {}, [], False, ""
            self._num_updates = training.registered.num_updates.total()
            self.held = training.rank_state.holds
            if self.recovers:
                self._step_begun, self._modes = training.steps_done, training.modes()
                self._mark = self._state_mark()
            self._key_generators()
            self._clips = Clips(training.mesh.recorder)
            self._token = clipping.set(self._clips)
        self._is_open = True
        _open.append(self)
        self.phases.begin()

    def end(self) -> float:
        """The step is made, or was skipped: tell each other, and count it; its seconds. Collective."""
        training, made, skipped = self.training, self._logged, self._skipped
        self._unregistered.end(training.steps_done, has_read=self.phases.has_read)
        if not skipped:
            self._require_no_gradients()
        training.heartbeat.enter("loss")
        wishes = {name: float(wish()) for name, wish in self.wishes.items()}
        with training.mesh.recorder.span(GLOBAL_LOSS, lane="host"):
            wished, figures = share(wishes, training.timing.own, training.group)
        training.timing.heard(figures)
        norm = self._settle_norm()
        health = training.health
        if skipped and health.exhausted and health.planned(training.steps_done) is None:
            self.search.give_up(skipped, math.nan if norm is None else norm)
        exposed_s, waiting_s, bubble_s = training.timing.waits()
        step_s = time.monotonic() - self._began
        logged = {name: x for name, x in made.items() if name != "loss"}
        if bubble_s:
            logged[BUBBLE_MS] = bubble_s * 1e3
        training.rank_state.counted(
            Made(
                loss=made.get("loss"),
                rate=self._rate(),
                norm=norm,
                step_ms=step_s * 1e3,
                exposed_ms=exposed_s * 1e3,
                waiting_ms=waiting_s * 1e3,
                skipped=skipped,
                logged={f"{training.item}_per_s": training.items_per_step / step_s, **logged},
                **{name: wished.get(name, 0.0) > 0 for name in WISHES},
            )
        )
        training.heartbeat.set_step(training.steps_done)
        return step_s

    def recover(self) -> None:
        """A rank was lost: if no tensor of the state was touched, go back to what this rank had."""
        training = self.training
        state = training.rank_state
        if state.steps_done != self._step_begun or not training.has_joined:
            return
        training.set_modes(self._modes)  # it may have been evaluating
        if self._state_mark() != self._mark:
            state.holds = Holds.NOTHING

    def close_step(self) -> None:
        """The block of the step is over, or the step could not begin."""
        self._watching.close()
        if self._is_open:
            clipping.reset(self._token)
            _open.remove(self)
            if self.training.config.record.leaves:
                self.training.seen = joined({key: self.hashes[key] for key in self.reduced})
        self._is_open = False
        self.phases.end()

    def _inject(self) -> None:
        """A gradient of this step shall be nan, if it was asked for."""
        fault = self.injector.nan_due(self.training.steps_done)
        if fault is None:
            return
        trained = [(name, p) for name, p in self.training.module.named_parameters() if p.requires_grad]
        handle = poison_gradients(autograd_leaf(named(fault, trained)))
        self._watching.callback(handle.remove)

    def _settle_norm(self) -> float | None:
        """The norm of the step's gradient; all ranks have judged by it."""
        norms = self._norms or self._clips.norms
        if not norms:
            return None
        norm = math.hypot(*norms)
        if not self._judged and self._norms:
            self.training.health.judge(norm)
        return norm

    def _state_mark(self) -> object:
        return self.training.state.mark()

    def _key_generators(self) -> None:
        training = self.training
        key = derive(training.config.seed, "step", training.steps_done, training.mesh.rank)
        for generator in generators(training.mesh.device):
            seed_generator(generator, key)
        for other in global_generators():
            other.key(key)

    def _rate(self) -> float | None:
        groups = (optimizer.param_groups[0] for optimizer in self.training.registered.optimizers.values())
        return next((float(group["lr"]) for group in groups if "lr" in group), None)

    def _require_no_gradients(self) -> None:
        """ValueError if the step has left gradients for the update of another: they are in no state."""
        registered = self.training.registered
        has_updated = registered.num_updates.total() > self._num_updates
        if has_updated or not registered.optimizers:
            return
        trained = ((name, p) for name, p in self.training.module.named_parameters() if p.requires_grad)
        left = {name: p.grad for name, p in trained if p.grad is not None}
        if left and math.isfinite(grad_norm(left.values())):  # else a scaler has seen to it
            raise ValueError(
                f"step {self.training.steps_done} has left the gradient of {next(iter(left))!r}, and no "
                "optimizer has stepped in it: a rank that takes another's place would go on without. "
                "Accumulate inside of one step, over several micro-batches, or drop what is not to be used "
                "with zero_grad()"
            )

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Before the step of an optimizer."""
        name = self._optimizers.get(id(optimizer))
        if name is None:
            steppers = self.training.state.steps.locals
            self._unregistered.require_known(optimizer, self.training.steps_done, steppers)
            return None
        training = self.training
        self._skipped = self._skipped or training.health.planned(training.steps_done) or ""
        if not self._skipped:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            known = self._clips.norm_of([p.grad for p in stepped if p.grad is not None])
            self._norms.append(norm_over(stepped) if known is None else known)
            self._clips.clear()
            self._judge(self._norms[-1])
        training.rank_state.holds = Holds.NOTHING
        if not self._skipped:
            return None
        self._drop_gradients()
        self._before = [p._version for group in optimizer.param_groups for p in group["params"]]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None
        others = {name: x for name, x in kwargs.items() if name != "closure"}

        def without_gradients() -> Any:
            loss = closure()
            self._drop_gradients()
            return loss

        return (args[0], without_gradients), others

    def after_update(self, optimizer: Optimizer) -> None:
        """RuntimeError if ``optimizer`` has changed weights in a step that is skipped."""
        if not self._skipped or id(optimizer) not in self._optimizers:
            return
        now = [p._version for group in optimizer.param_groups for p in group["params"]]
        if now != self._before and offered(optimizer) is None:
            raise RuntimeError(
                f"step {self.training.steps_done} is skipped ({self._skipped}), but "
                f"{type(optimizer).__name__}.step() changed parameters whose .grad is None: have it leave "
                "these alone, as torch's optimizers do"
            )

    def _judge(self, norm: float) -> None:
        """Skip the step if its gradient is not to be used; all ranks have the same norm."""
        if len(self._optimizers) > 1 and math.isfinite(norm):
            return
        self._judged = True
        if reason := self.training.health.judge(norm):
            self.search.look_at(self.training.module)
            self._skipped = reason

    def _drop_gradients(self) -> None:
        """Give the optimizers nothing to step with."""
        for optimizer in self.training.registered.optimizers.values():
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None


_open: list[StepWork] = []  # several where ranks are threads, or a run is inside a step of another one


def _of_this_thread() -> list[StepWork]:
    return [step for step in _open if step.thread == threading.get_ident()]


def _before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = None
    for step in _of_this_thread():
        if (found := step.before_update(optimizer, args, kwargs)) is not None:
            args, kwargs = changed = found
    return changed


def _after_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for step in _of_this_thread():
        step.after_update(optimizer)


# Once, and not by each run: torch walks over the hooks of all optimizers without a lock.
register_optimizer_step_pre_hook(_before_update)
register_optimizer_step_post_hook(_after_update)


def share(
    addends: Mapping[str, float], figures: Sequence[float], group: Group
) -> tuple[dict[str, float], list[list[float]]]:
    """The sums over all ranks of ``addends``, and each rank's ``figures``, in group order, in one message.

    All ranks name the same addends, and have as many figures, which arrive unrounded: a sum in which all
    addends but one are zero is exact. Collective.
    """
    names, width = sorted(addends), len(figures)
    told = torch.zeros(len(names) + group.size * width, dtype=torch.float64, device="cpu")
    told[: len(names)] = torch.tensor([addends[name] for name in names], dtype=torch.float64, device="cpu")
    rows = told[len(names) :].view(group.size, width)
    rows[group.rank] = torch.tensor(figures, dtype=torch.float64, device="cpu")
    group.all_reduce(told, "the exchange at the end of a step")
    return dict(zip(names, told.tolist(), strict=False)), rows.tolist()
