"""A run in one process: data, model, optimizer, and one declared step after the other, on whatever ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import contract
from instep.checkpoint.canary import canary
from instep.checkpoint.contract import require_same
from instep.checkpoint.state import TrainingState, option_fields
from instep.elastic.faults import FaultInjector, parse_all
from instep.elastic.heartbeat import Heartbeat
from instep.events import COMPARISON, GLOBAL_LOSS
from instep.mesh.agree import all_or_none, attempt
from instep.mesh.mesh import Mesh
from instep.ordered.keys import initialize
from instep.replicate.gradient_hashes import GradientHashes, observe_gradients
from instep.run.health import Health
from instep.run.held_state import HeldState, contract_number
from instep.run.losses import mean_loss, share
from instep.run.memory_usage import MemoryUsage, activations, memory_usage
from instep.run.rank_state import Made, RankState
from instep.step.micro_batches import MicroBatch
from instep.step.running_statistics import put_back_on_error
from instep.train.nonfinite import give_up
from instep.train.optimizers import forget, learning_rate, make_optimizer, set_learning_rate
from instep.train.parallel import Replicated, parallel
from instep.train.recipe import Recipe
from instep.train.recompute import Computed, compare_leaves, twin_gradients
from instep.train.run_config import numerical

WISHES = ("stop", "regroup", "copy")
CANARY_SEED = 0  # of all runs: what a machine computes has nothing to do with a run's seed


class Trainer(HeldState):
    """The training state of a run, and what moves it.

    At construction, in a process of its own: data, model with weights by name, optimizer. ``join`` a mesh:
    ranks compare what they have, and the model is wrapped; collective. Then ``step`` after ``step``, until
    ``leave``, after which another mesh may be joined. ``rank_state`` says what this rank has of the run's
    state; ``state`` is that state, as shards, while there is a mesh.

    Where the state is divided, ``optimizer`` is that of the mesh, until ``leave``, with which the moments go,
    and weights that were in slices: in stage 3 the module is on the meta device whenever there is no mesh,
    and whole on no rank, but for a twin.
    """

    parallel: Replicated
    contract: dict[str, Any]

    def __init__(self, recipe: Recipe, mesh: Mesh | None = None, heartbeat: Heartbeat | None = None) -> None:
        self.recipe = recipe
        self.config = config = recipe.config
        self.heartbeat = heartbeat or Heartbeat()
        self.rank_state = RankState()
        self.generation = 1
        self.seen: GradientHashes | None = None  # of the last step, where they are asked for
        self.wishes: dict[str, Callable[[], bool]] = {}
        self.device = torch.device("cpu")
        self.module = self._empty()
        self.optimizer: Optimizer = self._plain_optimizer()
        self.begin()
        self.injector = FaultInjector(parse_all(config.fault), self.heartbeat.page, self.entries)
        self.heartbeat.on_enter = self.injector.reach
        self._open = attempt(recipe.open)
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
        self.rank_state.begin()

    def prepare(self) -> None:
        """Do now all of joining that needs no group, while no rank waits for this process.

        Raises:
            what reading the data raises, or a first forward: better here than where others would be told.
        """
        self.data = self._open()
        _ = self.recipe.training(self.data).sha256
        if not torch.cuda.is_available():  # whose device is chosen with the group
            self.contract = self.numerical()
            _ = self.canary

    def join(self, mesh: Mesh) -> None:
        """Take part in ``mesh``: compare, and wrap the model. Collective over it.

        Raises:
            ContractBroken: a rank has another configuration, or computes otherwise.
        """
        self.mesh = mesh
        self.group = mesh.data.group
        self.injector.rank = mesh.rank
        world = mesh.world.group
        self.data = all_or_none(world, "reading the data", self._open)
        self._move(mesh.device)
        self.contract = self.numerical()
        require_same(world, self.contract)
        if self.config.parallel.shard_stage >= 2:
            _ = self.canary  # which takes a copy, and a module in slices has none
        self.parallel = parallel(self.config, mesh, self.module, self.optimizer, self.heartbeat, self._bare)
        self.optimizer = self.parallel.optimizer
        self._hold(TrainingState(self.parallel.model, self.optimizer, self.group))

    def _move(self, device: torch.device) -> None:
        """Weights and moments to ``device``; a survivor may have used another before."""
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
        """Give the groups back; whatever happened to the others, it waits for none of them."""
        if (wrapped := self.__dict__.pop("parallel", None)) is not None:
            wrapped.close()
            self.rank_state.left(divided=wrapped.is_sharded)
        if self._without_values:  # or in slices by half, after a rank was lost
            self.module = self._empty()
        if self.config.parallel.shard_stage:
            self.optimizer = self._plain_optimizer()
        self.module.zero_grad()  # a step may have been given up between its gradient and its update
        self._let_go()

    @property
    def loss_unit(self) -> str:
        """The recipe's."""
        return self.recipe.loss_unit

    @property
    def items_per_step(self) -> int:
        """The recipe's."""
        return self.recipe.items_per_step

    @property
    def num_replicas(self) -> int:
        """How many share out the micro-batches: ranks, or threads."""
        return self.parallel.num_replicas

    @property
    def step_mode(self) -> str | None:
        """Which of the two contracts the last step was under."""
        return self.parallel.contract

    def carried(self) -> dict[str, Any]:
        """What of the state is neither tensor nor option of the optimizer, as JSON."""
        return {"health": self.health.state()}

    def carry_on(self, carried: Mapping[str, Any]) -> None:
        """Go on from what ``carried`` has returned."""
        self.health.restore(carried["health"])

    def lasting_options(self, options: Any) -> dict[str, Any]:
        """All but the learning rate, which is set anew before each step."""
        return {name: value for name, value in option_fields(options).items() if not name.endswith(".lr")}

    def memory_usage(self) -> MemoryUsage:
        """What this rank holds."""
        return memory_usage(self.module, self.optimizer, self.parallel.model)

    def activations(self) -> int | None:
        """Bytes that one more forward keeps, of a micro-batch that is not trained on; None where that much
        is not free any more: a run does not fail for want of a figure."""
        recipe, module = self.recipe, self.module
        try:
            return activations(module, lambda: recipe.loss(module, recipe.example(), self.mesh.device))
        except Exception:
            return None

    def memory_estimate(self) -> dict[str, int | float]:
        """The recipe's."""
        return self.recipe.memory_estimate(ranks=self.parallel.shard_group_size)

    @property
    def cursor(self) -> int:
        """Global position in the stream of samples: the next step begins here."""
        return self.steps_done * self.config.batch.global_size

    def numerical(self) -> dict[str, Any]:
        """All that the bits of this run may depend on now; ``contract`` is what it was at ``prepare``, or at
        ``join``."""
        fields = {**numerical(self.config), "data.sha256": self.recipe.training(self.data).sha256}
        fields |= {f"environment.{name}": os.environ.get(name, "") for name in contract.KERNEL_SWITCHES}
        return contract.describe(
            config=fields,
            threads=torch.get_num_threads(),
            device=str(self.device),
            module=self.module,
            optimizer=self.optimizer,
        )

    @property
    def contract_number(self) -> int:
        """Another one for another ``contract``, or for another ``canary``; 0 as long as that is not known."""
        if "contract" not in self.__dict__:
            return 0
        return contract_number(self.contract, self.canary)

    @cached_property
    def canary(self) -> str:
        """The hash of what this process computes on one fixed micro-batch."""
        recipe, example = self.recipe, self.recipe.example()
        return canary(
            self.module,
            lambda model: recipe.loss(model, example, self.device),
            seed=CANARY_SEED,
            device=self.device,
        )

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
        with put_back_on_error(self.module):  # which leaves the state of the last step
            losses, norm = ({}, 0.0) if skipped else self._gradients()
            self.heartbeat.enter("loss")
            wishes = {name: float(wish()) for name, wish in self.wishes.items()}
            addends = {**wishes, **self.parallel.told(norm)}
            with recorder.span(GLOBAL_LOSS, lane="host"):
                told = share(losses, config.num_leaves, addends, self.group, self.timing.own)
            self.timing.heard(told.figures)
            norm = told.sums.get("norm", norm)
            self._check_leaves()
        # From here to the count of the step nothing fails but the process: it is made, or it is not.
        skipped = skipped or self.health.judge(norm)
        self.heartbeat.enter("update")
        if skipped:
            self._skip(skipped, norm)
        else:
            self._update(rate)
        exposed_s, waiting_s = self.timing.waits()
        step_s = time.monotonic() - began
        made = Made(
            loss=mean_loss(told.losses) if losses else float("nan"),
            rate=rate,
            norm=norm,
            step_ms=step_s * 1e3,
            exposed_ms=exposed_s * 1e3,
            waiting_ms=waiting_s * 1e3,
            skipped=skipped or "",
            logged={"tokens_per_s": self.recipe.items_per_step / step_s},
            **{name: told.sums.get(name, 0.0) > 0 for name in WISHES},
        )
        self.rank_state.counted(made)
        self.heartbeat.set_step(self.steps_done)
        return made

    def evaluate(self) -> float:
        """The loss over what is held out. Collective."""
        self.heartbeat.enter("evaluate")
        with self.mesh.recorder.span("evaluate", lane="host"):
            return self._held_out_loss()

    def _held_out_loss(self) -> float:
        return self.recipe.held_out_loss(
            self.module, self.data, self.group, self.mesh.device, lambda: self.heartbeat.enter("gather")
        )

    def plan(self) -> Sequence[Sequence[int]]:
        """The micro-batches of each rank."""
        return self.parallel.plan(self.group.size)

    def compute(self, leaf: int) -> Computed:
        """The gradients of micro-batch ``leaf`` of the step that is under way, computed here alone."""
        computed = twin_gradients(
            self.parallel.twin(),
            self._loss,
            leaf,
            num_leaves=self.config.num_leaves,
            step=self.steps_done,
            seed=self.config.seed,
        )
        self.heartbeat.enter("gather")  # others are told of it next
        return computed

    def _gradients(self) -> tuple[dict[int, Tensor], float]:
        """Forward, backward and exchange: this rank's losses, and the norm where it is known."""
        watched = observe_gradients(self.parallel.model) if self.config.ledger.leaves else nullcontext()
        with watched as self.seen:
            losses = self.parallel.gradients(self.steps_done, self._loss)
        return losses, self.parallel.norm()

    def _update(self, rate: float) -> None:
        """New weights. Until it is over they are those of no step."""
        set_learning_rate(self.optimizer, rate)  # not before: until here the state is that of the last step
        with self.rank_state.updating():
            self.parallel.update()

    @property
    def _without_values(self) -> bool:
        """Whether the module has none until it is in slices, which are filled one parameter at a time."""
        return self.config.parallel.shard_stage == 3

    def _empty(self) -> nn.Module:
        with torch.device("meta" if self._without_values else "cpu"):
            return self._bare()

    def _bare(self) -> nn.Module:
        return self.recipe.make_model()

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

    def _check_leaves(self) -> None:
        every = self.config.checks.leaves_every
        if every and (self.steps_done + 1) % every == 0:
            with self.mesh.recorder.span(COMPARISON, lane="host"):
                compare_leaves(self.group, self.compute, self.plan(), self.steps_done)

    def _loss(self, model: nn.Module, leaf: MicroBatch) -> Tensor:
        recorder = self.mesh.recorder
        with recorder.span("data", lane="data", leaf=leaf.index):
            self.heartbeat.enter("data")
            data = self.recipe.read(self.data, self.steps_done, leaf.index)
        with recorder.span("forward", lane="compute", leaf=leaf.index):
            self.heartbeat.enter("forward")
            loss = self.recipe.loss(model, data, self.mesh.device)
            return self.injector.spoil(loss, model, self.steps_done)
