"""Fine-tune a classifier of sentence pairs: Hugging Face's models and tokenizers, on any number of ranks.

    instep run -n 2 instep/recipes/pairs.py                               on two ranks, any of which may die
    instep run -n 3 instep/recipes/pairs.py --model llama --shard-stage 3      as SmolLM2 is, in shards
    instep run -n 2 instep/recipes/pairs.py --data nyu-mll/glue:mrpc --weights SmolLM2-360M --lora 8 --bf16

Does the second sentence say the same as the first? An ordinary script on public names: what is not called
``instep`` in it is as it would be for one process. Needs ``pip install instep[hf]``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

import instep
from instep.data.pairs import open_pairs
from instep.data.tokens import PAD, PadTogether, encode, load_tokenizer, train_tokenizer
from instep.models.pair_classifier import freeze, load_classifier, new_classifier
from instep.recipes.pairs_config import PairsConfig, numerical, validate

Pair = tuple[str, str, int]  # two sentences, and 1 if they say the same


def read_pairs(config: PairsConfig) -> tuple[Sequence[Pair], Sequence[Pair]]:
    """Pairs to train on, and held-out ones."""
    if not config.data:
        return open_pairs()
    names = [config.data] if Path(config.data).exists() else config.data.split(":")
    splits = importlib.import_module("datasets").load_dataset(*names)

    def pairs_of(split: str) -> list[Pair]:
        return [(row["sentence1"], row["sentence2"], row["label"]) for row in splits[split]]

    return pairs_of("train"), pairs_of("validation")


def make_model(config: PairsConfig, pairs: Sequence[Pair]) -> tuple[Any, Any]:
    """The model as for one process, and its tokenizer."""
    torch.manual_seed(config.seed)  # new weights are drawn from it
    if config.weights:
        model = load_classifier(config.weights)
        tokenizer = load_tokenizer(config.weights, model.config.eos_token_id)
    else:
        tokenizer = train_tokenizer((text for pair in pairs for text in pair[:2]), config.vocab_size)
        model = new_classifier(
            config.model,
            vocab_size=tokenizer.get_vocab_size(),
            pad=tokenizer.token_to_id(PAD),
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            max_tokens=config.context,
            dropout=config.dropout,
        )
    if config.freeze:
        freeze(model, config.freeze)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if config.lora:
        peft = importlib.import_module("peft")
        options = peft.LoraConfig(task_type="SEQ_CLS", r=config.lora, lora_alpha=2 * config.lora)
        model = peft.get_peft_model(model, options)
    return model, tokenizer


def distribute(model: Any, config: PairsConfig, mesh: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model over all ranks, and its optimizer: all that the stages differ in."""
    if config.shard_stage >= 2:
        model = instep.fully_shard(model, mesh, config.shard_stage)
    else:
        model = instep.DataParallel(model, process_group=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.shard_stage == 1:
        return model, instep.ShardedOptimizer(trained, torch.optim.AdamW, mesh, **options)
    return model, torch.optim.AdamW(trained, **options)


def rate(step: int, config: PairsConfig) -> float:
    """Share of the learning rate: a linear rise, and a cosine to 0."""
    return min(1.0, (step + 1) / (config.warmup_steps + 1)) * (
        0.5 + 0.5 * math.cos(math.pi * step / config.steps)
    )


def logits_of(model: Any, batch: dict[str, Any], config: PairsConfig) -> Tensor:
    """(pairs, 2) float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
        logits: Tensor = model(**batch["inputs"]).logits
    return logits.float()


@torch.no_grad()
def evaluate(
    model: Any, batches: Sequence[dict[str, Any]], config: PairsConfig, mesh: Any
) -> dict[str, float]:
    """Accuracy and F1 on ``batches``, in which each pair counts once, on any number of ranks. Collective.

    Ranks take turns. At the end some compute the last batch again, because in stage 3 a rank needs all others
    to have weights; ``instep.gather`` has the pairs of ``index`` once, in their order.
    """
    model.eval()
    found = []
    for first in range(0, len(batches), mesh.world_size):
        batch = batches[min(first + mesh.rank, len(batches) - 1)]
        found.append((logits_of(model, batch, config).argmax(1), batch["labels"], batch["index"]))
    model.train()
    said, labels, index = (torch.cat(parts) for parts in zip(*found, strict=True))
    said, labels = instep.gather(said, labels, index=index, process_group=mesh)
    hits = int((said & labels).sum())
    return {
        "accuracy": (said == labels).double().mean().item(),
        "f1": 2 * hits / max(1, int(said.sum() + labels.sum())),
    }


def main(config: PairsConfig) -> Any:
    """Train as ``config`` says; the trained model."""
    validate(config)
    run = instep.Run(seed=config.seed, config=config, contract=numerical(config))
    train_pairs, held_out_pairs = read_pairs(config)
    model, tokenizer = make_model(config, train_pairs)
    is_bert = model.config.model_type == "bert"
    together = PadTogether(model.config.pad_token_id, sentences=is_bert, by_tokens=config.weigh == "tokens")
    held_out = encode(held_out_pairs, tokenizer, config.context)
    held_out.sort(key=lambda pair: len(pair.tokens))
    size = config.micro_batch_size
    held_out_batches = [together(held_out[i : i + size]) for i in range(0, len(held_out), size)]
    samples = encode(train_pairs, tokenizer, config.context)
    data = instep.Loader(
        samples,
        config.batch_size,
        size,
        seed=config.seed,
        lengths=[len(pair.tokens) for pair in samples],  # a micro-batch has pairs of similar lengths
        collate_fn=together,
        weigh=lambda batch: int(batch["weights"].sum()),
    )
    model, optimizer = distribute(model, config, run.mesh)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, config))

    run.register(model=model, optimizer=optimizer, schedule=schedule, data=data)
    found = {"accuracy": math.nan, "f1": math.nan}
    for step in run.steps(config.steps):
        with step:
            losses, weights = [], []
            for micro_batch in model.micro_batches(data):
                batch = micro_batch.data
                loss = F.cross_entropy(logits_of(model, batch, config), batch["labels"], reduction="none")
                (loss * batch["weights"]).sum().backward()  # a sum, of micro_batch.weight pairs or tokens
                losses.append(loss.detach())
                weights.append(batch["weights"])
            instep.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step.log(loss=instep.mean(losses, weights, process_group=run.mesh))
            if step.is_last or (config.eval_every and (step + 1) % config.eval_every == 0):
                found = evaluate(model, held_out_batches, config, run.mesh)
                step.log(**found)
    if run.rank == 0:
        said = f"accuracy {found['accuracy']:.1%}, F1 {found['f1']:.1%}"
        print(f"{said} on {len(held_out)} held-out pairs")
    return model


if __name__ == "__main__":
    main(tyro.cli(PairsConfig))
