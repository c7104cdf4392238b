"""How the ranks of a script share the work, as wrappers, optimizers and loaders say of themselves.

It is written down with the settings, and a run says it when it begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from instep.checkpoint.registered import Registered
from instep.errors import counted
from instep.mesh.axes import MODEL_AXES
from instep.run.script_training import ScriptTraining
from instep.run.settings import MeshConfig, ScriptBatch, ScriptConfig, ScriptOptimizer
from instep.state.homes import Wrapped, offered, shape_of

LISTED = 8  # ranks, whose shares are told one by one


def layout_of(registered: Registered, config: ScriptConfig) -> ScriptConfig:
    """``config`` with what wrappers, optimizers and loaders say of themselves."""
    placed: dict[str, Any] = {}
    for model in registered.models.values():
        placed |= getattr(model, "placement", None) or {}
    names = ["strategy", "bucket_mb", "ordered", "schedule"]
    known: dict[str, Any] = {name: placed[name] for name in names if name in placed}
    cuts = placed.get("cut_by", "")
    known["cuts"] = cuts if isinstance(cuts, str) else tuple(cuts)
    threads, stage = torch.get_num_threads(), _stage(registered)
    layout = dataclasses.replace(config.parallel, **known, threads=threads, shard_stage=stage)
    loader = _loader(registered)
    batch = ScriptBatch()
    if loader is not None:
        sizes = loader.batch_size, loader.micro_batch_size
        batch = ScriptBatch(
            global_size=sizes[0], micro_size=sizes[1], num_micro_batches=loader.num_micro_batches
        )
    name = next((type(x).__name__ for x in registered.optimizers.values()), "")
    optimizer = ScriptOptimizer(name=name.lower())
    return dataclasses.replace(config, parallel=layout, batch=batch, optim=optimizer)


def shard_axis(num_ranks: int, asked: int) -> int:
    """The size of the mesh's axis ``shard``, where groups of ``asked`` ranks are wanted; -1: one of all.

    A run may go on with another number of ranks, which cannot be cut like that. Then groups are larger, the
    next number that divides the ranks, so that none of them has to hold more than was asked for.
    """
    if asked == -1:
        return num_ranks
    return next((n for n in range(asked, num_ranks) if num_ranks % n == 0), num_ranks)


def axes_for(num_ranks: int, asked: MeshConfig) -> dict[str, int]:
    """The sizes of the mesh's axes but ``dp``, for ``num_ranks`` ranks.

    A run may go on with another number of ranks, which ``asked`` does not divide. Layers are shared by the
    most ranks that divide both, perhaps one; stages and shard groups are larger then (``shard_axis``).
    """
    tp = math.gcd(num_ranks, asked.tp)
    ep = math.gcd(num_ranks // tp, asked.ep)
    rest = num_ranks // (tp * ep)
    pp = shard_axis(rest, asked.pp)
    return {"tp": tp, "ep": ep, "pp": pp, "shard": shard_axis(rest // pp, asked.shard)}


# In words.


def introduction(training: ScriptTraining, path: Path, asked: MeshConfig, *, is_first: bool) -> list[str]:
    """What the run in ``path`` is about to do, where a mesh as ``asked`` was wanted.

    If it is not the first time: what is other now.
    """
    config, mesh, registered = training.config, training.mesh, training.registered
    shard, pp, tp, ep = asked.shard, asked.pp, asked.tp, asked.ep
    axes = dict(zip(mesh.axes.names, mesh.axes.sizes, strict=True))
    found, lines = axes.get("shard", 1), []
    if is_first:
        num = sum(shape_of(p).numel() for p in training.module.parameters())
        name = getattr(getattr(_loader(registered), "dataset", None), "name", None)
        data = f"{name}; " if isinstance(name, str) and name else ""
        names = ", ".join([*registered.models, *registered.optimizers, *registered.others])
        lines = [
            f"{number_words(num)} parameters on {counted(mesh.world_size, 'rank')} ({mesh.device.type}, "
            f"{counted(config.parallel.threads, 'thread')} each); {_strategy(training, found)}; "
            f"timeout_s={config.timeout_s:g}; checkpoints hold: {names}",
            f"{data}run directory {path}",
        ]
    shares = _shares(training)
    if config.batch.global_size and shares:
        lines.append(global_batch(config.batch, shares, axes.get("pp", 1)))
    no_multiple = f"{counted(mesh.world_size, 'rank')} are no multiple of the"
    if config.parallel.shard_stage and shard not in (-1, 1, found):
        lines.append(
            f"{no_multiple} shard group of {shard}: the state is divided among {found}, with the same bits"
        )
    for axis, wanted in (("tp", tp), ("ep", ep)):
        if wanted != axes[axis]:
            lines.append(f"{no_multiple} {axis} {wanted}: {axis} is {axes[axis]}, with the same bits")
    if pp not in (-1, 1, axes.get("pp", 1)):
        lines.append(f"{no_multiple} pipeline of {pp}: pipelines have {axes['pp']} ranks, with the same bits")
    return lines


def global_batch(batch: ScriptBatch, shares: Sequence[int], pp: int = 1) -> str:
    """The equation of the batch, where each of so many ranks, or pipelines of ``pp`` of them, has its share
    of the micro-batches of a step.

    global batch 32 = micro-batch 4 x accumulation 4 x 2 ranks         every rank has as many
    global batch 32 = micro-batch 4 x 8, of which 3 ranks have 3 + 3 + 2
    """
    begin = f"global batch {batch.global_size} = micro-batch {batch.micro_size} x "
    ranks = counted(len(shares), "rank") if pp == 1 else f"{counted(len(shares), 'pipeline')} of {pp} ranks"
    times = Counter(shares)
    if len(times) == 1:
        return f"{begin}accumulation {shares[0]} x {ranks}"
    listed = " + ".join(map(str, shares))
    if len(shares) > LISTED:
        listed = ", ".join(f"{share} on {number}" for share, number in sorted(times.items(), reverse=True))
    return f"{begin}{sum(shares)}, of which {ranks} have {listed}"


def number_words(number: int) -> str:
    """``number`` with the digits that say something: 412, 12.3 k, 0.44 M, 124 M, 1.56 G."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        share = number / unit
        if share >= 0.9995:
            return f"{share:#.3g} {name}".replace(". ", " ")
        if name == "M" and share >= 0.1:
            return f"{share:.2f} M"
    return str(number)


def _strategy(training: ScriptTraining, shard: int) -> str:
    parallel = training.config.parallel
    if parallel.strategy == "none" and training.mesh.world_size > 1:
        return "no model is wrapped: ranks exchange no gradients until you call instep.DataParallel(model)"
    order = "" if parallel.ordered else ", not ordered"
    stage = f", stage {parallel.shard_stage} of sharding" if parallel.shard_stage else ""
    stage += f" in shard groups of {shard} ranks" if parallel.shard_stage and shard > 1 else ""
    if parallel.schedule:
        ranks = counted(training.mesh.axes.size("pp"), "rank")
        stage += f", pipelines of {ranks} ({parallel.schedule})"
    layers = [f"{axis} {size}" for axis in MODEL_AXES if (size := training.mesh.axes.size(axis)) > 1]
    stage += "".join(f", {each}" for each in reversed(layers))
    return f"strategy {parallel.strategy}{order}{stage}{_nodes(training)}"


def _nodes(training: ScriptTraining) -> str:
    """What sums of gradients are rounded to, where they are."""
    wrapped = [x for model in training.registered.models.values() if isinstance(x := offered(model), Wrapped)]
    return "".join(
        f", nodes in {nodes}" for nodes in dict.fromkeys(x.nodes for x in wrapped if x.nodes != Wrapped.nodes)
    )


def stage_of(model: Any) -> int:
    """Of ``fully_shard``, as the wrapped ``model`` says; else 0."""
    return int((getattr(model, "placement", None) or {}).get("stage", 0))


def _stage(registered: Registered) -> int:
    """What is divided: 1 the optimizer's state, 2 the gradients too, 3 the weights too."""
    divided = (
        said for optimizer in registered.optimizers.values() if (said := offered(optimizer)) is not None
    )
    # Of layers that one rank has, with their state, nothing is divided.
    sharded = any(there.replicas is None for said in divided for there in said.homes)
    return max([int(sharded), *map(stage_of, registered.models.values())])


def _loader(registered: Registered) -> Any:
    """The first one."""
    return next(iter(registered.loaders.values()), None)


def _shares(training: ScriptTraining) -> list[int]:
    """How many micro-batches of a declared step each rank has; [] where no wrapper says."""
    for model in training.registered.models.values():
        said = offered(model)
        for reduction in said.reductions.values() if isinstance(said, Wrapped) else ():
            plan = reduction.assign(training.config.batch.num_micro_batches)
            return [len(own) for own in plan.leaves]
    return []
