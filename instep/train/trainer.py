"""A run in one process: text, model, optimizer, and one declared step after the other, on whatever ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import contract
from instep.data.loader import micro_batch_indices
from instep.data.text import TextSplits, open_text
from instep.elastic.faults import Injector, parse_all
from instep.elastic.pulse import Pulse
from instep.events import COMPARISON, GLOBAL_LOSS
from instep.mesh.mesh import Mesh
from instep.models.transformer import GPT, GPTConfig
from instep.ordered.hash import Entry, state_digests, state_sha256
from instep.ordered.keys import initialize
from instep.ordered.parts import Part
from instep.ordered.sample import Sampled, sampled_blocks
from instep.replicate.witness import Seen, observe_leaves
from instep.shard.parts import state_parts
from instep.step.leaves import Leaf
from instep.train.canary import text_canary
from instep.train.config import Config, numerical
from instep.train.corruption import compare_leaves, compare_replicas
from instep.train.culprit import give_up
from instep.train.hashes import Together
from instep.train.health import Health
from instep.train.losses import held_out_loss, mean_loss, share, text_loss
from instep.train.optimizers import forget, learning_rate, make_optimizer, set_learning_rate
from instep.train.parallel import Ranks, parallel
from instep.train.recompute import Computed, twin_gradients
from instep.train.timing import Timing
from instep.train.together import on_every_rank, require_same

WISHES = ("stop", "regroup", "copy")


@dataclass
class Made:
    """One step: its figures, the same on every rank but for the times, and why it was skipped if it was."""

    loss: float
    rate: float
    norm: float
    step_ms: float
    exposed_ms: float  # waited while messages travelled
    waiting_ms: float  # waited for a slower rank
    tokens_per_s: float
    skipped: str = ""
    stop: bool = False  # a rank has been asked to end the run
    regroup: bool = False  # a rank has been asked to leave the group
    copy: bool = False  # it is time to copy the state to memory, where all ranks have to


class Trainer:
    """The training state of a run, and what moves it.

    At construction, in a process of its own: text, model with weights by name, optimizer. ``join`` a mesh:
    ranks compare what they have, and the model is wrapped; collective. Then ``step`` after ``step``, until
    ``leave``, after which another mesh may be joined. ``state_of_run`` says whether the state is that of the
    run after ``steps_done``; it is not yet when others have it and this rank is new.

    Where the state is sharded, no rank has all of it, and ``state_of_run`` is False for good;
    ``parts_of_run`` says whether what this rank holds is of the run after ``steps_done``. ``optimizer`` is
    that of the mesh then, until ``leave``, with which the moments go, and weights that were in slices: in
    stage 3 the module is on the meta device whenever there is no mesh, and whole on no rank, but for a twin.
    """

    parallel: Ranks
    contract: dict[str, Any]

    def __init__(self, config: Config, mesh: Mesh | None = None, pulse: Pulse | None = None) -> None:
        self.config = config
        self.pulse = pulse or Pulse()
        self.state_of_run = self.parts_of_run = False
        self.generation = 1
        self.seen: Seen | None = None  # the hashes of the last step's leaves, where they are asked for
        self.wishes: dict[str, Callable[[], bool]] = {}
        self.device = torch.device("cpu")
        self.module = self._empty()
        self.optimizer: Optimizer = self._plain_optimizer()
        self.begin()
        self.injector = Injector(parse_all(config.fault), self.pulse.page, self.entries)
        self.pulse.on_enter = self.injector.reach
        self._read = _attempt(lambda: open_text(config.data, config.model.context))
        if mesh is not None:
            self.join(mesh)

    def begin(self) -> None:
        """Take the state of before the first step; in stage 3 on a mesh alone. Collective where sharded."""
        if (wrapped := self.__dict__.get("parallel")) is not None:
            wrapped.begin()
        elif not self._without_values:
            initialize(self.module, self.config.seed)
        forget(self.optimizer)
        self.health = Health(self.config.checks)
        self.steps_done, self.fresh = 0, True
        self.last: Made | None = None

    def prepare(self) -> None:
        """Compute now what joining will ask for, while nobody waits for this process."""
        with suppress(Exception):  # which is told when the ranks have met
            _ = self.canary, self._read().train.sha256
            contract.describe(config={}, threads=1, device="cpu", module=self.module)

    def join(self, mesh: Mesh) -> None:
        """Take part in ``mesh``: compare, and wrap the model. Collective over it.

        Raises:
            ContractBroken: a rank has another configuration, or computes otherwise.
        """
        self.mesh = mesh
        self.group = mesh.data.group
        self.injector.rank = mesh.rank
        world = mesh.world.group
        self.text: TextSplits = on_every_rank(world, "reading the text", self._read)
        self._move(mesh.device)
        self.contract = self.numerical()
        require_same(world, self.contract)
        if self.config.parallel.shard_stage >= 2:
            _ = self.canary  # which takes a copy, and a module in slices has none
        self.parallel = parallel(self.config, mesh, self.module, self.optimizer, self.pulse, self._bare)
        self.optimizer = self.parallel.optimizer
        self._together = Together(self.group, self.pulse.enter)
        self.timing = Timing(mesh.recorder, self.group.size)

    def _move(self, device: torch.device) -> None:
        """Weights and moments to ``device``; a survivor may have sat at another."""
        if self.device != device:
            self.__dict__.pop("canary", None)
        self.device = device
        if not self._without_values:  # those come to where they are filled
            self.module.to(device)
        for parameter, state in self.optimizer.state.items():
            moments = {
                key: x.to(parameter.device) for key, x in state.items() if torch.is_tensor(x) and x.ndim
            }
            state.update(moments)

    def leave(self) -> None:
        """Give the groups back; whatever happened to the others, it waits for nobody."""
        if (wrapped := self.__dict__.pop("parallel", None)) is not None:
            wrapped.close()
            if wrapped.is_sharded:
                self.state_of_run = self.parts_of_run = False
        if self._without_values:  # or in slices by half, after a rank was lost
            self.module = self._empty()
        if self.config.parallel.shard_stage:
            self.optimizer = self._plain_optimizer()
        self.module.zero_grad()  # a step may have been given up between its gradient and its update
        if (mesh := self.__dict__.pop("mesh", None)) is not None:
            mesh.recorder.keep_in_memory()  # a thread that is stuck may record on; the file is the next one's
            self.__dict__.pop("_together", None)
            del self.group
            mesh.close()

    @property
    def cursor(self) -> int:
        """Global position in the stream of samples: the next step begins here."""
        return self.steps_done * self.config.batch.global_size

    def numerical(self) -> dict[str, Any]:
        """All that the bits of this run may depend on now; ``contract`` is what it was at ``join``."""
        fields = {**numerical(self.config), "data.sha256": self.text.train.sha256}
        fields |= {f"environment.{name}": os.environ.get(name, "") for name in contract.KERNEL_SWITCHES}
        return contract.describe(
            config=fields,
            threads=torch.get_num_threads(),
            device=str(self.mesh.device),
            module=self.module,
            optimizer=self.optimizer,
        )

    @cached_property
    def canary(self) -> str:
        """The hash of what this process computes on one fixed micro-batch."""
        return text_canary(self.module, self.config, self.device)

    def parts(self) -> list[Part]:
        """What this rank holds of the state."""
        return state_parts(self.module, self.optimizer)

    def entries(self) -> list[Entry]:
        """What this rank holds of the state, by name: all of an entry, or its piece of it."""
        return [(part.name, part.tensor) for part in self.parts()]

    @property
    def hashes(self) -> bool:
        """Whether this rank has to take part when rank 0 wants to know a hash of the state."""
        return self.parallel.is_sharded or self.mesh.rank == 0

    def state_sha256(self) -> str:
        """The hash of weights, moments and step. Collective where the state is sharded."""
        if self.parallel.is_sharded:
            return self.state_digests()[0]
        return state_sha256(self.entries(), self.steps_done)

    def state_digests(self) -> tuple[str, dict[str, str]]:
        """``state_sha256``, and the short hash of each entry. Collective where the state is sharded."""
        if self.parallel.is_sharded:
            return self._together.digests(self.parts(), self.steps_done)
        return state_digests(self.entries(), self.steps_done)

    def sampled(self, every: int) -> list[Sampled]:
        """The blocks of the state whose turn it is, one in ``every``. Collective where it is sharded."""
        if self.parallel.is_sharded:
            return self._together.samples(self.parts(), self.steps_done, every)
        return sampled_blocks(self.entries(), self.steps_done, every)

    def step(self) -> Made:
        """One optimizer step. Collective.

        Raises:
            Diverged: too many steps in a row had a gradient that is not finite.
            ReplicasDiffer: a rank computes otherwise.
        """
        config, recorder = self.config, self.mesh.recorder
        began = time.monotonic()
        self.timing.begin(self.steps_done)
        rate = learning_rate(config.optim, self.steps_done, config.steps)
        skipped = self.health.planned(self.steps_done)
        losses, norm = ({}, 0.0) if skipped else self._gradients()
        self.pulse.enter("loss")
        wishes = {name: float(wish()) for name, wish in self.wishes.items()}
        addends = {**wishes, **self.parallel.told(norm)}
        with recorder.span(GLOBAL_LOSS, lane="host"):
            told = share(losses, config.num_leaves, addends, self.group, self.timing.own)
        self.timing.heard(told.figures)
        norm = told.sums.get("norm", norm)
        self._check_leaves()
        # From here to the count of the step nothing fails but the process: it is made, or it is not.
        skipped = skipped or self.health.judge(norm)
        self.pulse.enter("update")
        if skipped:
            self._skip(skipped, norm)
        else:
            self._update(rate)
        self._count()
        exposed_s, waiting_s = self.timing.waits()
        step_s = time.monotonic() - began
        tokens = config.batch.global_size * config.model.context
        self.last = Made(
            loss=mean_loss(told.losses) if losses else float("nan"),
            rate=rate,
            norm=norm,
            step_ms=step_s * 1e3,
            exposed_ms=exposed_s * 1e3,
            waiting_ms=waiting_s * 1e3,
            tokens_per_s=tokens / step_s,
            skipped=skipped or "",
            **{name: told.sums.get(name, 0.0) > 0 for name in WISHES},
        )
        return self.last

    def evaluate(self) -> float:
        """The held-out loss, in nats per byte. Collective."""
        self.pulse.enter("evaluate")
        with self.mesh.recorder.span("evaluate", lane="host"):
            return self._held_out_loss()

    def _held_out_loss(self) -> float:
        return held_out_loss(
            self.module,
            self.text.held_out,
            self.group,
            num_windows=self.config.eval.windows,
            micro_size=self.config.batch.micro_size,
            device=self.mesh.device,
            autocast=self.config.autocast,
            before_gather=lambda: self.pulse.enter("gather"),
        )

    def compare_replicas(self) -> None:
        """Raise ``ReplicasDiffer`` unless all ranks hold the same bits, or all rows do. Collective."""
        self.pulse.enter("gather")
        entries, row_size = self.entries(), self.parallel.row_size
        with self.mesh.recorder.span(COMPARISON, lane="host"):
            everywhere = self.parallel.replicated(entries)
            compare_replicas(everywhere, self.steps_done, self.group)
            if self.parallel.is_sharded and row_size < self.group.size:
                known = {name for name, _ in everywhere}
                divided = [entry for entry in entries if entry[0] not in known]
                compare_replicas(divided, self.steps_done, self.group, row_size=row_size)

    def plan(self) -> Sequence[Sequence[int]]:
        """The micro-batches of each rank."""
        return self.parallel.plan(self.group.size)

    def compute(self, leaf: int) -> Computed:
        """The gradients of micro-batch ``leaf`` of the step that is under way, of nobody's group."""
        computed = twin_gradients(
            self.parallel.twin(),
            self._loss,
            leaf,
            num_leaves=self.config.num_leaves,
            step=self.steps_done,
            seed=self.config.seed,
        )
        self.pulse.enter("gather")  # others are told of it next
        return computed

    def _gradients(self) -> tuple[dict[int, Tensor], float]:
        """Forward, backward and exchange: this rank's losses, and the norm where it is known."""
        watched = observe_leaves(self.parallel.model) if self.config.ledger.leaves else nullcontext()
        with watched as self.seen:
            losses = self.parallel.gradients(self.steps_done, self._loss)
        return losses, self.parallel.norm()

    def _update(self, rate: float) -> None:
        """New weights. Until it is over they are those of no step."""
        set_learning_rate(self.optimizer, rate)  # not before: until here the state is that of the last step
        before = self.state_of_run, self.parts_of_run
        self.state_of_run = self.parts_of_run = False
        self.parallel.update()
        self.state_of_run, self.parts_of_run = before

    @property
    def _without_values(self) -> bool:
        """Whether the module has none until it is in slices, which are filled one parameter at a time."""
        return self.config.parallel.shard_stage == 3

    def _empty(self) -> nn.Module:
        with torch.device("meta" if self._without_values else "cpu"):
            return self._bare()

    def _bare(self) -> nn.Module:
        return GPT(GPTConfig(**asdict(self.config.model)))

    def _plain_optimizer(self) -> Optimizer:
        return make_optimizer(self.module.parameters(), self.config.optim)

    def _skip(self, reason: str, norm: float) -> None:
        if self.health.exhausted:
            give_up(
                self.health,
                reason,
                norm,
                step=self.steps_done,
                compute=self.compute,
                leaves=self.plan()[self.group.rank],
                group=self.group,
                weights=self.entries(),
            )
        self.parallel.skip()

    def _count(self) -> None:
        self.steps_done += 1
        self.fresh = False
        self.pulse.has(self.steps_done)

    def _check_leaves(self) -> None:
        every = self.config.checks.leaves_every
        if every and (self.steps_done + 1) % every == 0:
            with self.mesh.recorder.span(COMPARISON, lane="host"):
                compare_leaves(self.group, self.compute, self.plan(), self.steps_done)

    def _loss(self, model: nn.Module, leaf: Leaf) -> Tensor:
        recorder = self.mesh.recorder
        with recorder.span("data", lane="data", leaf=leaf.index):
            self.pulse.enter("data")
            windows = self._windows(leaf.index)
        with recorder.span("forward", lane="compute", leaf=leaf.index):
            self.pulse.enter("forward")
            loss = text_loss(model, windows, device=self.mesh.device, autocast=self.config.autocast)
            return self.injector.spoil(loss, model, self.steps_done)

    def _windows(self, leaf: int) -> Tensor:
        indices = micro_batch_indices(
            len(self.text.train),
            step=self.steps_done,
            leaf=leaf,
            num_leaves=self.config.num_leaves,
            micro_size=self.config.batch.micro_size,
            seed=self.config.seed,
        )
        return self.text.train.windows(indices)


def _attempt(function: Callable[[], TextSplits]) -> Callable[[], TextSplits]:
    """``function`` called now; what it returned or raised, whenever the result is called."""
    try:
        result = function()
    except Exception as error:
        failed = error

        def fail() -> TextSplits:
            raise failed

        return fail
    return lambda: result
