"""The options of ``instep bench``, a sentence per field. Pure.

1 KB is 1000 bytes here, as in GB/s; KiB is 1024.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from instep.bench.hosts import RATE
from instep.bench.workloads import HEAD_WIDTH, MLPS, VOCAB, WORKLOADS, Workload
from instep.models.config import PRESETS, GPTConfig
from instep.pipeline.schedules import NAMES, generate

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}

SIZES = ("1KB", "10KB", "100KB", "1MB", "10MB", "100MB")
MORE_SIZES = ("1GB",)
Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
]

Backend = Literal["gloo", "shm", "nccl"]
Optimizer = Literal["sgd", "adamw"]

Ranks = Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-n"], metavar="N [N ...]")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORD[,WORD ...]")]


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Where the results go, beside the table on stdout."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the results with their environment to this file."""
    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the table to this file, a line per row."""
    chart: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Draw the results: this file, and a PNG beside it."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured; where that takes no torch to find out."""


@dataclass(frozen=True, kw_only=True)
class LinkOptions(OutputFiles):
    """Where the ranks are."""

    link: bool = False
    """Put every rank on a host of its own: network namespaces, a link from each to one switch."""
    rate: str = RATE
    """Rate of each link in each direction, in the words of tc: 1gbit, 200mbit."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        if self.rate != RATE and not self.link:
            raise ValueError(f"rate {self.rate!r} is that of a link, of which one host has none: pass --link")


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions(LinkOptions):
    """Time of a collective against its size, on several backends in one run.

    algbw is S / time, busbw that times a link's share of S (all-reduce: 2 (W-1)/W), as in nccl-tests.
    predicted is the time by the alpha-beta model: rounds times the cost of a message, plus bytes times the
    cost of a byte, both measured between two ranks in the same run; over a link a byte costs at least the
    inverse of the link's rate.
    """

    ranks: Ranks = (2,)
    """Numbers of ranks; each has a world of its own."""
    collective: Collective = "all_reduce"
    """The collective to measure."""
    backends: Words = ()
    """Backends and algorithms, timed alternately; all available ones by default."""
    sizes: Words = ()
    """Message sizes, such as 1KB,64KB,4MB; 1KB to 100MB by default."""
    full: bool = False
    """Also measure 1GB."""
    samples: int = 20
    """Samples of each; a sample of a small message is the mean of several calls."""
    budget_s: float = 15.0
    """Seconds for the samples of one size; large messages get fewer samples, though at least 3."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        super().check()
        _check_ranks(*self.ranks)
        if self.samples < 2:
            raise ValueError(f"expected at least 2 samples, got {self.samples}")
        sizes_of(self)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LinkOptions):
    """The model, the work of a rank in a step, and the place of the ranks."""

    preset: Annotated[str, tyro.conf.arg(metavar="|".join(PRESETS))] = ""
    """Layers, width and heads of a published GPT."""
    params: Annotated[str, tyro.conf.arg(metavar="COUNT")] = ""
    """Approximate number of parameters (within an eighth) without a preset; 20M by default."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Windows of text per rank and step; by default 1, 4 or 8, depending on the measurement."""
    context: Annotated[int | None, tyro.conf.arg(aliases=["--tokens"], metavar="N")] = None
    """Tokens of a window; 128 by default, 64 for bucket sizes."""
    vocab: Annotated[int, tyro.conf.arg(metavar="N")] = VOCAB
    """Size of the vocabulary: 256 for bytes; that of GPT-2 is 50257."""
    backend: Backend | None = None
    """Transport; with nccl the models are on GPUs, one per rank. By default steps compares gloo and shm, and
    scaling uses the transport of training."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        super().check()
        if self.preset and self.params:
            raise ValueError(
                f"--preset {self.preset} and --params {self.params} both say how large the model is: pass one"
            )
        for name in ("batch", "context", "vocab"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"expected --{name} of at least 1, got {value}")
        if self.link and self.backend in ("shm", "nccl"):
            raise ValueError(
                f"--backend {self.backend} with --link: hosts share no memory, and here no GPU: pass "
                "--backend gloo"
            )
        self.check_model()

    def check_model(self) -> None:
        """``ValueError`` for a model that cannot be made."""
        _ = self.workload("link").config

    def workload(self, name: str) -> Workload:
        """The workload called ``name``, and what these options say of it.

        Raises:
            ValueError: no number of parameters.
        """
        said: dict[str, Any] = {"batch": self.batch, "tokens": self.context}
        if not self.preset:
            said["params"] = parse_count(self.params or "20M")
        given = {field: value for field, value in said.items() if value is not None}
        return replace(WORKLOADS[name], preset=self.preset, vocab=self.vocab, **given)


@dataclass(frozen=True, kw_only=True)
class BucketsOptions(ModelOptions):
    """Step time against bucket size, and the best size predicted from latency and bandwidth."""

    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 2
    """Number of ranks."""
    sizes: Annotated[tuple[float, ...], tyro.conf.arg(metavar="MIB [MIB ...]")] = (1.0, 10.0, 100.0)
    """Bucket sizes in MiB."""
    ordered: bool = True
    """Sum in the fixed order, as training does; without, by the backend's all-reduce."""
    backend: Backend = "gloo"
    """Transport; with nccl the models are on GPUs, one per rank."""
    samples: int = 10
    """Samples of each size."""
    rounds: int = 2
    """Turns in which the samples of each size are taken, so that disturbances affect all sizes alike."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        super().check()
        _check_ranks(self.ranks)
        if self.samples < 2 or self.rounds < 1:
            raise ValueError(
                f"expected at least 2 samples and 1 round, got samples={self.samples}, rounds={self.rounds}"
            )
        if not self.sizes or min(self.sizes) <= 0:
            raise ValueError(f"expected positive bucket sizes in MiB, got {self.sizes}")


@dataclass(frozen=True, kw_only=True)
class WholeStepOptions(ModelOptions):
    """A model and its optimizer."""

    optimizer: Optimizer = "sgd"
    """The optimizer, with a rate of zero: SGD has no state, AdamW two numbers per parameter."""

    def workload(self, name: str) -> Workload:
        """The workload called ``name``, and what these options say of it."""
        return replace(super().workload(name), optimizer=self.optimizer)


@dataclass(frozen=True, kw_only=True)
class StepsOptions(WholeStepOptions):
    """Time of a training step by strategy."""

    preset: Annotated[str, tyro.conf.arg(metavar="|".join((*PRESETS, *MLPS)))] = ""
    """Layers, width and heads of a published GPT; or an MLP, with 32 vectors per rank."""
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 2
    """Number of ranks."""
    setting: Literal["communication", "compute", "both"] = "communication"
    """The dominant part of the step: communication, with a model that is large for its batch, or compute;
    --batch replaces the setting."""
    strategies: Words = ()
    """Strategies to compare, measured alternately; by default all without sharding. sharded stands for
    stage1, stage2 and stage3, declared for the declared steps of flat and bucketed."""
    samples: int = 0
    """Steps of each strategy that are timed; 0: 3 to 20, as many as fit into a minute."""
    memory: bool = False
    """Measure the peak memory of each strategy too, in ranks of its own; not of an MLP."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        super().check()
        _check_samples(self.samples)
        if self.batch is not None and self.setting != "communication":
            raise ValueError(
                f"--batch {self.batch} and --setting {self.setting} both say how much a rank computes: pass "
                "one"
            )

    def check_model(self) -> None:
        """``ValueError`` for a model that cannot be made, or of which something is said that it has not."""
        if self.preset not in MLPS:
            super().check_model()
        elif self.context is not None or self.vocab != VOCAB:
            raise ValueError(
                f"--preset {self.preset} with --context or --vocab: an MLP has vectors, no tokens"
            )

    def workload(self, name: str) -> Workload:
        """The workload called ``name``, or that of the MLP, and what these options say of it."""
        return super().workload(self.preset if self.preset in MLPS else name)

    @property
    def settings(self) -> tuple[str, ...]:
        """The workloads to measure on one host, by name."""
        if self.preset in MLPS:
            return (self.preset,)
        if self.batch is not None:
            return ("given",)
        return ("communication", "compute") if self.setting == "both" else (self.setting,)


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(WholeStepOptions):
    """Throughput against the number of ranks, beside the ideal."""

    ranks: Ranks = (1, 2, 4)
    """Numbers of ranks, which take turns; all are compared with the smallest."""
    work: Literal["strong", "weak", "both"] = "both"
    """Constant work per step, shared by the ranks (strong), or constant work per rank (weak); with the
    smallest number of ranks both are --batch windows per rank."""
    strategies: Words = ("bucketed",)
    """Strategies to compare: naive, flat, overlap, bucketed, unordered or DDP, torch's own."""
    samples: int = 0
    """Steps of each that are timed; 0: 3 to 20, as many as fit into a minute."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        super().check()
        _check_samples(self.samples)
        if len(set(self.ranks)) < 2 or min(self.ranks) < 1:
            raise ValueError(
                f"expected at least two numbers of ranks to compare, such as -n 1 2 4, got {self.ranks}"
            )
        shared = self.workload("scaling").batch * min(self.ranks)
        if odd := [ranks for ranks in self.ranks if shared % ranks and self.work != "weak"]:
            raise ValueError(
                f"{shared} windows in a step cannot be shared alike by {odd[0]} ranks: pass a --batch that "
                f"can, or --work weak"
            )


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(OutputFiles):
    """Threads against processes: the speed-up of the same step, and the cost of Python's lock."""

    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 2
    """Number of workers, as threads of one process and as processes."""
    setting: Literal["python", "matrices", "both"] = "both"
    """The model: many tiny layers, which are mostly Python; or few large matrix products."""
    samples: int = 0
    """Steps of each that are timed; 0: 3 to 20, as many as fit into a minute."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        _check_ranks(self.ranks)
        _check_samples(self.samples)


@dataclass(frozen=True, kw_only=True)
class MemorySaversOptions(OutputFiles):
    """Memory saved by activation checkpointing and by bf16, and their cost in time and loss."""

    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 2
    """Number of ranks."""
    params: Annotated[str, tyro.conf.arg(metavar="COUNT")] = "10M"
    """Approximate number of parameters of the measured model (within an eighth)."""
    batch: int = 8
    """Windows of text per rank and step."""
    context: int = 128
    """Tokens of a window."""
    samples: int = 0
    """Steps of each that are timed; 0: 3 to 20, as many as fit into a minute."""
    steps: int = 50
    """Steps of instep train after which losses are compared; 0: not at all."""
    seeds: int = 2
    """Runs of each precision, whose losses show the effect of the seed alone."""

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        _check_ranks(self.ranks)
        _check_samples(self.samples)
        if self.batch < 1 or self.context < 1 or self.steps < 0 or self.seeds < 1:
            raise ValueError(
                f"expected at least 1 window, 1 token, 0 steps and 1 seed, got batch={self.batch}, "
                f"context={self.context}, steps={self.steps}, seeds={self.seeds}"
            )
        parse_count(self.params)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(OutputFiles):
    """A step of a pipeline by schedule and number of micro-batches: measured, simulated, by closed form."""

    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 2
    """Number of ranks, each with a share of the layers; with fewer cores than ranks, bubbles
    are not measured."""
    schedules: Words = ()
    """Schedules to compare, measured alternately; by default all of them."""
    micro_batches: Annotated[tuple[str, ...], tyro.conf.arg(metavar="M[,M ...]")] = ("1,2,4,8",)
    """Numbers of micro-batches in a step."""
    layers: int = 8
    """Transformer blocks of the model, divided equally among stages."""
    width: int = 256
    """Width of the blocks, in heads of 64."""
    micro_size: int = 4
    """Windows of text in a micro-batch."""
    context: int = 64
    """Tokens of a window."""
    backend: Literal["gloo", "shm"] = "gloo"
    """Transport between the ranks."""
    samples: int = 0
    """Timed steps of each schedule and number of micro-batches; 0: 3 to 20, as many as fit into a minute."""

    @property
    def names(self) -> tuple[str, ...]:
        """The schedules to compare."""
        return split_words(self.schedules) or tuple(NAMES)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of micro-batches, from the smallest."""
        return tuple(sorted(map(parse_count, split_words(self.micro_batches))))

    @property
    def model(self) -> GPTConfig:
        """The model; its output layer has weights of its own, so that stages send activations alone."""
        heads = max(self.width // HEAD_WIDTH, 1)
        return GPTConfig(context=self.context, layers=self.layers, width=self.width, heads=heads, tied=False)

    def check(self) -> None:
        """``ValueError`` for what cannot be measured."""
        _check_ranks(self.ranks)
        _check_samples(self.samples)
        if self.micro_size < 1:
            raise ValueError(f"expected at least 1 window, got --micro-size {self.micro_size}")
        if not self.counts:
            raise ValueError("expected a number of micro-batches, such as --micro-batches 1,2,4,8")
        for name in self.names:
            num_stages = generate(name, self.ranks, self.counts[0]).num_stages
            if self.layers % num_stages:
                raise ValueError(
                    f"{self.layers} blocks cannot be shared out alike among the {num_stages} stages of "
                    f"{name} on {self.ranks} ranks: pass --layers "
                    f"{num_stages * -(-self.layers // num_stages)}"
                )
        _ = self.model


def _check_samples(samples: int) -> None:
    if samples < 0:
        raise ValueError(f"expected --samples of at least 0 (0: as many as fit), got {samples}")


def _check_ranks(*numbers: int) -> None:
    for ranks in numbers:
        if ranks < 2:
            raise ValueError(f"expected at least 2 ranks, got {ranks}: a single rank has no peer")


def sizes_of(options: CollectivesOptions) -> tuple[int, ...]:
    """The message sizes in bytes that ``options`` ask for."""
    named = split_words(options.sizes) or SIZES
    return tuple(parse_size(text) for text in (*named, *(MORE_SIZES if options.full else ())))


def split_words(given: tuple[str, ...]) -> tuple[str, ...]:
    """``given``, whether it was separated by spaces or by commas; each word once."""
    return tuple(dict.fromkeys(word for part in given for word in part.split(",") if word))


def parse_count(text: str) -> int:
    """``"70M"`` -> 70_000_000.

    Raises:
        ValueError: it is not a number with one of the units K, M, G, or is less than one.
    """
    found = re.fullmatch(r"([0-9.]+) *([KMG]?I?)", text.strip().upper())
    if found is None or found[2] not in UNITS or found[1].count(".") > 1 or not re.search("[0-9]", found[1]):
        raise ValueError(f"expected a number such as 512, 64K or 1.5M, got {text!r}")
    count = round(float(found[1]) * UNITS[found[2]])
    if count < 1:
        raise ValueError(f"expected at least 1, got {text!r}")
    return count


def parse_size(text: str) -> int:
    """``"64KB"`` -> 64_000, ``"1MiB"`` -> 1_048_576, ``"512"`` -> 512; in bytes.

    Raises:
        ValueError: it is not a size.
    """
    try:
        return parse_count(re.sub("[bB]$", "", text.strip()))
    except ValueError:
        raise ValueError(f"expected a size such as 512, 64KB, 1MiB or 1GB, got {text!r}") from None
