"""A run from config to exit code: start or join the ranks, train, save, resume, and sum up."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from instep.checkpoint import contract, load, save, state, tensors
from instep.checkpoint.manifest import Manifest
from instep.errors import CheckpointRejected, ContractBroken
from instep.mesh.join import init
from instep.mesh.launch import launch
from instep.mesh.mesh import Mesh
from instep.mesh.place import detect
from instep.train import folder, summary
from instep.train.config import Config, check_world, local_ranks, validate
from instep.train.folder import CHECKPOINTS, LEDGER, METRICS
from instep.train.loop import Books, Trainer, run_steps
from instep.train.progress import Display
from instep.train.together import on_rank_zero

DONE = 0
AGAIN = 75


def run(config: Config) -> int:
    """Train as ``config`` says, on ranks that are already there or on ranks of this host.

    Returns the exit code: 0 when the last step is done, 75 when the run stopped before and wants to be
    resumed.
    """
    validate(config)
    if detect(os.environ).source != "single":
        return run_rank(config)
    # The directory is claimed here, so that all ranks are told the same one.
    path = folder.claim(config)
    config = replace(config, run_dir=path)
    ranks = local_ranks(config, len(os.sched_getaffinity(0)))
    try:
        if ranks == 1 or config.parallel.strategy == "threads":
            return run_rank(config, claimed=True)
        launch(run_rank, (config, True), ranks=ranks, threads=config.parallel.threads)
        return _code(config, folder.read_lines(path / LEDGER)[-1]["step"])
    finally:
        folder.release(path)  # here too, because rank 0 may have been killed


def run_rank(config: Config, claimed: bool = False) -> int:
    """One rank's part of a run."""
    backend = None if config.parallel.backend == "auto" else config.parallel.backend
    mesh = init(backend=backend, timeout_s=config.timeout_s, threads=config.parallel.threads)
    world = mesh.world.group
    path = config.run_dir if claimed else None

    def claim() -> str:
        check_world(config, world.size)
        return str(folder.claim(config))

    try:
        if path is None:
            path = Path(on_rank_zero(world, "claiming the run directory", claim))
        return _train(replace(config, run_dir=path), mesh, path)
    finally:
        if path is not None and mesh.rank == 0:
            folder.release(path)
        mesh.close()


def _train(config: Config, mesh: Mesh, path: Path) -> int:
    trainer = Trainer(config, mesh)
    with closing(Display(mesh.rank, config.steps)) as display:
        _announce(display, config, mesh, trainer, path)
        if config.resume:
            _resume(trainer, path, display)
        restarts = _count_starts(path)
        first_step = trainer.steps_done
        if mesh.rank == 0:
            folder.begin(path, config, mesh.world.group.peers.table)
        with closing(Books(path, trainer)) as books:
            books.started(restarts)
            run_steps(trainer, books, display, lambda: _save(trainer, path / CHECKPOINTS))
        if trainer.steps_done < config.steps:
            display.say(f"stopped after step {trainer.steps_done} of {config.steps}; --resume goes on")
    # The others wait for rank 0 here: some launchers end everybody when the first rank has ended.
    on_rank_zero(
        mesh.world.group,
        "summing up",
        lambda: summary.show(folder.end(path, _summary(trainer, path, first_step, restarts)), path),
    )
    return _code(config, trainer.steps_done)


def _code(config: Config, steps_done: int) -> int:
    return DONE if steps_done >= config.steps else AGAIN


def _announce(display: Display, config: Config, mesh: Mesh, trainer: Trainer, path: Path) -> None:
    size = sum(p.numel() for p in trainer.module.parameters())
    batch, where = config.batch, summary.where(config.parallel.strategy, trainer.parallel.num_replicas)
    display.say(
        f"{size / 1e6:.2f} M parameters on {where} of {mesh.device.type}, "
        f"{config.parallel.threads} thread(s) each; global batch {batch.global_size} = {config.num_leaves} "
        f"micro-batches of {batch.micro_size}; strategy {config.parallel.strategy}"
        f"{'' if config.parallel.ordered else ', not ordered'}; deadline {config.timeout_s:g} s"
    )
    display.say(f"{trainer.text.train.name}; run directory {path}")


def _save(trainer: Trainer, directory: Path) -> None:
    """Rank 0 writes the replicated state; all ranks learn whether it worked."""

    def write() -> str:
        moments, rest = state.optimizer_state(trainer.module, trainer.optimizer)
        saved = save.save(
            directory,
            step=trainer.steps_done,
            model=state.model_tensors(trainer.module),
            optimizer=moments,
            data_cursor=trainer.cursor,
            state_sha256=trainer.state_sha256(),
            numerical=trainer.numerical(),
            world_size=trainer.mesh.axes.world_size,
            extra={"optimizer": rest},
            keep=trainer.config.checkpoint.keep,
        )
        return str(saved)

    on_rank_zero(trainer.mesh.world.group, "saving a checkpoint", write)


def _resume(trainer: Trainer, path: Path, display: Display) -> None:
    """Take the newest checkpoint that verifies, read by rank 0 and broadcast; none means from the start."""
    world = trainer.mesh.world.group
    read: dict[str, torch.Tensor] = {}

    def find() -> dict[str, Any]:
        found = load.newest(path / CHECKPOINTS)
        if found is None:
            return {"step": 0, "notes": [f"{path}: no checkpoint yet, starting from the beginning"]}
        _require_fit(found.manifest, trainer, path)
        notes = [f"passed over {reason}" for _, reason in found.rejected]
        expected = tensors.layout_of(state.model_tensors(trainer.module))
        rest = found.manifest.extra["optimizer"]
        held = tensors.contents(found.path / save.OPTIMIZER_FILE)
        weights = load.read_tensors(found.path, save.MODEL_FILE, expected)
        moments = load.read_tensors(found.path, save.OPTIMIZER_FILE, held.layout)
        read.update({f"model:{k}": x for k, x in weights.items()})
        read.update({f"optimizer:{k}": x for k, x in moments.items()})
        layout = [[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in read.items()]
        notes.append(f"resumed from {found.path}, step {found.manifest.step}")
        return {
            "step": found.manifest.step,
            "notes": notes,
            "layout": layout,
            "rest": rest,
            "hash": found.manifest.state_sha256,
        }

    answer = on_rank_zero(world, "finding a checkpoint", find)
    for note in answer["notes"]:
        display.say(note)
    if answer["step"] == 0:
        return
    for name, shape, dtype in answer["layout"]:
        value = read.get(name, torch.empty(shape, dtype=getattr(torch, dtype)))
        world.broadcast(value, "the broadcast of a checkpoint")
        read[name] = value
    model = {k.removeprefix("model:"): x for k, x in read.items() if k.startswith("model:")}
    moments = {k.removeprefix("optimizer:"): x for k, x in read.items() if k.startswith("optimizer:")}
    trainer.module.load_state_dict(model)
    state.restore_optimizer(trainer.module, trainer.optimizer, moments, answer["rest"])
    trainer.steps_done = answer["step"]
    if trainer.state_sha256() != answer["hash"]:
        raise CheckpointRejected(
            f"rank {trainer.mesh.rank}: the state after loading does not have the hash that was saved with it"
        )
    trainer.parallel.keep_own_state()


def _require_fit(manifest: Manifest, trainer: Trainer, path: Path) -> None:
    """Raise unless going on from this checkpoint gives the bits of one uninterrupted run, and leads on."""
    changed = contract.differences(manifest.numerical, trainer.numerical())
    if changed:
        raise ContractBroken(
            f"{path} was begun with other settings, and going on with these would not give the bits of one "
            f"uninterrupted run: use its own (they are in {path / folder.CONFIG}), or start a new run in "
            "another --run-dir\n  " + "\n  ".join(changed)
        )
    stop, steps = trainer.config.stop_after, trainer.config.steps
    if stop and stop <= manifest.step < steps:
        raise ValueError(
            f"stop_after {stop}: the run is at step {manifest.step} of {steps} already: pass a later step, "
            "or 0 to go on to the end"
        )


def _count_starts(path: Path) -> int:
    """How often the run has begun before: its restarts so far."""
    return sum(line.get("event") == "started" for line in folder.read_lines(path / LEDGER))


def _summary(trainer: Trainer, path: Path, first_step: int, restarts: int) -> dict[str, Any]:
    config = trainer.config
    tokens_per_step = config.batch.global_size * config.model.context
    return {
        "state_sha256": trainer.state_sha256(),
        "steps": trainer.steps_done,
        "first_step": first_step,
        "world_size": trainer.mesh.axes.world_size,
        "num_replicas": trainer.parallel.num_replicas,
        "strategy": config.parallel.strategy,
        "ordered": config.parallel.ordered,
        "contract": trainer.parallel.contract,
        **summary.figures(folder.read_lines(path / METRICS), first_step, tokens_per_step),
        "restarts": restarts,
        "fingerprint": contract.fingerprint(trainer.numerical()),
        "parallel": asdict(config.parallel),
    }
