"""A step in one process, wrapped by torch's DDP and by instep, beside the bare one: time, memory, host time.

A world of one exchanges nothing: what is left is what wrappers cost in hooks, buckets and bookkeeping. Beside
each sample of a wrapped step is one of the bare step, and ratios are of such pairs.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from benchmarks.gpu.part import Part, main
from instep.models.config import GPTConfig, preset
from instep.models.transformer import GPT

VOCABULARY = 50304  # that of GPT-2, rounded up to a multiple of 64
BARE, DETERMINISTIC = "bare", "bare, deterministic"
VARIANTS = ("DDP", "undeclared", "declared", "stage 1", "stage 2", "stage 3", DETERMINISTIC)
ADAMW = {"lr": 1e-4, "fused": True}
WARM_UP = 3
STEPS = 2  # in a row, per sample
LEAST_S = 5.0  # for a variant; with less left the others are skipped


class Setting(NamedTuple):
    """What is trained on one batch."""

    part: Part
    name: str
    config: GPTConfig
    autocast: bool
    batch: Tensor  # (sequences, tokens + 1)
    pairs: int


class Loop:
    """The training loop around a model that is wrapped as ``variant`` says, after some steps."""

    def __init__(self, setting: Setting, variant: str) -> None:
        self.setting, self.variant, self.device = setting, variant, setting.batch.device
        self.on_gpu = setting.part.on_gpu
        gc.collect()
        before = self._memory(torch.cuda.memory_allocated) if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        with self.device:
            self.model: Any = GPT(setting.config)
        if variant == "DDP":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif variant in ("undeclared", "declared", "stage 1"):
            self.model = instep.DataParallel(self.model)
        elif variant in ("stage 2", "stage 3"):
            self.model = instep.fully_shard(self.model, stage=int(variant[-1]))
        adamw, parameters = torch.optim.AdamW, self.model.parameters()
        sharded = variant == "stage 1"
        self.optimizer: Any = (
            instep.ShardedOptimizer(parameters, adamw, **ADAMW) if sharded else adamw(parameters, **ADAMW)
        )
        for _ in range(WARM_UP):
            self.step()
        self.peak_mb = (self._memory(torch.cuda.max_memory_allocated) - before) / 1e6 if self.on_gpu else None

    def _memory(self, figure: Any) -> int:
        torch.cuda.synchronize(self.device)
        return figure(self.device)

    def _backward(self) -> None:
        batch = self.setting.batch
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.setting.autocast):
            logits = self.model(batch[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).backward()

    def step(self) -> None:
        torch.use_deterministic_algorithms(self.variant == DETERMINISTIC)
        for _ in self.model.micro_batches(1) if self.variant == "declared" else range(1):
            self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sample(self) -> tuple[float, float]:
        """Milliseconds of a step, and those until Python has issued the first one."""
        self._synchronize()
        began = time.perf_counter()
        self.step()
        issued = time.perf_counter()
        for _ in range(STEPS - 1):
            self.step()
        self._synchronize()
        return 1e3 * (time.perf_counter() - began) / STEPS, 1e3 * (issued - began)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        for closed in (self.optimizer, self.model):
            if hasattr(closed, "close"):
                closed.close()


def measure(setting: Setting) -> None:
    """The bare step, and each variant beside it."""
    Loop(setting, BARE)  # what the libraries keep on the card is no memory of the next one
    part, bare = setting.part, Loop(setting, BARE)
    step_ms, host_ms = map(
        statistics.median, zip(*(bare.sample() for _ in range(setting.pairs)), strict=True)
    )
    figures = {"step_ms": step_ms, "host_ms": host_ms, "peak_mb": bare.peak_mb}
    part.found(f"{setting.name}, {BARE}", "measured", **figures)
    for variant in VARIANTS:
        what = f"{setting.name}, {variant}"
        if part.left_s < LEAST_S:
            part.found(what, "skipped", why=f"{part.left_s:.0f} s left")
            continue
        try:
            part.found(what, "measured", **beside(bare, Loop(setting, variant), setting.pairs))
        except Exception as error:  # the others are worth their time
            part.found(what, "failed", why=f"{type(error).__name__}: {error}"[:500])


def beside(bare: Loop, loop: Loop, num_pairs: int) -> dict[str, object]:
    """The figures of ``loop``, from pairs of a sample of each, in turns the one and the other first."""
    pairs = []
    for turn in range(num_pairs):
        first = [loop.sample()] if turn % 2 else []
        pairs.append((bare.sample(), *(first or [loop.sample()])))
    loop.close()
    ratios = [ours[0] / theirs[0] for theirs, ours in pairs]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "step_ms": statistics.median(ours[0] for _, ours in pairs),
        "ratio": median,
        "quartiles": f"{low:.3f} to {high:.3f}",
        "host_ms": statistics.median(ours[1] for _, ours in pairs),
        "peak_mb": loop.peak_mb,
        "peak_ratio": loop.peak_mb / bare.peak_mb if loop.peak_mb and bare.peak_mb else None,
        "ratios": ratios,
    }


def timings(part: Part) -> None:
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if part.on_gpu:
        torch.cuda.set_device(part.device)
    backend = "cpu:gloo,cuda:nccl" if part.on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    vocabulary, sequences, tokens, pairs = (256, 2, 64, 3) if part.quick else (VOCABULARY, 8, 512, 12)
    sizes = {name: preset(name)._asdict() for name in ("small", "medium")}
    for name, size in ({"tiny": {"layers": 2, "width": 64, "heads": 4}} if part.quick else sizes).items():
        config = GPTConfig(vocab_size=vocabulary, context=1024, **size)
        batch = torch.randint(vocabulary, (sequences, tokens + 1), device=part.device)
        for autocast in (False, True):
            what = f"{name}, {'bf16 autocast' if autocast else 'float32'}"
            measure(Setting(part, what, config, autocast, batch, pairs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main({"timings": timings})
