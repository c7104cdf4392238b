"""What is trained, and where: models, optimizers and placements, drawn from a seed. Pure.

A ``Program`` is all that the bits may depend on, a ``Placement`` what they must not. The same numbers give
the same ones: ``program(seed, model)`` and ``placements(seed, model, number)``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# What becomes of a trial (``trial.attempt``).
SAME, REFUSED, MISMATCH, CRASH, HANG, INVALID = "same", "refused", "mismatch", "crash", "hang", "invalid"
FINDINGS = (MISMATCH, CRASH, HANG)

# What a layer computes (``layers.LAYERS``), and how often it is drawn.
KINDS: Mapping[str, int] = {
    "linear": 6,
    "no_bias": 2,
    "conv1d": 2,
    "conv2d": 2,
    "embedding": 3,
    "layernorm": 3,
    "rmsnorm": 2,
    "groupnorm": 2,
    "batchnorm": 1,
    "batchnorm_untracked": 1,
    "gru": 2,
    "lstm": 2,
    "attention": 3,
    "encoder": 2,
    "bilinear": 1,
    "prelu": 2,
    "scalar": 2,
    "empty": 2,
    "tied": 4,
    "functional": 2,
    "borrowed": 2,
    "unused": 2,
    "buffer": 2,
    "counter": 1,
    "dropout": 3,
    "dropout_function": 1,
    "python_random": 1,
    "numpy_random": 1,
    "own_generator": 1,
    "weight_norm": 1,
    "parameter_list": 1,
    "custom_function": 1,
    "in_place": 1,
    "no_grad": 1,
    "complex": 1,
    "moe": 1,
}
DRAWING = frozenset(
    {"dropout", "dropout_function", "encoder", "python_random", "numpy_random", "own_generator"}
)
WRAPS: Mapping[str, int] = {
    "": 14,
    "frozen": 2,
    "half_frozen": 1,
    "checkpoint": 2,
    "reentrant": 2,
    "nested": 2,
    "twice": 2,
    "sometimes": 2,
    "hook": 1,
    "autocast": 1,
    "eval": 1,
}
DTYPES: Mapping[str, int] = {"float32": 10, "float64": 2, "bfloat16": 2, "float16": 1}
NARROW = ("bfloat16", "float16")
MEMORY: Mapping[str, int] = {"": 12, "transposed": 2, "channels_last": 1, "gap": 1, "odd_offset": 1}
OUTPUTS = ("tensor", "tensor", "tuple", "dict", "nested")
INPUTS = ("positional", "keyword", "dict")
LOSSES: Mapping[str, int] = {"square": 8, "l2": 1}
WEIGHTS: Mapping[str, int] = {"mean": 4, "sum": 3, "zero": 1}
GROUPS: Mapping[str, int] = {"one": 4, "two": 2, "each": 1}

OPTIMIZERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "AdamW": (
        {"fused": True},
        {"foreach": False},
        {"foreach": True},
        {"amsgrad": True},
        {"weight_decay": 0.1},
    ),
    "Adam": ({}, {"fused": True}, {"amsgrad": True, "fused": True}, {"weight_decay": 0.1}),
    "SGD": (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"momentum": 0.5, "foreach": True},
        {"fused": True},
    ),
    "RMSprop": ({}, {"momentum": 0.9, "centered": True}),
    "Adagrad": ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "ASGD": ({}, {"t0": 1.0}),
    "Adamax": ({}, {"weight_decay": 0.1}),
    "NAdam": ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ({}, {"foreach": True}),
    "Adadelta": ({},),
    "Rprop": ({},),
    "Adafactor": ({},),
}
OFTEN = ("AdamW", "AdamW", "Adam", "SGD", "SGD")  # half of the programs have one of these

REPLICATED = ("naive", "flat", "overlap", "bucketed")  # strategies of ``DataParallel``
SHARDED = ("stage1", "stage2", "stage3")
FORMS: Mapping[str, int] = {
    **dict.fromkeys(REPLICATED, 2),
    "bucketed": 4,
    "server": 1,
    "threads": 1,
    "stage1": 3,
    "stage2": 3,
    "stage3": 5,
    "pipeline": 4,
}
SCHEDULES: Mapping[str, int] = {  # of pipelines, with their stages per rank
    "naive": 1,
    "gpipe": 1,
    "1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "interleaved": 2,
    "zb-v": 2,
}
BUCKETS_MB = (1e-6, 1e-4, 1e-3, 0.01, 25.0)


@dataclass(frozen=True)
class Layer:
    """One layer of a model, (B, T, width) -> (B, T, width), added to what came before it."""

    kind: str
    wrap: str = ""
    dtype: str = "float32"
    memory: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.wrap, self.kind, self.dtype, self.memory)))


@dataclass(frozen=True)
class Program:
    """A model and how it is trained. ``stops``: the steps after which it is saved, and the last one."""

    width: int
    length: int
    layers: tuple[Layer, ...]
    outputs: str
    inputs: str
    loss: str
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    groups: str
    clip: float | None
    scheduled: bool
    sizes: tuple[int, ...]  # rows of each micro-batch
    weights: str
    stops: tuple[int, ...]

    @property
    def num_micro_batches(self) -> int:
        """G."""
        return len(self.sizes)

    @property
    def kinds(self) -> set[str]:
        return {layer.kind for layer in self.layers}

    @property
    def words(self) -> set[str]:
        """Everything that it has, for those who want to leave something out."""
        layers = {
            word for layer in self.layers for word in (layer.kind, layer.wrap, layer.dtype, layer.memory)
        }
        return (layers | {self.optimizer, self.loss, self.weights}) - {""}

    @property
    def draws(self) -> bool:
        """Whether forward draws random numbers: threads, which share generators, cannot be its ranks."""
        return bool(self.kinds & DRAWING)

    @property
    def is_pipelined(self) -> bool:
        """Whether stages can train it: what a layer draws is keyed by the layer there, a loss of all weights
        needs them on one rank, a micro-batch that is left out is not run at all, and torch's Adafactor takes
        one eps for all weights, from the dtype of the first that has a gradient.
        """
        one_eps = self.optimizer == "Adafactor" and self.words & (set(DTYPES) - {"float32"})
        return not (self.draws or self.loss == "l2" or self.weights == "zero" or one_eps)


@dataclass(frozen=True)
class Placement:
    """Where it is trained.

    ``by``: whether ranks are threads or processes. ``shard``: ranks of each shard group, by default all.
    ``num_hosts``: between which ranks share no memory, on each of which several do.
    ``other_optimizer``: a plain one where stages 2 and 3 have a sharded one, a sharded one in a pipeline.
    ``pp``: ranks of each pipeline. ``cuts``: its own, or about as many layers in each stage.
    """

    form: str
    world: int
    backend: str = "gloo"
    by: str = "thread"
    bucket_mb: float = 25.0
    overlap: bool = True
    find_unused: bool | None = True
    num_hosts: int = 1
    shard: int | None = None
    other_optimizer: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    cuts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        form = f"{self.form} {self.schedule}" if self.form == "pipeline" else self.form
        return f"{form} on {self.world} by {self.by} over {self.backend}"


def program(seed: int, model: int, keep: Sequence[int] | None = None) -> Program:
    """Model number ``model`` of ``seed``; ``keep`` are the places of the layers that stay, by default all."""
    draw = random.Random(f"program {seed} {model}")
    dtype = _weighted(draw, DTYPES)
    layers = tuple(_layer(draw, dtype) for _ in range(draw.choice((1, 2, 3, 4, 6, 8))))
    optimizer = draw.choice(OFTEN) if draw.random() < 0.5 else draw.choice(sorted(OPTIMIZERS))
    stops = draw.choice(((1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 4)))
    drawn = Program(
        width=draw.choice((4, 8, 12, 32, 72)),
        length=draw.choice((1, 2, 3, 5)),
        layers=layers,
        outputs=draw.choice(OUTPUTS),
        inputs=draw.choice(INPUTS),
        loss=_weighted(draw, LOSSES),
        optimizer=optimizer,
        options=tuple(draw.choice(OPTIMIZERS[optimizer]).items()),
        groups=_weighted(draw, GROUPS),
        clip=draw.choice((None, None, 0.05, 1.0)),
        scheduled=draw.random() < 0.2,
        sizes=_sizes(draw),
        weights=_weighted(draw, WEIGHTS),
        stops=stops,
    )
    return drawn if keep is None else replace(drawn, layers=tuple(layers[i] for i in keep))


def placements(seed: int, model: int, number: int) -> tuple[Placement, ...]:
    """Placement number ``number`` of a model: one for each part of the training between two saves."""
    return parts(random.Random(f"placement {seed} {model} {number}"), program(seed, model))


def parts(draw: random.Random, whole: Program, form: str | None = None) -> tuple[Placement, ...]:
    """A placement for each part of the training; the first is of ``form``, the others may be of another."""
    first = placement(draw, whole, form)
    moves = draw.random() < 0.7
    return tuple(
        first if not part or not moves else placement(draw, whole) for part in range(len(whole.stops))
    )


def _layer(draw: random.Random, dtype: str) -> Layer:
    own = _weighted(draw, DTYPES) if draw.random() < 0.15 else dtype
    kind = _weighted(draw, KINDS)
    if kind == "batchnorm" and own in NARROW:  # running statistics of a plain loop are not promised
        own = "float32"
    return Layer(kind, _weighted(draw, WRAPS), own, _weighted(draw, MEMORY))


def _sizes(draw: random.Random) -> tuple[int, ...]:
    number = draw.choice((1, 1, 2, 3, 4, 5, 7, 8, 9))
    if draw.random() < 0.6:
        return (draw.randint(1, 3),) * number
    return tuple(draw.randint(1, 4) for _ in range(number))


def forms(whole: Program) -> Mapping[str, int]:
    """The forms that can train ``whole``, and how often each is drawn."""
    odds = dict(FORMS)
    if not _threads(whole):
        del odds["threads"]
    if not whole.is_pipelined or len(set(whole.sizes)) > 1:  # between stages shapes do not change
        del odds["pipeline"]
    return odds


def placement(draw: random.Random, whole: Program, form: str | None = None) -> Placement:
    """One of ``form``, by default of any that can train ``whole``."""
    form = _weighted(draw, forms(whole)) if form is None else form
    world = 1 if form == "threads" else draw.choice((1, 2, 2, 3, 3, 4, 5, 6))
    stages: dict[str, Any] = {}
    if form == "pipeline":
        world, stages = _stages(draw, len(whole.layers) + 1)
    by = "thread"
    if world > 1 and (not _threads(whole) or draw.random() < 0.1):
        by, world = "process", min(world, 4)
    backend = draw.choice(("gloo", "shm"))
    may_spread = by == "thread" and backend == "gloo" and form in (*REPLICATED, "stage1") and world in (4, 6)
    bucket_mb = draw.choice(BUCKETS_MB)
    draw.random()  # for nothing, or the programs of all seeds would be others
    return Placement(
        form=form,
        world=world,
        backend=backend,
        by=by,
        bucket_mb=bucket_mb,
        overlap=draw.random() < 0.8,
        find_unused=draw.choice((True, True, None)),
        num_hosts=2 if may_spread and draw.random() < 0.5 else 1,
        shard=2 if form in SHARDED and world in (4, 6) and draw.random() < 0.5 else None,
        other_optimizer=form in ("stage2", "stage3", "pipeline") and draw.random() < 0.3,
        **stages,
    )


def _threads(whole: Program) -> bool:
    """Whether ranks may be threads. They promise nothing with random numbers, nor under autocast: one that
    leaves it drops the casts of all, and a weight that is cast anew has another node of the graph, whose
    gradient is rounded by itself.
    """
    return not whole.draws and "autocast" not in whole.words


def _stages(draw: random.Random, num_layers: int) -> tuple[int, dict[str, Any]]:
    """World size and options of a pipeline of so many layers, of two at least."""
    pp = draw.choice([pp for pp in (2, 2, 3, 4) if pp <= num_layers])
    schedule = draw.choice([name for name, chunks in SCHEDULES.items() if pp * chunks <= num_layers])
    world = 4 if pp == 2 and draw.random() < 0.5 else pp
    cuts = None
    if draw.random() < 0.5:
        cuts = tuple(sorted(draw.sample(range(1, num_layers), pp * SCHEDULES[schedule] - 1)))
    return world, {"pp": pp, "schedule": schedule, "cuts": cuts}


def _weighted(draw: random.Random, odds: Mapping[str, int]) -> str:
    return draw.choices(list(odds), list(odds.values()))[0]
