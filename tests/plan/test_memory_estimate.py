"""How much memory a GPT takes by formula, against what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from instep.bench.memory_usage import memory_usage
from instep.bench.saved_bytes import saved_beside
from instep.models.config import GPTConfig, num_parameters
from instep.models.transformer import GPT
from instep.plan.memory_estimate import for_gpt, largest
from instep.recipes.text import losses_of, optimizer_class, parameter_groups
from instep.recipes.text_config import OptimConfig, tiny

CPU = torch.device("cpu")
SMALL = GPTConfig(layers=3, width=64, heads=2, context=32)
SHAPES = {
    "small": (SMALL, "off"),
    "wide feed-forward": (replace(SMALL, ff_width=512), "off"),
    "dropout": (replace(SMALL, dropout=0.1), "off"),
    "deep, untied": (replace(SMALL, layers=6, tied=False), "off"),
    "bf16": (SMALL, "bf16"),
    "bf16 and dropout": (replace(SMALL, dropout=0.1), "bf16"),
    "computed again": (replace(SMALL, dropout=0.1, checkpoint=True), "off"),
    "computed again in bf16": (replace(SMALL, checkpoint=True), "bf16"),
    "experts": (replace(SMALL, experts=4, context=512), "off"),
    "experts, dropout, bf16": (replace(SMALL, experts=4, context=512, dropout=0.1), "bf16"),
}


@pytest.mark.parametrize(("model", "autocast"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("micro_size", [1, 4])
def test_activations_are_as_many_as_the_formula_says(
    model: GPTConfig, autocast: str, micro_size: int
) -> None:
    module, windows = GPT(model), (torch.arange(model.context + 1) % 256).repeat(micro_size, 1)
    config = replace(tiny(), autocast=autocast)
    saved = saved_beside(module, [windows])
    with saved.watch():
        loss = losses_of(module, windows, config, CPU).mean()
    assert loss.requires_grad  # its graph is there, and all it keeps
    said = largest(for_gpt(model, micro_size, autocast=autocast == "bf16"))
    assert said.of("activations") == pytest.approx(saved.nbytes, rel=0.04)


OPTIMS = {  # and how many floats per parameter each keeps
    16: (OptimConfig(lr=0.1), 2),
    12: (OptimConfig(name="sgd", lr=0.1), 1),
    8: (OptimConfig(name="sgd", momentum=0.0, lr=0.1), 0),
}


@pytest.mark.parametrize("each", OPTIMS)
def test_state_takes_16_12_or_8_bytes_per_parameter(each: int) -> None:
    module, windows = GPT(SMALL), torch.zeros(1, 33, dtype=torch.int64)
    config, num_moments = OPTIMS[each]
    kind, options = optimizer_class(config)
    groups = parameter_groups(module, config.weight_decay)
    optimizer = kind(groups, **options)
    losses_of(module, windows, tiny(), CPU).mean().backward()
    optimizer.step()
    said = largest(for_gpt(SMALL, 1, moments=num_moments))
    assert said.bytes_per_parameter == each
    assert memory_usage(module, optimizer).state == pytest.approx(each * num_parameters(SMALL), rel=0.001)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(memory_usage(module, optimizer), name) == pytest.approx(said.of(name), rel=0.001)


STAGES = {
    (0, 4): 16, (1, 1): 16, (1, 2): 8 + 8 / 2, (1, 4): 8 + 8 / 4,
    (2, 4): 4 + 12 / 4, (3, 2): 16 / 2, (3, 4): 16 / 4,
}  # fmt: skip


@pytest.mark.parametrize(("stage", "ranks"), STAGES)
def test_each_stage_divides_what_the_paper_says_it_divides(stage: int, ranks: int) -> None:
    said = largest(for_gpt(SMALL, 1, stage=stage, **({"shard": ranks} if stage else {"dp": ranks})))
    assert said.bytes_per_parameter == STAGES[stage, ranks]
    assert said.state == pytest.approx(STAGES[stage, ranks] * num_parameters(SMALL), abs=3)


def test_two_blocks_and_what_is_in_no_block_are_gathered_at_a_time() -> None:
    blocks = [
        p.numel() for name, p in GPT(SMALL).named_parameters() if name.startswith(("blocks.0", "blocks.1"))
    ]
    rest = [p.numel() for name, p in GPT(SMALL).named_parameters() if not name.startswith("blocks.")]
    assert largest(for_gpt(SMALL, 1, stage=3, shard=2)).of("gathered") == 4 * (sum(blocks) + sum(rest))
    assert largest(for_gpt(SMALL, 1, stage=2, shard=2)).of("gathered") == 0
