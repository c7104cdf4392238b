"""The loop of a recipe: a generation of a run, whose steps the trainer makes, and what it says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from instep.run import summary
from instep.run.generation import Generation
from instep.run.recovery import Checkpoints, Snapshots
from instep.train.run_config import BatchConfig, ParallelConfig
from instep.train.trainer import Trainer

LISTED = 8  # ranks, whose shares are told one by one


def generation(
    trainer: Trainer, path: Path, checkpoints: Checkpoints, memory: Snapshots | None = None
) -> Generation:
    """What ``trainer`` needs to take part in the run in ``path``."""

    def introduction(is_first: bool) -> list[str]:
        num, what = trainer.num_replicas, summary.replicas(trainer.config.parallel.strategy)
        shares = [len(share) for share in trainer.parallel.plan(num)]
        return [
            *(_introduced(trainer, path) if is_first else ()),
            global_batch(trainer.config.batch, shares, what),
            *_shard_groups(trainer),
        ]

    return Generation(trainer, path, checkpoints, memory, introduction)


def _introduced(trainer: Trainer, path: Path) -> list[str]:
    config = trainer.config
    size = sum(p.numel() for p in trainer.module.parameters())
    where = summary.where(config.parallel.strategy, trainer.num_replicas)
    strategy = _strategy(config.parallel, trainer.parallel.shard_group_size)
    return [
        f"{size / 1e6:.2f} M parameters on {where} of {trainer.mesh.device.type}, "
        f"{config.parallel.threads} thread(s) each; strategy {strategy}; deadline {config.timeout_s:g} s",
        f"{trainer.recipe.training(trainer.data).name}; run directory {path}",
    ]


def global_batch(batch: BatchConfig, shares: Sequence[int], what: str = "rank") -> str:
    """The equation of the batch, where each of so many ranks has its share of the micro-batches of a step.

    global batch 32 = micro-batch 4 x accumulation 4 x 2 ranks         every rank has as many
    global batch 32 = micro-batch 4 x 8, of which 3 ranks have 3 + 3 + 2
    """
    begin = f"global batch {batch.global_size} = micro-batch {batch.micro_size} x "
    ranks = f"{len(shares)} {what}{'s' * (len(shares) != 1)}"
    times = Counter(shares)
    if len(times) == 1:
        return f"{begin}accumulation {shares[0]} x {ranks}"
    listed = " + ".join(map(str, shares))
    if len(shares) > LISTED:
        listed = ", ".join(f"{share} on {number}" for share, number in sorted(times.items(), reverse=True))
    return f"{begin}{sum(shares)}, of which {ranks} have {listed}"


def _shard_groups(trainer: Trainer) -> list[str]:
    """Say so where the ranks could not be cut as ``parallel.shard_ranks`` says."""
    asked, size = trainer.config.parallel.shard_ranks, trainer.mesh.data.size
    if not asked or (found := trainer.parallel.shard_group_size) == asked:
        return []
    return [
        f"{size} rank(s) are no whole shard groups of parallel.shard_ranks {asked}: the state is divided "
        f"among {found}, which changes no bits"
    ]


def _strategy(parallel: ParallelConfig, shard_group_size: int) -> str:
    order = "" if parallel.ordered else ", not ordered"
    stage = f", stage {parallel.shard_stage} of sharding" if parallel.shard_stage else ""
    stage += f" in shard groups of {shard_group_size} ranks" if parallel.shard_ranks else ""
    copies = ", one copy of the weights" if parallel.one_copy else ""
    return f"{parallel.strategy}{order}{stage}{copies}"
