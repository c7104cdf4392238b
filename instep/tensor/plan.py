"""A plan says which layers are cut and how: names to styles, as for torch's ``parallelize_module``.

shard(model, mesh, {
    "embedding.tokens": Vocabulary(),
    "embedding": scatter,                        with sequence parallelism: slices of the sequence ...
    "blocks.*.attention_norm": Sequence(),
    "blocks.*.attention.qkv": Column(parts=3, heads=4),
    "blocks.*.attention.out": Row(),
    "head": gather,                              ... from there to here
    "head.out": Column(),
})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from instep.hook import Hook
from instep.mesh.mesh import Mesh, UnrankedMesh
from instep.state.boxes import Cut, divide
from instep.state.homes import homes
from instep.step.agreement import agree_on_structure, broadcast_values
from instep.step.optimizer_guard import require_unowned
from instep.tensor.exchange import ALIGN_ELEMENTS, TensorRanks
from instep.tensor.layers import (
    ColumnLinear,
    FromSlices,
    RowLinear,
    SequenceDropout,
    SequenceNorm,
    TensorLayer,
    ToSlices,
    VocabularyEmbedding,
)

MAX_CHUNKS = 256
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A linear layer cut by output features: each rank computes some of them from the whole input.

    Attributes:
        parts: number of layers of equal size that are fused in this one (3: query, key, value).
        heads: number of attention heads, which stay whole; 0: none.
        gathers_output: all ranks get all features, as of logits for an ordinary loss.
        is_vocabulary: the features are logits: the last chunk may have fewer, as of ``Vocabulary``.

    Example:
        >>> plan = {"attention.qkv": instep.tensor.Column(parts=3, heads=8)}
    """

    parts: int = 1
    heads: int = 0
    gathers_output: bool = False
    is_vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.parts > 1 and (self.gathers_output or self.is_vocabulary):
            raise ValueError(
                f"parts={self.parts} of fused layers with gathers_output or is_vocabulary: expected parts=1"
            )


@dataclass(frozen=True)
class Row:
    """A linear layer cut by input features, which a ``Column`` made: the ranks' products are added.

    Example:
        >>> plan = {"attention.qkv": instep.tensor.Column(parts=3), "attention.out": instep.tensor.Row()}
    """


@dataclass(frozen=True)
class Vocabulary:
    """An embedding cut by rows. The last rank has fewer where the vocabulary is no multiple.

    Example:
        >>> plan = {"embedding.tokens": instep.tensor.Vocabulary()}
    """


@dataclass(frozen=True)
class Sequence:
    """A norm over features, or dropout: on this rank's slice of the sequence with ``sequence=True``.

    Example:
        >>> plan = {"blocks.*.norm": instep.tensor.Sequence(), "blocks.*.dropout": instep.tensor.Sequence()}
    """


Style: TypeAlias = Column | Row | Vocabulary | Sequence | str
scatter, gather = "scatter", "gather"  # the output of a module to slices of the sequence; its input from them
STYLES = "Column, Row, Vocabulary, Sequence, scatter or gather of instep.tensor"


def shard(
    module: M,
    mesh: Mesh,
    plan: Mapping[str, Style],
    chunks: int | None = 8,
    *,
    sequence: bool = False,
) -> M:
    """Cut layers of ``module`` over the mesh's axis ``tp``, in place, names kept. Collective over the mesh.

    Wrap the module afterwards: ``instep.DataParallel(module, mesh)`` reduces over the data axes. All ranks
    take rank 0's values first. A parameter that is cut has this rank's part; ``instep.save``,
    ``instep.full_state_dict`` and a run's checkpoints have the whole.

    With ``chunks`` a training has the same bits for every ``tp`` that divides them, 1 included, with and
    without ``sequence`` (``products.py``). Between a ``Column`` and a ``Row`` a model may have functions of
    each feature, or head, by itself: no dropout, and no parameters that the plan does not cut. Neither is
    checked; ``model.verify`` finds the parameters.

    Args:
        module: with values, the same layers on all ranks.
        mesh: of ``instep.init(tp=...)``.
        plan: styles by the names of modules; ``*`` stands for any characters. Each entry must match one.
        chunks: a power of two. None: as many as ranks, which is fastest, and bits depend on ``tp``.
        sequence: between a ``Row`` and the next ``Column`` each rank has a slice of the sequence (dim 1).
            Without it ``scatter`` and ``gather`` have no effect.

    Returns:
        ``module``.

    Raises:
        ValueError: a name matches nothing; a layer cannot be cut like that; sizes do not fit. On all ranks.
        TypeError: an entry is no style.
        PeerLost: a rank did not come.

    Example:
        >>> mesh = instep.init()
        >>> plan = {"0": instep.tensor.Column(), "2": instep.tensor.Row()}
        >>> model = instep.DataParallel(instep.tensor.shard(model, mesh, plan, chunks=2), mesh)
    """
    size = mesh.along["tp"].size
    if chunks is None and isinstance(mesh, UnrankedMesh):
        raise ValueError("chunks=None before this process has ranks: under `instep run` pass a number")
    chunks = size if chunks is None else chunks
    if chunks < 1 or chunks & (chunks - 1) or chunks > MAX_CHUNKS or chunks % size:
        fits = [n for n in (size, 8, 16, 32) if n % size == 0 and not n & (n - 1)]
        raise ValueError(
            f"chunks={chunks} for tp({size}): expected a power of two that tp divides"
            + (f", such as {fits[-1]}" if fits else "; tp has to be a power of two itself")
        )
    require_unowned([*module.parameters()])
    agree_on_structure(module, {"plan": dict(plan), "chunks": chunks, "sequence": sequence}, mesh.world.group)
    styles = dict(_matched(module, plan))
    if sequence and not {scatter, gather} <= {style for style in styles.values() if isinstance(style, str)}:
        raise ValueError(
            "sequence=True with a plan without scatter and gather: each rank would take all of its sequence "
            "for a slice. Give scatter to the module before the slices, and gather to the one after them"
        )
    by_name: dict[str, Cut] = {}
    for name, style in styles.items():
        found = _cuts(name, module.get_submodule(name), style, chunks)
        by_name |= {f"{name}.{key}": cut for key, cut in found.items()}
    owners = dict(module.named_parameters(remove_duplicate=False))
    first_names = {id(p): name for name, p in reversed(list(owners.items()))}
    cuts = {first_names[id(owners[name])]: cut for name, cut in by_name.items()}
    for name, p in owners.items():
        first = first_names[id(p)]
        if (cut := cuts.get(first)) != (own := by_name.get(name)):
            raise ValueError(
                f"parameter {first!r} is tied, and the plan cuts it as {cut}, but as {own or 'a whole'} in "
                f"{name!r}: give both layers the same cut, leave both out of the plan, or untie them"
            )
    if not homes(module.parameters()):  # else the first division has done it
        broadcast_values(module, mesh.world.group)
    ranks = TensorRanks(divide(module, mesh, cuts))
    edges = [name for name, style in styles.items() if style in (scatter, gather)]
    for name, style in styles.items():
        is_between = not any(name == edge or name.startswith(f"{edge}.") for edge in edges)
        _apply(module, name, style, ranks, chunks, is_sequence=sequence and (is_between or name in edges))
    return module


def _matched(module: nn.Module, plan: Mapping[str, Style]) -> Iterator[tuple[str, Style]]:
    for pattern, style in plan.items():
        if not isinstance(style, Column | Row | Vocabulary | Sequence) and style not in (scatter, gather):
            raise TypeError(f"plan[{pattern!r}]: expected {STYLES}, got {style!r}")
        # A layer is replaced under each of its names, and scatter and gather hook a module once.
        names = module.named_modules(remove_duplicate=isinstance(style, str))
        found = [name for name, _ in names if name and fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"plan[{pattern!r}] matches no module: expected names of its parts, as 'up'")
        yield from ((name, style) for name in found)


def _cuts(name: str, layer: nn.Module, style: Style, chunks: int) -> dict[str, Cut]:
    """How ``style`` cuts the parameters of ``layer``, by their names in it."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if hooks and not isinstance(style, str):
        raise ValueError(f"{name} has hooks, which the layer in its place would not call: shard first")
    if isinstance(style, Column):
        linear = _of_kind(name, layer, style, nn.Linear)
        unit = _unit(name, linear.out_features, style.parts * chunks, whole=not style.is_vocabulary)
        cut = Cut("tp", 0, unit, style.parts, style.heads)
        return {"weight": cut} | ({"bias": cut} if linear.bias is not None else {})
    if isinstance(style, Row):
        linear = _of_kind(name, layer, style, nn.Linear)
        return {"weight": Cut("tp", 1, _unit(name, linear.in_features, chunks))}
    if isinstance(style, Vocabulary):
        table = _of_kind(name, layer, style, nn.Embedding)
        special = [key for key in ("padding_idx", "max_norm") if getattr(table, key) is not None]
        special += [key for key in ("scale_grad_by_freq", "sparse") if getattr(table, key)]
        if special:
            raise ValueError(
                f"{name}: an embedding with {special[0]} cannot be cut: leave it out of the plan"
            )
        return {"weight": Cut("tp", 0, _unit(name, table.num_embeddings, chunks, whole=False))}
    is_norm = [*layer.parameters()] and not layer._modules and not layer._buffers
    if isinstance(style, Sequence) and not isinstance(layer, nn.Dropout) and not is_norm:
        raise ValueError(
            f"{name}: expected a norm or nn.Dropout for Sequence(), got {type(layer).__name__}: a norm has "
            "weights, but neither buffers nor modules"
        )
    return {}


def _unit(name: str, features: int, count: int, *, whole: bool = True) -> int:
    """Features, or rows, of each of ``count`` units; unless ``whole`` the last may have fewer.

    Kernels round the ends of rows differently from full vectors, so each unit begins with a full vector.
    """
    unit = -(-features // (count * ALIGN_ELEMENTS)) * ALIGN_ELEMENTS
    if unit * (count - 1) >= features or (whole and unit * count != features):
        raise ValueError(
            f"{name}: {features} in {count} chunks of {features / count:g}: expected a multiple of "
            f"{ALIGN_ELEMENTS} in each; pass fewer chunks, or make a layer of {unit * count}"
        )
    return unit


def _of_kind(name: str, layer: nn.Module, style: Style, kind: type[M]) -> M:
    if type(layer) is not kind:
        raise ValueError(
            f"{name}: expected nn.{kind.__name__} for {type(style).__name__}(), got {type(layer).__name__}"
        )
    return layer


def _apply(
    module: nn.Module, name: str, style: Style, ranks: TensorRanks, chunks: int, *, is_sequence: bool
) -> None:
    layer: Any = module.get_submodule(name)
    made: TensorLayer
    if isinstance(layer, TensorLayer):  # in a module that has two names
        return
    if isinstance(style, str):
        if is_sequence and style == scatter:
            layer.register_forward_hook(Hook(partial(_scatter, ranks, chunks)))
        elif is_sequence:
            layer.register_forward_pre_hook(Hook(partial(_gather, ranks)))
        return
    if isinstance(style, Column):
        cut = ranks.boxes.cut_of(layer.weight)
        assert cut is not None
        made = ColumnLinear(
            layer,
            ranks,
            chunks,
            cut.unit,
            parts=style.parts,
            gathers_output=style.gathers_output,
            is_sequence=is_sequence,
        )
    elif isinstance(style, Row):
        cut = ranks.boxes.cut_of(layer.weight)
        assert cut is not None
        made = RowLinear(layer, ranks, chunks, cut.unit, is_sequence=is_sequence)
    elif isinstance(style, Vocabulary):
        made = VocabularyEmbedding(layer, ranks, chunks)
    elif isinstance(layer, nn.Dropout):
        made = SequenceDropout(layer, ranks, chunks, is_sequence=is_sequence)
    else:
        made = SequenceNorm(layer, ranks, chunks, is_sequence=is_sequence)
    parent, _, key = name.rpartition(".")
    made.train(layer.training)
    made.options = layer.extra_repr()
    module.get_submodule(parent)._modules[key] = made


def _scatter(ranks: TensorRanks, chunks: int, _: nn.Module, __: Any, y: Tensor) -> Any:
    if y.dim() < 3 or y.shape[1] % chunks:
        raise ValueError(
            f"expected (B, T, D) with T a multiple of chunks({chunks}), got {tuple(y.shape)}: ranks have "
            "slices of the sequence; pad the sequence, or shard without sequence=True"
        )
    ranks.slices.add((ranks.size, y.shape[1] // ranks.size))
    return ToSlices.apply(y, ranks)


def _gather(ranks: TensorRanks, _: nn.Module, args: tuple[Tensor, ...]) -> Any:
    x, *others = args
    return (FromSlices.apply(x, ranks), *others)
