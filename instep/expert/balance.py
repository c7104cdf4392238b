"""Experts with equal loads: an auxiliary loss, a bias on the router's choice, and the figures of both.

An expert that few tokens choose is trained on few tokens and is chosen still less, and all ranks along ep
wait for the rank whose experts have most tokens. Two remedies, alone or together:

    auxiliary loss       a term of the loss, smallest where all experts have equal loads. Its gradient
                         competes with the gradient of the model's own loss
    loss-free balancing  a bias per expert, added to scores for the choice alone: after a step it rises by
                         ``rate`` if the expert's load was below the mean, else it falls. No gradient

Loads are integers, summed over the micro-batches of a step and the data-parallel ranks: the sum is exact, and
the same for every placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from instep.events import EXPERT_DISPATCH
from instep.expert.moe import MoE
from instep.mesh.join import ranks_meant
from instep.mesh.mesh import Mesh


def aux_loss(module: nn.Module) -> Tensor:
    """The sum of the auxiliary losses of all ``MoE`` layers of ``module`` in the last forward.

    Of a layer: num_experts * sum over experts of (share of the choices) * (mean probability), equation 4 of
    W. Fedus et al., "Switch Transformers", arXiv 2101.03961, without its factor alpha; 1 where loads are
    equal. Add the sum to the loss of each micro-batch, times a coefficient such as 0.01.

    Args:
        module: holds the layers.

    Returns:
        A scalar with a graph.

    Raises:
        ValueError: there is no ``MoE``; or a layer has had no forward in training mode since the last call,
            or its forward recorded no graph.

    Example:
        >>> layer = instep.expert.MoE(16, 64, num_experts=4)
        >>> loss = layer(torch.randn(8, 16)).pow(2).mean() + 0.01 * instep.expert.aux_loss(layer)
    """
    losses = []
    for name, layer in _layers(module):
        loss, layer.aux_loss = layer.aux_loss, None
        if loss is None:
            raise ValueError(
                f"aux_loss: {name!r} has computed nothing in training mode since the last call: call it once "
                "after each forward; in a pipeline, whose layers are on several ranks, use "
                "instep.expert.balanced instead"
            )
        if torch.is_grad_enabled() and layer.router.weight.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"aux_loss: the forward of {name!r} recorded no graph, so this loss would have no gradient: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        losses.append(loss)
    if not losses:
        raise ValueError(
            f"expected an instep.expert.MoE in the module, got a {type(module).__name__} without"
        )
    return torch.stack(losses).sum()


@dataclass
class StepLoads:
    """How many tokens chose each expert in one step, over all micro-batches.

    Attributes:
        by_layer: by the layer's name, (num_experts,) int64; empty until the step's block has ended.

    Example:
        >>> layer = instep.expert.MoE(16, 64, num_experts=4)
        >>> with instep.expert.balanced(layer, rate=0) as loads:
        ...     output = layer(torch.randn(8, 16))
        >>> loads.figures()["expert_load_max"] >= 1, "tokens per expert" in str(loads)
        (True, True)
    """

    by_layer: dict[str, Tensor] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """For ``step.log``: the smallest and the largest load of any layer's experts, divided by the mean."""
        if not self.by_layer:
            return {}
        every = torch.cat([load / load.double().mean() for load in self.by_layer.values()])
        return {"expert_load_min": every.min().item(), "expert_load_max": every.max().item()}

    def __str__(self) -> str:
        """A line per layer: smallest, mean and largest load, and the expert that has the largest."""
        return "\n".join(
            f"{name}: {int(load.min())} to {int(load.max())} tokens per expert, "
            f"{load.double().mean():.1f} on average, most for expert {int(load.argmax())}"
            for name, load in self.by_layer.items()
        )


@contextmanager
def balanced(module: nn.Module, mesh: Mesh | None = None, *, rate: float = 0.001) -> Iterator[StepLoads]:
    """Around the micro-batches of a step: count loads, and at the end move the biases of all ``MoE`` layers.

    bias += rate * sign(mean load - load), as in L. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy
    for Mixture-of-Experts", arXiv 2408.15664, algorithm 1. If the block raises, biases stay. Collective: an
    all-gather of 8 bytes per expert and layer.

    Args:
        module: holds the layers.
        mesh: its ranks compute the step, also as a pipeline; by default the registered mesh.
        rate: of the bias per step; 0 only counts.

    Yields:
        The loads of the step, when the block has ended; none if there is no ``MoE`` in ``module``.

    Raises:
        ValueError: this process joined other ranks without a mesh.
        PeerLost: a rank is missing.

    Example:
        >>> layer = instep.expert.MoE(16, 64, num_experts=4)
        >>> with instep.expert.balanced(layer) as loads:
        ...     output = layer(torch.randn(8, 16))
        >>> int(loads.by_layer[""].sum())
        16
    """
    layers, loads, ranks = _layers(module), StepLoads(), ranks_meant(mesh)
    if ranks is not None and not isinstance(ranks, Mesh):
        raise ValueError("balanced: this process joined its group without a mesh: call instep.init() first")
    for _, layer in layers:
        layer.loads = torch.zeros(layer.num_experts, dtype=torch.int64, device="cpu")
    try:
        yield loads
        counted = [layer.loads for _, layer in layers if layer.loads is not None]
    finally:
        for _, layer in layers:
            layer.loads = None
    if not layers:
        return
    sums = _over_ranks(torch.cat(counted), ranks)
    sizes = [layer.num_experts for _, layer in layers]
    for (name, layer), load in zip(layers, sums.split(sizes), strict=True):
        if load.any():
            loads.by_layer[name] = load
        direction = (load.sum() - load * layer.num_experts).sign()  # exact: mean - load, times the experts
        if rate:
            layer.balance_bias.add_(direction.to(layer.balance_bias), alpha=rate)


def _over_ranks(counts: Tensor, mesh: Mesh | None) -> Tensor:
    """The sums over all micro-batches and stages. Of ranks that share a micro-batch, one counts."""
    if mesh is None:
        return counts
    own = counts if mesh.model.rank == 0 else torch.zeros_like(counts)
    every = own.new_empty(mesh.world.size, len(own))
    with mesh.recorder.span(EXPERT_DISPATCH, lane="host"):
        mesh.world.group.all_gather(every.view(-1), own, "the exchange of expert loads")
    return every.sum(0)


def _layers(module: nn.Module) -> list[tuple[str, MoE]]:
    return [(name, m) for name, m in module.named_modules() if isinstance(m, MoE)]
