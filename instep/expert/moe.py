"""The mixture-of-experts layer, and its experts over the ranks along ep.

    tokens (N, D)
       |  router          one score per expert: softmax; the K highest are chosen before any expert computes
       |  to_rows         the tokens of each expert, in blocks
       |  experts         down(activation(up(rows))) * gate, block by block
       |  from_rows       the K results of a token, added in the order of its slots
    tokens (N, D)

The ranks along ep compute the same micro-batches, and each has E / R of the experts. So a micro-batch's
gradient is complete when its backward ends, and enters the sum tree like any other. Each rank saves memory
(weights, gradients, moments and activations of the other ranks' experts) and their compute. The rest of the
model, attention included, is computed by every rank along ep.

Sources: N. Shazeer et al., "Outrageously Large Neural Networks", arXiv 1701.06538, section 2; W. Fedus et
al., "Switch Transformers", arXiv 2101.03961, section 2. Experts have no biases, as in Mixtral (arXiv
2401.04088).

Letters: N tokens of a micro-batch, D width, F width inside an expert, K experts per token, E experts, R ranks
along ep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from instep.expert.dispatch import from_rows, to_rows
from instep.expert.routes import capacity_of, choose, make_routes
from instep.hook import Hook
from instep.memory import align_bytes
from instep.mesh.mesh import Mesh
from instep.state import boxes
from instep.state.homes import homes
from instep.step.agreement import agree_on_structure, broadcast_values

M = TypeVar("M", bound=nn.Module)
MULTIPLE = 32  # of rows in a block: each begins on an aligned address, whatever the width


class MoE(nn.Module):
    """Each token of (..., width) goes through ``top_k`` of ``num_experts`` feed-forward networks.

    The output has the same bits on any number of ranks along ``ep`` (``instep.expert.shard``); ``block`` is
    part of the numerical configuration.

    Args:
        width: length of the vector of a token.
        ff_width: width inside an expert.
        num_experts: how many experts there are.
        top_k: experts per token.
        capacity_factor: an expert computes at most ``tokens * top_k / num_experts * capacity_factor`` tokens
            of a micro-batch, the first ones. A dropped token gets zero from this expert. None: no limit.
        block: rows of one matrix product, a multiple of 32. On average half a block per expert is padding.
        activation: between the two products, element by element.
        normalise: divide the gates of a token by their sum. By default where ``top_k`` is above 1.
        dropout: share of the outputs that is zeroed in training.

    Attributes:
        load: (num_experts,) int64, how many tokens of the last micro-batch chose each expert.
        balance_bias: (num_experts,) buffer, added to scores for the choice alone: ``instep.expert.balanced``.

    Raises:
        ValueError: more experts per token than experts, or another number that cannot be.

    Example:
        >>> layer = instep.expert.MoE(16, 64, num_experts=4)
        >>> layer(torch.randn(2, 5, 16)).shape, int(layer.load.sum())
        (torch.Size([2, 5, 16]), 20)
    """

    balance_bias: Tensor

    def __init__(
        self,
        width: int,
        ff_width: int,
        num_experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float | None = None,
        block: int = 64,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        normalise: bool | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"expected 1 <= top_k <= num_experts, got top_k({top_k}) and num_experts({num_experts})"
            )
        if block < 1 or block % MULTIPLE:
            raise ValueError(f"expected block to be a multiple of {MULTIPLE}, got {block}")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"expected capacity_factor > 0, or None to drop no token, got {capacity_factor}")
        if normalise and top_k == 1:
            raise ValueError(
                "normalise=True with top_k=1: every gate would be 1, and the router would have no gradient"
            )
        self.num_experts, self.top_k, self.block = num_experts, top_k, block
        self.capacity_factor, self.activation = capacity_factor, activation
        self.normalise = top_k > 1 if normalise is None else normalise
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, ff_width, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, ff_width))
        self.dropout = nn.Dropout(dropout)
        is_meta = self.up.is_meta
        self.register_buffer("balance_bias", torch.zeros(num_experts, device="cpu" if is_meta else None))
        self.home: boxes.BoxHome | None = None  # of the experts over ep
        self.load: Tensor | None = None
        self.loads: Tensor | None = None  # of the micro-batches since ``balanced`` began; None outside of it
        self.aux_loss: Tensor | None = None  # of the last forward, until ``instep.expert.aux_loss`` takes it
        if not is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``nn.Linear``: uniform within 1 / sqrt(inputs of the product)."""
        self.router.reset_parameters()
        for weight in (self.up, self.down):
            bound = weight.shape[2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, block={self.block}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has neither a graph nor other ranks."""
        return {**self.__dict__, "aux_loss": None, "loads": None, "home": None}

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        probabilities = self._probabilities(tokens)  # (N, E)
        scores = probabilities.detach() + self.balance_bias.to(x.device)
        chosen = choose(scores, self.top_k)
        gates = probabilities.gather(1, chosen)  # (N, K)
        if self.normalise:
            gates = gates / gates.sum(1, keepdim=True)
        capacity = capacity_of(chosen.numel(), self.num_experts, self.capacity_factor)
        routes = make_routes(chosen, self.num_experts, capacity, self.block, self._mesh())
        self._count(routes.load, probabilities)
        rows = to_rows(tokens, routes, self.top_k)
        row_gates = to_rows(gates.reshape(-1, 1), routes, 1)  # (rows, 1)
        results = from_rows(self._experts(rows, row_gates, routes.blocks), routes, self.top_k)
        return self.dropout(results.view(x.shape))

    def _mesh(self) -> Mesh | None:
        """The present mesh, if other ranks along ep have some of the experts."""
        parts = self.num_experts // len(self.up)
        if self.home is None and parts > 1:
            raise ValueError(
                f"this copy of a layer has {len(self.up)} of its {self.num_experts} experts and cannot reach "
                "the other ranks along ep: copy the model before instep.expert.shard"
            )
        return None if self.home is None or parts == 1 else self.home.mesh

    def _probabilities(self, tokens: Tensor) -> Tensor:
        """In the precision of the router's weight, also under autocast."""
        weight = self.router.weight
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(weight.dtype), weight).softmax(1)

    def _count(self, load: Tensor, probabilities: Tensor) -> None:
        """Source: W. Fedus et al., arXiv 2101.03961, equation 4, without its factor alpha."""
        shares = load.to(probabilities.dtype) / load.sum()
        aux_loss = self.num_experts * (shares * probabilities.mean(0)).sum()
        if torch._C._current_graph_task_id() != -1:  # checkpointing computes forward again
            return
        self.load = load
        if self.training:
            self.aux_loss = aux_loss
            if self.loads is not None:
                self.loads += load.to(self.loads.device)

    def _experts(self, rows: Tensor, gates: Tensor, blocks: list[int]) -> Tensor:
        """The results of all blocks (rows, D), times their gates: each call has the shape of one block."""
        pieces = zip(rows.split(self.block), gates.split(self.block), strict=True)
        results = []
        for up, down, count in zip(self.up.unbind(0), self.down.unbind(0), blocks, strict=True):
            inner, outer = _product_with(up), _product_with(down)
            for _ in range(count):
                inputs, gate = next(pieces)
                result = outer(self.activation(inner(inputs)))
                results.append(result * gate.to(result.dtype))
        return torch.cat(results)


def _product_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of rows with one expert's ``weight``, which is converted for autocast once for all blocks.

    Some kernels choose another path, and so other bits, off an aligned address; that of an expert in its
    stack depends on the ranks along ep.
    """
    if weight.data_ptr() % align_bytes(weight.device):
        weight = weight.clone()
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return lambda rows: F.linear(rows, weight)
    converted = weight.detach().to(torch.get_autocast_dtype(kind))
    return lambda rows: _ConvertedProduct.apply(rows.to(converted.dtype), weight, converted)


class _ConvertedProduct(Function):
    """rows @ converted.T; the gradients of ``weight`` are added over blocks in its own dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, converted: Tensor) -> Tensor:
        ctx.save_for_backward(rows, converted)
        ctx.dtype = weight.dtype
        return F.linear(rows, converted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, converted = ctx.saved_tensors
        return gradient @ converted, (gradient.t() @ rows).to(ctx.dtype), None


def shard(module: M, mesh: Mesh) -> M:
    """Divide the experts of every ``MoE`` in ``module`` over the ranks along ``ep``, in place.

    Rank r of R keeps the r-th part of the experts as ``layer.up`` and ``layer.down``, shape
    (num_experts / R, ...). The rest of ``module`` is replicated. All ranks take rank 0's values first. Wrap
    the module and make optimizers afterwards. Ranks along ep compute the same micro-batches. For equal bits
    call ``shard`` with ep=1, too: the norm of gradients is added expert by expert. Collective over the mesh.

    Args:
        module: holds the ``MoE`` layers, or is one.
        mesh: of ``instep.init(ep=...)``.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: there is no ``MoE`` in it, ``ep`` does not divide a layer's number of experts, or ranks
            have other modules.
        PeerLost: a rank is missing.

    Example:
        >>> mesh = instep.init(ep=1)
        >>> layer = instep.expert.shard(instep.expert.MoE(16, 64, num_experts=4), mesh)
        >>> layer.up.shape
        torch.Size([4, 64, 16])
        >>> mesh.close()
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, MoE)}
    size = mesh.along["ep"].size
    if not layers:
        raise ValueError(
            f"expected a module with an instep.expert.MoE in it, got a {type(module).__name__} without"
        )
    for name, layer in layers.items():
        if layer.num_experts % size:
            raise ValueError(
                f"{name or 'the layer'!r}: num_experts({layer.num_experts}) % ep({size}) = "
                f"{layer.num_experts % size}: choose a number of experts that is a multiple of ep"
            )
    if not homes(module.parameters()):  # else instep.tensor.shard has done it
        agree_on_structure(module, {}, mesh.world.group)
        broadcast_values(module, mesh.world.group)
    cut = boxes.Cut(axis="ep", dim=0, unit=1)
    names = [f"{name}.{key}".lstrip(".") for name in layers for key in ("up", "down")]
    home = boxes.divide(module, mesh, dict.fromkeys(names, cut))
    for layer in layers.values():
        layer.home = home
        layer.register_state_dict_post_hook(Hook(boxes.refuse_parts))
    return module
