"""What a user's script trains, as the run sees it: what it has registered, as one state on one mesh after
another.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from instep.checkpoint import contract
from instep.checkpoint.canary import canary
from instep.checkpoint.contract import require_same
from instep.checkpoint.listed import modules
from instep.checkpoint.manifest import Json, fingerprint
from instep.checkpoint.registered import Registered
from instep.checkpoint.state import TrainingState
from instep.elastic.heartbeat import Heartbeat
from instep.errors import CheckpointRejected, ContractBroken
from instep.events import COMPARISON
from instep.mesh.mesh import Mesh
from instep.net.agree import require_same_lines
from instep.net.process_group import Group
from instep.record.step_lines import Made
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.best import Best
from instep.run.health import Health
from instep.run.rank_state import RankState
from instep.run.recovery import InitialState, send
from instep.run.settings import ScriptBatch, ScriptCommand, ScriptConfig
from instep.run.timing import Timing
from instep.run.toml import to_toml
from instep.state.hash import Sampled, SharedHash, bare
from instep.state.homes import Wrapped, offered
from instep.state.replicas import compare_replicas

OPERATION = "the comparison of what was built"


class ScriptTraining:
    """What was registered, and where its steps stand.

    At construction: nothing is touched. ``keep`` what was built, where the first ranks have not met yet.
    ``join`` a mesh, with which the wrappers meet; ``leave`` it, whatever has happened to the others; again.
    ``rank_state`` says what this rank has of the run's state; ``state`` is that state, as shards, while there
    is a mesh.
    """

    state: TrainingState  # this one and those below: while there is a mesh
    mesh: Mesh
    group: Group
    timing: Timing
    _hash: SharedHash
    seen: GradientHashes | None = None  # of the last step, where they are asked for

    def __init__(
        self,
        settings: ScriptConfig,
        registered: Registered,
        heartbeat: Heartbeat,
        *,
        script_config: Any = None,
        contract_of: Callable[[], Mapping[str, Any]] = dict,
        held_out_loss: Callable[[], float] | None = None,
        command: str = "instep run",
    ) -> None:
        """``script_config``: the script's own settings, a dataclass, if it has any; ``contract_of()`` are its
        fields in the contract, and ``held_out_loss()`` is what ``evaluate`` asks; ``command`` started it."""
        self.registered = registered
        self.config, self.script_config, self.command = settings, script_config, command
        self.heartbeat = heartbeat
        self._contract_of, self._held_out_loss = contract_of, held_out_loss
        self.rank_state = RankState()
        self.health, self.best = Health(settings.checks), Best.of(settings.checkpoint.best)
        self.generation = 1
        self._is_supervised = False  # by what was built, which is kept then
        self._is_wrapped = True  # over some mesh: first that which the script was built with
        self._built: InitialState | None = None
        self._has_counted = False  # what autograd keeps, in the first step that this process has made

    # What it is made of.

    @cached_property
    def module(self) -> nn.Module:
        """All that is trained, in one module."""
        return self.registered.root

    @property
    def settings(self) -> Any:
        """The script's own, if it has any; else those of the run."""
        return self.config if self.script_config is None else self.script_config

    @property
    def recorded(self) -> str:
        """The settings, and by which command the run was started, where its script has no other words."""
        written = to_toml(self.settings)
        if self.script_config is None or not self.config.script:
            return written
        config = self.config
        command = ScriptCommand(script=config.script, module=config.module, arguments=config.arguments)
        return to_toml(command) + written

    @property
    def loss_unit(self) -> str:
        """As the script says."""
        return self.config.record.loss_unit

    @property
    def items_per_step(self) -> int:
        """As the script says; else samples, where a loader does; else steps are counted."""
        return self.config.record.items_per_step or self.config.batch.global_size or 1

    @property
    def item(self) -> str:
        """What the throughput counts."""
        return self.config.record.items or ("samples" if self.config.batch.global_size else "steps")

    @property
    def step_mode(self) -> str | None:
        """Which of the two contracts the last step was under, of the first wrapper that knows."""
        found = (getattr(model, "step_mode", None) for model in self.registered.models.values())
        return next((mode for mode in found if mode is not None), None)

    @property
    def cursor(self) -> int:
        """The position of the first loader; else the steps done."""
        return self.registered.cursor(self.steps_done)

    # One mesh after another.

    def keep(self) -> None:
        """Keep a copy of what was built, until all ranks have agreed on a state: it is what they begin with.

        Where the state is divided, nothing is left of it when a rank joins others. Parameters from the meta
        device have no values yet: they get them in ``begin``.
        """
        self.state = self.registered.state()
        self._built, self._is_supervised = InitialState(self), True
        owned = [x for x in self.state.owned(self.state.hashed()) if self.state.has_values(x)]
        self._built_sha256, _ = SharedHash(self.state.group).digests(owned, self.steps_done)
        del self.state

    def join(self, mesh: Mesh, wrappers: bool) -> None:
        """Take part in ``mesh``, with what was registered if ``wrappers``: else it has met there already.

        Raises:
            ContractBroken: a rank has another configuration. On all ranks.
        """
        self.mesh, self.group = mesh, mesh.world.group
        if not self.config.batch.global_size:  # each rank has a micro-batch of its own
            batch = ScriptBatch(num_micro_batches=mesh.data.size)
            self.config = dataclasses.replace(self.config, batch=batch)
        if wrappers:
            if self._is_wrapped:
                self.registered.leave()
            self._is_wrapped = True
            self.registered.join(mesh)
        require_same(mesh.world.group, self.contract)
        self._hold(self.registered.state(self.group))

    def leave(self) -> None:
        """Give the groups back, without waiting for any rank."""
        divided = self.has_joined and (self.state.is_divided or self.state.goes_with_its_group)
        self.seen = None  # who takes a lost rank's place has none, and hashes are gathered by all or by none
        self.registered.leave()
        self._is_wrapped = False
        self.rank_state.left(divided=divided)
        self._let_go()

    def begin(self) -> None:
        """All ranks take what the script has built; where they differ, what the first rank has."""
        group = self.mesh.world.group
        if self._is_supervised:
            self._require_built()
        self.compare_objects()
        if self._built is not None:
            self._require_same_build()
            self.registered.fill()
            self._built.put(self)
        self.rank_state.begin()
        self.health, self.best = Health(self.config.checks), Best.of(self.config.checkpoint.best)
        if self.state.is_divided or group.size == 1:
            return
        told = group.all_gather_bytes(self.state_sha256().encode(), OPERATION)
        if len(set(told)) > 1:
            send(self, 0)
            self.rank_state.begin()

    def put_built(self) -> None:
        """What a checkpoint without frozen weights is read into: they went where ranks met. Collective."""
        if self._is_supervised and self._all_built() and self._built is not None:
            self._built.put(self)

    def _all_built(self) -> bool:
        """Whether all ranks still have what they were built with: none has made a step. Collective."""
        world = self.mesh.world.group
        return b"-" not in world.all_gather_bytes(b"+" if self._built is not None else b"-", OPERATION)

    def _require_built(self) -> None:
        """CheckpointRejected on all ranks if one has made steps, and so has not what it was built with."""
        if not self._all_built():
            raise CheckpointRejected(
                "no rank has the run's state, and there is no checkpoint yet: start the run again, in a new "
                "directory"
            )

    def _require_same_build(self) -> None:
        """Where each rank is to keep its shards of what it has built, all must have built the same."""
        if not self.state.is_divided:
            return
        world = self.mesh.world.group
        told = world.all_gather_bytes(self._built_sha256.encode(), OPERATION)
        odd = [rank for rank, its in zip(world.ranks, told, strict=True) if its != told[0]]
        if odd:
            raise ContractBroken(
                f"rank {', '.join(map(str, odd))} has built a model with other values than rank "
                f"{world.ranks[0]}, so shards would not fit together: call torch.manual_seed with the same "
                "number on all ranks before the model is made"
            )

    def agreed(self) -> None:
        """A step is made, of a state that is in the snapshots: what was built is needed no longer."""
        self._built = None

    # The state that this rank holds while it is in a mesh.

    def _hold(self, state: TrainingState) -> None:
        """This is the state from now on."""
        self.state = state
        enter = self.heartbeat.enter if state.is_divided else _ignore
        self._hash = SharedHash(state.group, enter, self.heartbeat.beat)
        self.timing = Timing(self.mesh.recorder, self.group.size)

    def _let_go(self) -> None:
        """Give the mesh back, if there is one, and the state with it."""
        if (mesh := self.__dict__.pop("mesh", None)) is not None:
            mesh.recorder.keep_in_memory()  # a thread that is stuck may record on; the file is the next one's
            for name in ("state", "_hash", "group"):
                self.__dict__.pop(name, None)
            mesh.close()

    @property
    def has_joined(self) -> bool:
        """Whether there is a state, in a mesh, now."""
        return "state" in self.__dict__

    @property
    def steps_done(self) -> int:
        """Optimizer steps that the state is of."""
        return self.rank_state.steps_done

    @property
    def is_finished(self) -> bool:
        """Whether the step that led here was the last one, by number or by ``run.finish()``."""
        return self.steps_done >= self.config.steps or (self.last is not None and self.last.finish)

    @property
    def last(self) -> Made | None:
        """The step that led here."""
        return self.rank_state.last

    @property
    def owns(self) -> bool:
        """Whether this rank owns some of the state, or all: it writes that, and takes part in its hash."""
        return self.state.is_divided or self.mesh.rank == 0

    def entries(self) -> list[tuple[str, Tensor]]:
        """What this rank holds of the state, by name: all of a tensor, or its shard of it; nothing before
        it has joined."""
        if not self.has_joined:
            return []
        return [(bare(shard.name), shard.tensor) for shard in self.state.hashed()]

    def state_sha256(self) -> str:
        """The hash of weights, moments and step. Collective where the state is divided."""
        return self.state_digests()[0]

    def state_digests(self) -> tuple[str, dict[str, str]]:
        """``state_sha256``, and the short hash of each tensor. Collective where the state is divided."""
        self.heartbeat.enter("hash")
        found = self._hash.digests(self.state.owned(self.state.hashed()), self.steps_done)
        self.heartbeat.enter("gather")  # others are told of it next, or wait for it
        return found

    def sampled(self, every: int) -> list[Sampled]:
        """The blocks of the state whose turn it is, one in ``every``. Collective where it is divided."""
        return self._hash.samples(self.state.owned(self.state.hashed()), self.steps_done, every)

    def compare_replicas(self) -> None:
        """Raise ``ReplicasDiffer`` unless ranks that hold the same shards hold the same bits. Collective."""
        self.heartbeat.enter("gather")
        with self.mesh.recorder.span(COMPARISON, lane="host"):
            compare_replicas(self.state.hashed(), self.steps_done, self.group)
            self.compare_objects()

    def compare_objects(self) -> None:
        """Raise ``ContractBroken`` unless a registered object has the same state on all ranks: it is saved
        once, and a rank that is replaced would have another's. Collective."""
        bodies = self.registered.objects_to_json()
        lines = [
            f"the registered object {name!r} has state {fingerprint({'state': body})[:8]}"
            for name, body in bodies.items()
        ]
        require_same_lines(
            self.group,
            "the state of registered objects",
            lines,
            fix=": give it the same state on every rank, as instep.Loader has it, or do not register it",
            error=ContractBroken,
        )

    # The state, for those who write it and compare it.

    def carried(self) -> dict[str, Json]:
        """What is in no registered object, as JSON."""
        best = None if self.best is None else self.best.to_json()
        return {"health": self.health.state(), "modes": self.modes(), "best": best}

    def carry_on(self, carried: Mapping[str, Json]) -> None:
        """Go on from what ``carried`` has returned.

        Raises:
            CheckpointRejected: it is nothing that ``carried`` returns.
        """
        self.health.restore(carried["health"])
        self.set_modes(carried.get("modes"))
        if self.best is not None:
            self.best.restore(carried.get("best"))

    def modes(self) -> list[str]:
        """Which parameters are trained, and which modules are in training mode, one digit for each."""
        flags = (
            [p.requires_grad for p in self.module.parameters()],
            [m.training for m in modules(self.module)],
        )
        return ["".join("01"[flag] for flag in its) for its in flags]

    def set_modes(self, modes: Json) -> None:
        """Make them what ``modes`` has returned."""
        now = self.modes()
        if not isinstance(modes, list) or [len(str(its)) for its in modes] != [len(its) for its in now]:
            raise CheckpointRejected(
                "expected the modes of these modules and parameters, got those of others"
            )
        if modes == now:
            return
        for p, flag in zip(self.module.parameters(), modes[0], strict=True):
            p.requires_grad_(flag == "1")
        for module, flag in zip(self.module.modules(), modes[1], strict=True):
            module.training = flag == "1"

    def evaluate(self) -> float | None:
        """As the script has asked for; else it evaluates where it wants to. Collective."""
        if self._held_out_loss is None:
            return None
        self.heartbeat.enter("evaluate")
        with self.mesh.recorder.span("evaluate", lane="host"):
            return self._held_out_loss()

    @property
    def parallel(self) -> dict[str, Any]:
        """How ranks share a step: as the run was told, and the cuts and bucket size of this moment."""
        found = dataclasses.asdict(self.config.parallel)
        for model in self.registered.models.values():
            placed = getattr(model, "placement", None) or {}
            found |= {name: placed[name] for name in ("cuts", "bucket_mb") if name in placed}
        return found

    # The contract.

    @cached_property
    def contract(self) -> dict[str, Any]:
        """All that the bits of this run may depend on, as it is when it is first asked for."""
        fields = dict(self._contract_of())
        fields |= {f"environment.{name}": os.environ.get(name, "") for name in contract.KERNEL_SWITCHES}
        fields |= self._data_fields()
        fields |= self._node_fields()
        fields[contract.CANARY] = canary(self._device)
        optimizers = self.registered.optimizers
        for name, optimizer in optimizers.items():
            divided = offered(optimizer)
            prefix = "optimizer." if len(optimizers) == 1 else f"optimizer.{name}."
            local = optimizer if divided is None else divided.locals[0]
            found = contract.optimizer_fields(optimizer, local)
            fields |= {prefix + key: value for key, value in found.items()}
        return contract.describe(
            config=fields, threads=torch.get_num_threads(), device=str(self._device), module=self.module
        )

    def _node_fields(self) -> dict[str, str]:
        """What each wrapper rounds sums of gradients to, where it does."""
        wrapped = {name: offered(model) for name, model in self.registered.models.items()}
        plain = Wrapped.nodes
        return {
            f"nodes.{name}": x.nodes
            for name, x in wrapped.items()
            if isinstance(x, Wrapped) and x.nodes != plain
        }

    def _data_fields(self) -> dict[str, Any]:
        """Of each loader."""
        loaders = self.registered.loaders
        prefix = dict.fromkeys(loaders, "data.") if len(loaders) == 1 else {x: f"data.{x}." for x in loaders}
        return {
            prefix[name] + key: value
            for name, loader in loaders.items()
            for key, value in contract.loader_fields(loader).items()
        }

    @property
    def fingerprint(self) -> str:
        """The hash of what in the ``contract`` has to be the same for the same bits."""
        return fingerprint(contract.binding(self.contract))

    @property
    def contract_number(self) -> int:
        """Above 0, and another one for another ``fingerprint``."""
        return int(self.fingerprint[:14], 16) + 1

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))


def _ignore(phase: str) -> None:
    """Of what one rank does for itself, no phase is told."""
