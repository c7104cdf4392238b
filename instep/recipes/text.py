"""The text recipe: a small GPT learns the bytes of a text, one after the other.

    instep train -n 2                              on two ranks, any of which may die
    instep train -n 3 --parallel.shard-stage 3     on three, a third of everything each: the same bits
    python instep/recipes/text.py --steps 20       also: torchrun ... instep/recipes/text.py

An ordinary script on public names, and what ``instep train`` runs: the data, the model and its optimizer, the
loop, and how good it is on text that was held out. Its settings are in ``text_config``.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.recipes.corpus import ByteText, next_tokens, open_text
from instep.recipes.text_config import (
    Config,
    OptimConfig,
    learning_rate,
    numerical,
    schedule_of,
)
from instep.recipes.text_options import parse_script
from instep.record.display import follow

MATRIX = 2  # dimensions; vectors (norms, biases) have fewer, and are not decayed


def make_model(config: Config, device: torch.device) -> GPT:
    """With weights by name; in stage 3 and in pipelines without any, since no rank is to have all of them.

    Layers that are cut get their boxes from whole weights.
    """
    without_values = config.parallel.shard_stage == 3 or (config.parallel.pp > 1 and not config.cuts_layers)
    with torch.device("meta" if without_values else device):
        net = GPT(GPTConfig(**asdict(config.model)))
    if not without_values:
        instep.initialize(net, config.seed)
    return net


def optimizer_class(config: OptimConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """And its options: an implementation that gives a parameter in slices the bits that it has whole."""
    if config.name == "adamw":
        return torch.optim.AdamW, {"lr": config.lr, "betas": config.betas, "fused": True, "foreach": False}
    return torch.optim.SGD, {"lr": config.lr, "momentum": config.momentum, "fused": False, "foreach": False}


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What is decayed, and what is not."""
    weights = list(net.parameters())
    return [
        {"params": [p for p in weights if p.ndim >= MATRIX], "weight_decay": weight_decay},
        {"params": [p for p in weights if p.ndim < MATRIX], "weight_decay": 0.0},
    ]


def distribute(net: GPT, config: Config, mesh: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model over all ranks, and its optimizer: all that strategies and stages differ in."""
    layout, (kind, settings) = config.parallel, optimizer_class(config.optim)
    options: dict[str, Any] = {"nodes": layout.nodes, "rounding": layout.rounding, "seed": config.seed}
    options |= {"find_unused_parameters": False}
    model: Any = net
    if config.tp_chunks:
        plan = instep.tensor.gpt_plan(net)
        instep.tensor.shard(net, mesh, plan, config.tp_chunks, sequence=layout.sequence)
    if config.divides_experts:
        instep.expert.shard(net, mesh)
    if layout.pp > 1:
        options |= {"strategy": layout.strategy, "bucket_cap_mb": layout.bucket_mb}
        model = pipeline(net, config, mesh, **options)
        if not config.cuts_layers:
            model.materialise(seed=config.seed)  # each rank its layers, at the latest in run.steps
    elif layout.shard_stage >= 2:
        options["device"] = mesh.device
        model = instep.fully_shard(net, mesh, layout.shard_stage, **options)
        if layout.shard_stage == 3:
            model.materialise(seed=config.seed)
    else:
        options |= {"strategy": layout.strategy, "bucket_cap_mb": layout.bucket_mb, "ordered": layout.ordered}
        model = instep.DataParallel(net, process_group=mesh, init_sync=False, **options)
    groups = parameter_groups(net, config.optim.weight_decay)
    if layout.shard_stage:
        return model, instep.ShardedOptimizer(groups, kind, mesh, **settings)
    return model, kind(groups, **settings)


def pipeline(net: GPT, config: Config, mesh: Any, **options: Any) -> instep.Pipeline:
    """Over the ranks along pp, cut as ``config`` says."""
    layout = config.parallel
    options |= {"chunks": layout.chunks or None, "cuts": layout.numbered_cuts}
    return instep.Pipeline(net, mesh, schedule_of(layout), config.num_leaves, **options)


def losses_of(net: GPT, windows: Tensor, config: Config, device: torch.device, model: Any = None) -> Tensor:
    """The cross-entropy of each byte of ``windows`` (B, T + 1) but the first: (B, T), in nats.

    Through ``model`` if that is a pipeline, which has the layers of ``net``.
    """
    inputs, targets = next_tokens(windows)
    with autocast(config, device):
        logits = (model if isinstance(model, instep.Pipeline) else net)(inputs.to(device))  # (B, T, 256)
    return of_logits(logits, targets, net)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """What the products of a forward are computed in."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.autocast == "bf16")


def of_logits(logits: Tensor, targets: Tensor, net: GPT) -> Tensor:
    """The cross-entropy of each byte: (B, T), in nats."""
    targets = targets.to(logits.device)
    if isinstance(net.head.out, instep.tensor.ColumnLinear):  # each rank has some of the logits
        return instep.tensor.cross_entropy(logits, targets, net.head.out, reduction="none")
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def declared_step(model: Any, net: GPT, data: instep.Loader, config: Config, mesh: Any) -> list[Tensor]:
    """Forward and backward of this rank's micro-batches; their losses. ``model`` is ``net``, distributed."""

    def one(micro_batch: Any) -> Tensor:
        loss = losses_of(net, micro_batch.data, config, mesh.device).mean()
        (loss + config.optim.aux_loss * instep.expert.aux_loss(net) if has_aux_loss else loss).backward()
        return loss.detach()

    has_aux_loss = config.model.experts and config.optim.aux_loss
    if isinstance(model, instep.Pipeline):  # calls these on the ranks of the last and of the first layers
        with autocast(config, mesh.device):
            return model.step(
                lambda logits, micro_batch: of_logits(logits, next_tokens(micro_batch.data)[1], net).mean(),
                lambda micro_batch: next_tokens(micro_batch.data)[0].to(mesh.device),
                data,
            )
    return [one(micro_batch) for micro_batch in model.micro_batches(data)]


@torch.no_grad()
def held_out_loss(model: Any, net: GPT, text: ByteText, config: Config, mesh: Any) -> float:
    """In nats per byte, of windows at even distances: the same on any number of ranks. Collective."""
    num_windows, size = min(config.eval.windows, len(text)), config.batch.micro_size
    chosen = [i * len(text) // num_windows for i in range(num_windows)]
    batches = [range(first, min(first + size, num_windows)) for first in range(0, num_windows, size)]
    losses, index = [], []
    model.eval()
    place = mesh.data
    for first in follow(range(0, len(batches), place.size), "evaluation", quiet=mesh.rank != 0):
        # In stage 3 a rank needs all others to have weights: at the end some look at the last batch again.
        batch = batches[min(first + place.rank, len(batches) - 1)]
        windows = text.windows([chosen[i] for i in batch])
        losses.append(losses_of(net, windows, config, mesh.device, model).mean(1))
        index.extend(batch)
    model.train()
    rows: Tensor = instep.gather(torch.cat(losses), index=index, process_group=mesh)  # each window's once
    return rows.double().mean().item()


def main(config: Config) -> None:
    """Train as ``config`` says."""
    counted = {"items": "tokens", "items_per_step": config.batch.global_size * config.model.context}
    run = instep.Run(  # joins the ranks of whatever started this process, or is alone
        config.run_dir,
        seed=config.seed,
        mesh=config.parallel,
        checkpoint=config.checkpoint,
        checks=config.checks,
        record={**asdict(config.record), **counted, "loss_unit": "nats per byte"},
        timeout_s=config.timeout_s,
        config=replace(config, resume=False, accept_contract=False),  # from which a new run may begin
        contract=numerical(config),
        resume=config.resume,
        accept_contract=config.accept_contract,
    )
    text = open_text(config.data, config.model.context)
    sizes = config.batch.global_size, config.batch.micro_size
    data = instep.Loader(text.train, *sizes, seed=config.seed, collate_fn=torch.stack)
    net = make_model(config, run.mesh.device)
    model, optimizer = distribute(net, config, run.mesh)
    run.register(model=model, optimizer=optimizer, data=data)  # all that changes from step to step
    run.evaluate_with(
        lambda: held_out_loss(model, net, text.held_out, config, run.mesh),
        every=config.eval.every,
    )
    for step in run.steps(config.steps):  # goes on where the newest state is
        with step:  # if a rank dies in here, all ranks retry the step
            with instep.expert.balanced(net, run.mesh, rate=config.optim.balance_rate) as loads:
                losses = declared_step(model, net, data, config, run.mesh)
            if config.optim.clip:
                instep.clip_grad_norm_(net.parameters(), config.optim.clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optim, step, config.steps)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=instep.mean(losses, process_group=run.mesh), **loads.figures())


if __name__ == "__main__":
    main(parse_script(sys.argv[1:]))
