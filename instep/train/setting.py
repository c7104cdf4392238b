"""What a run was told of its placement, for whoever reads its trace."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from instep.mesh.device import default_backend
from instep.mesh.place import detect
from instep.timeline.facts import Setting
from instep.train.trainer import Trainer


def described(trainer: Trainer) -> dict[str, Any]:
    """What advice has to know of a run, for the head of a rank's file."""
    config, mesh = trainer.config, trainer.mesh
    place = detect(os.environ)
    size = mesh.axes.world_size
    local = size if place.source == "single" else place.local_world_size
    peers = mesh.world.group.peers
    # Two containers of a host have no network in common, but its cores.
    neighbours = sum(peer.host == peers.me.host for peer in peers.table)
    backend = config.parallel.named_backend or default_backend(mesh.device, one_host=local == size)
    setting = Setting(
        strategy="fully_shard" if config.parallel.shard_stage >= 2 else config.parallel.strategy,
        backend=backend,
        world_size=size,
        ranks_per_host=max(local, neighbours),
        hosts=-(-size // local),
        threads=config.parallel.threads,
        cores=len(os.sched_getaffinity(0)),
        bucket_mb=config.parallel.bucket_mb,
        num_leaves=config.num_leaves,
        micro_size=config.batch.micro_size,
    )
    num_parameters = sum(p.numel() for p in trainer.module.parameters())
    return {"setting": asdict(setting), "optimizer": config.optim.name, "num_parameters": num_parameters}
