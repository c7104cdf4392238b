"""The text recipe in training by hand, on ranks that may be threads: what its script does, step by step."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

import instep
from instep.checkpoint.registered import Registered
from instep.elastic.faults import FaultInjector, parse_all
from instep.elastic.heartbeat import Heartbeat
from instep.mesh.mesh import Mesh
from instep.recipes import text_config
from instep.recipes.corpus import open_text
from instep.recipes.text import declared_step, distribute, held_out_loss, make_model
from instep.recipes.text_config import Config, ParallelConfig, learning_rate, numerical
from instep.record.step_lines import Made
from instep.run.placement import layout_of
from instep.run.recovery import Checkpoints, restore_newest
from instep.run.script_training import ScriptTraining
from instep.run.settings import ScriptConfig, ScriptEvaluation, ScriptRecord
from instep.run.step import StepWork
from tests.parity import world_of_one

STEPS = 3
NOWHERE = Path("there is no such run")


def tiny(data: Path, strategy: str = "bucketed", stage: int = 0, **changes: object) -> Config:
    """The tiny recipe without dropout, which ranks that are threads cannot draw."""
    config = text_config.tiny()
    layout = ParallelConfig(strategy=strategy, shard_stage=stage)  # type: ignore[arg-type]
    model = replace(config.model, dropout=0.0)
    config = replace(config, model=model, data=data, steps=STEPS, parallel=layout)
    return replace(config, **changes)  # type: ignore[arg-type]


class TextTraining:
    """One rank's part of the run: built for ``mesh``, which it may leave, to join another one.

    Without one it is a process under ``instep run`` that waits for its rank.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None, heartbeat: Heartbeat | None = None) -> None:
        self.config, heartbeat = config, heartbeat or Heartbeat()
        self.text = open_text(config.data, config.model.context)
        sizes = config.batch.global_size, config.batch.micro_size
        self.data = instep.Loader(self.text.train, *sizes, seed=config.seed, collate_fn=torch.stack)
        self.module = make_model(config, torch.device("cpu"))
        self.model, self.optimizer = distribute(self.module, config, mesh or world_of_one())
        registered = Registered({"model": self.model, "optimizer": self.optimizer, "data": self.data})
        settings = layout_of(registered, settings_of(config))
        module, text = self.module, self.text
        self.training = training = ScriptTraining(
            settings,
            registered,
            heartbeat,
            contract_of=lambda: {**numerical(config), "data.sha256": text.train.sha256},
            held_out_loss=lambda: held_out_loss(module, module, text.held_out, config, training.mesh),
        )
        self.injector = FaultInjector(parse_all(config.fault), heartbeat.page, training.entries)
        heartbeat.on_enter = self.injector.on_enter
        self.work = StepWork(training, self.injector)
        if mesh is None:
            training.keep()
            return
        self.injector.rank = mesh.rank
        training.join(mesh, wrappers=False)
        self.work.phases.follow(mesh.recorder)

    def begin(self) -> None:
        """Take what was built, as where no rank finds another state. Collective."""
        self.training.begin()
        self.agree()

    def agree(self, path: Path = NOWHERE) -> str:
        """All ranks take the newest state that there is: where it came from. Collective."""
        return restore_newest(self.training, None, Checkpoints(path, 20))[0]

    def leave(self) -> None:
        self.training.leave()

    def join(self, mesh: Mesh) -> None:
        self.injector.rank = mesh.rank
        self.training.join(mesh, wrappers=True)
        self.work.phases.follow(mesh.recorder)

    def step(self) -> Made:
        """One optimizer step. Collective."""
        training, work = self.training, self.work
        work.begin({})
        try:
            self._make()
        finally:
            work.close_step()
        training.rank_state.holds = work.held
        work.end()
        training.agreed()
        assert training.last is not None
        return training.last

    def steps(self, num_steps: int = STEPS) -> list[Made]:
        return [self.step() for _ in range(num_steps)]

    def close(self) -> None:
        if self.training.has_joined:
            self.training.registered.leave()

    def _make(self) -> None:
        config, mesh = self.config, self.training.mesh
        losses = declared_step(self.model, self.module, self.data, config, mesh)
        self.work.log({"loss": instep.mean(losses, process_group=mesh)})
        if config.optim.clip:
            instep.clip_grad_norm_(self.module.parameters(), config.optim.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, self.training.steps_done, config.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()


def settings_of(config: Config) -> ScriptConfig:
    """What the run of ``config`` is told."""
    return ScriptConfig(
        steps=config.steps,
        stop_after=config.stop_after,
        accept_contract=config.accept_contract,
        seed=config.seed,
        timeout_s=config.timeout_s,
        checkpoint=config.checkpoint,
        eval=ScriptEvaluation(every=config.eval.every),
        checks=config.checks,
        record=ScriptRecord(**asdict(config.record)),
    )


def trained(config: Config, mesh: Mesh, steps: int = STEPS) -> TextTraining:
    """A training after some steps of the run."""
    training = TextTraining(config, mesh)
    training.begin()
    training.steps(steps)
    return training
