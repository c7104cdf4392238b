"""A run from config to exit code: start or join the ranks, train, save, resume, and sum up."""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from instep.checkpoint import contract, load, save, state, tensors
from instep.mesh.join import init
from instep.mesh.launch import launch
from instep.mesh.mesh import Mesh
from instep.mesh.place import detect
from instep.train import folder
from instep.train.config import Config, check_ranks, local_ranks, validate
from instep.train.folder import CHECKPOINTS, LEDGER
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
    config = replace(config, run_dir=folder.claim(config))
    ranks = local_ranks(config, len(os.sched_getaffinity(0)))
    if ranks == 1:
        return run_rank(config, claimed=True)
    launch(run_rank, (config, True), ranks=ranks, threads=config.parallel.threads)
    assert config.run_dir is not None
    return _code(config, folder.read_lines(config.run_dir / LEDGER)[-1]["step"])


def run_rank(config: Config, claimed: bool = False) -> int:
    """One rank's part of a run."""
    backend = None if config.parallel.backend == "auto" else config.parallel.backend
    mesh = init(backend=backend, timeout_s=config.timeout_s, threads=config.parallel.threads)
    try:
        world = mesh.world.group
        check_ranks(config, world.size)
        path = config.run_dir
        if not claimed:
            path = Path(on_rank_zero(world, "claiming the run directory", lambda: str(folder.claim(config))))
        assert path is not None
        return _train(replace(config, run_dir=path), mesh, path)
    finally:
        mesh.close()


def _train(config: Config, mesh: Mesh, path: Path) -> int:
    world = mesh.world.group
    trainer = Trainer(config, mesh)
    display = Display(mesh.rank, config.steps, 0)
    summary: dict[str, Any] | None = None
    began = False
    try:
        _announce(display, config, mesh, trainer, path)
        if config.resume:
            _resume(trainer, path / CHECKPOINTS, display)
        restarts = _count_starts(path)
        if mesh.rank == 0:
            folder.begin(path, config, world.peers.table)
            began = True
        books = Books(path, trainer)
        books.started(restarts)
        first_step = trainer.steps_done
        run_steps(trainer, books, display, lambda: _save(trainer, path / CHECKPOINTS))
        books.close()
        if mesh.rank == 0:
            summary = _summary(trainer, first_step, restarts)
    finally:
        display.close()
        if began:
            folder.end(path, summary)
    if summary is not None:
        _print_summary(summary, path)
    return _code(config, trainer.steps_done)


def _code(config: Config, steps_done: int) -> int:
    return DONE if steps_done >= config.steps else AGAIN


def _announce(display: Display, config: Config, mesh: Mesh, trainer: Trainer, path: Path) -> None:
    size = sum(p.numel() for p in trainer.module.parameters())
    batch = config.batch
    display.say(
        f"{size / 1e6:.2f} M parameters on {mesh.axes.world_size} rank(s) of {mesh.device.type}, "
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


def _resume(trainer: Trainer, directory: Path, display: Display) -> None:
    """Take the newest checkpoint that verifies, read by rank 0 and broadcast; none means from the start."""
    world = trainer.mesh.world.group
    read: dict[str, torch.Tensor] = {}

    def find() -> dict[str, Any]:
        found = load.newest(directory)
        if found is None:
            return {"step": 0, "notes": [f"{directory}: no checkpoint yet, starting from the beginning"]}
        notes = [f"passed over {reason}" for _, reason in found.rejected]
        contract.require_same(found.manifest.numerical, trainer.numerical())
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
        raise contract.ContractBroken(
            f"rank {trainer.mesh.rank}: the state after loading does not have the hash that was saved with it"
        )


def _count_starts(path: Path) -> int:
    """How often the run has begun before: its restarts so far."""
    return sum(line.get("event") == "started" for line in folder.read_lines(path / LEDGER))


def _summary(trainer: Trainer, first_step: int, restarts: int) -> dict[str, Any]:
    history, config = trainer.history, trainer.config
    # The first two steps learn the order of the gradients and warm up.
    steady = history.step_s[2:] or history.step_s
    exposed = history.exposed_s[2:] or history.exposed_s
    tokens = config.batch.global_size * config.model.context
    step_s = statistics.median(steady) if steady else float("nan")
    return {
        "state_sha256": trainer.state_sha256(),
        "steps": trainer.steps_done,
        "first_step": first_step,
        "world_size": trainer.mesh.axes.world_size,
        "strategy": config.parallel.strategy,
        "ordered": config.parallel.ordered,
        "contract": trainer.model.contract,
        "loss_first": history.losses[0] if history.losses else None,
        "loss_last": history.losses[-1] if history.losses else None,
        "held_out_loss_first": history.held_out_first,
        "held_out_loss": history.held_out,
        "step_ms_median": step_s * 1e3 if steady else None,
        "tokens_per_s": tokens / step_s if steady else None,
        "exposed_comm_share": sum(exposed) / sum(steady) if steady else None,
        "restarts": restarts,
        "fingerprint": contract.fingerprint(trainer.numerical()),
        "parallel": asdict(config.parallel),
    }


def _print_summary(summary: dict[str, Any], path: Path) -> None:
    """The result, on stdout."""

    def number(name: str, form: str) -> str:
        return "-" if summary[name] is None else format(summary[name], form)

    rows = {
        "run": str(path),
        "steps": f"{summary['steps']} on {summary['world_size']} rank(s), {summary['strategy']}",
        "loss": f"{number('held_out_loss', '.3f')} nats per byte held out, from "
        f"{number('held_out_loss_first', '.3f')} (training {number('loss_last', '.3f')})",
        "speed": f"{number('tokens_per_s', ',.0f')} tokens/s, {number('step_ms_median', '.0f')} ms a step "
        f"(median), {number('exposed_comm_share', '.1%')} of it exposed communication",
        "state": f"sha256 {summary['state_sha256']}",
    }
    with suppress(BrokenPipeError):
        sys.stdout.write("".join(f"{name:<6} {text}\n" for name, text in rows.items()))
        sys.stdout.flush()
