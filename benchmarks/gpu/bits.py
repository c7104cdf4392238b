"""One model by every strategy, stage and pipeline, on 1 to 4 ranks of one device over gloo: one hash for all.

All variants of a number of ranks are trained in one launched world, so that each rank starts CUDA once.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from benchmarks.gpu.part import Part, main
from instep.checkpoint.registered import Registered
from instep.launch.launch import RankFailed, launch
from instep.mesh import deterministic
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.state.hash import SharedHash

NUM_LEAVES, BATCH, CONTEXT = 8, 2, 32
ADAMW = {"lr": 1e-3, "fused": True}
STRATEGIES = ("naive", "flat", "overlap", "bucketed")
STAGES = ("stage 1", "stage 2", "stage 3")
CONTROL = "control: ordered=False"  # the backend's all-reduce


class Setting(NamedTuple):
    """What is trained, and on which ranks."""

    mesh: Any
    group: Any  # all ranks
    config: GPTConfig
    bucket_mb: float  # several buckets
    tokens: Tensor  # (steps, micro-batches, batch, context + 1)

    def module(self) -> nn.Module:
        module = GPT(self.config)
        instep.initialize(module, seed=1)
        return module.to(self.mesh.device)

    def inputs(self, step: int, leaf: int) -> Tensor:
        return self.tokens[step, leaf, :, :-1].to(self.mesh.device)

    def loss(self, logits: Tensor, step: int, leaf: int) -> Tensor:
        targets = self.tokens[step, leaf, :, 1:].to(self.mesh.device)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def setting_of(part: Part, mesh: Any) -> Setting:
    layers, width, steps, bucket_mb = (2, 64, 2, 0.05) if part.quick else (4, 256, 4, 0.5)
    config = GPTConfig(context=CONTEXT, layers=layers, width=width, heads=4, dropout=0.1)
    shape = steps, NUM_LEAVES, BATCH, CONTEXT + 1
    tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(2))
    group = dist.group.WORLD if dist.is_initialized() else mesh
    return Setting(mesh, group, config, bucket_mb, tokens)


def build(name: str, setting: Setting) -> tuple[Any, Any]:
    """The model and its optimizer. Collective."""
    module, group, cap_mb = setting.module(), setting.group, setting.bucket_mb
    wrap = partial(instep.DataParallel, module, process_group=group, bucket_cap_mb=cap_mb)
    if name == "server":
        optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
        return instep.ParameterServer(module, optimizer, group), optimizer
    if name == "stage 1":
        model: Any = wrap()
        return model, instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, group, **ADAMW)
    if name in STAGES:
        model = instep.fully_shard(module, group, stage=int(name[-1]))
    elif name == "pipeline of 2":
        model = instep.Pipeline(module, setting.mesh, micro_batches=NUM_LEAVES, bucket_cap_mb=cap_mb)
    else:
        model = wrap(ordered=False) if name == CONTROL else wrap(strategy=name)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def train(name: str, setting: Setting) -> str:
    """The hash of weights, moments and step after some declared steps. Collective."""
    model, optimizer = build(name, setting)
    is_server = isinstance(model, instep.ParameterServer)
    for step in range(len(setting.tokens)):
        if isinstance(model, instep.Pipeline):
            model.step(
                lambda logits, leaf, step=step: setting.loss(logits, step, leaf.index),
                lambda leaf, step=step: setting.inputs(step, leaf.index),
            )
        else:
            for leaf in model.micro_batches(NUM_LEAVES):
                setting.loss(model(setting.inputs(step, leaf.index)), step, leaf.index).backward()
        instep.clip_grad_norm_(model.parameters(), 1.0)
        (model if is_server else optimizer).step()
        optimizer.zero_grad()
    state = Registered({"model": model.module if is_server else model, "optimizer": optimizer}).state()
    digest = SharedHash(state.group).digests(state.owned(state.hashed()), len(setting.tokens))[0]
    if isinstance(optimizer, instep.ShardedOptimizer):
        optimizer.close()
    model.close()
    return digest


def world(part: Part, names: list[str], pp: int) -> None:
    """One rank: train all variants, one after the other; rank 0 reports each as soon as it has the hash."""
    part.print_stacks_in_time()
    if part.on_gpu:
        deterministic.enable()
    with closing(instep.init(pp=pp, device=part.device, backend="gloo", timeout_s=60)) as mesh:
        assert str(mesh.device) == part.device, f"expected {part.device}, got {mesh.device}"
        setting = setting_of(part, mesh)
        for name in names:
            digest = train(name, setting)
            if mesh.rank == 0 and name == CONTROL:
                part.found(name, "info", answer="same" if digest == part.reference() else "differs")
            elif mesh.rank == 0:
                part.compare(name, digest, device=str(mesh.device))


def one_rank_twice(part: Part) -> None:
    for _ in range(2):
        launch(world, (part, ["bucketed"], 1), ranks=1)


def several(ranks: int, part: Part) -> None:
    """Every variant on so many ranks; after one that fails, the others in a new world."""
    left = [*STRATEGIES, *STAGES, "server"]
    left += ["pipeline of 2"] if ranks % 2 == 0 else []
    left += [CONTROL] if ranks > 1 else []
    while left:
        try:
            launch(world, (part, left, 2 - ranks % 2), ranks=ranks)
            return
        except RankFailed as error:
            print(error)
            told = {line["what"] for line in part.findings() if line["part"] == part.name}
            left = [name for name in left if name not in told]
            part.found(left.pop(0) if left else "end of the world", "failed", why=str(error)[-500:])


if __name__ == "__main__":
    worlds = {f"{ranks} ranks": partial(several, ranks) for ranks in (2, 3, 4)}
    main({"one rank twice": one_rank_twice, "1 rank": partial(several, 1), **worlds})
