"""The parameters that a model had when it was wrapped; whoever came later has no hook and no bucket.

A layer that is added or replaced after wrapping, a parameter that is unfrozen, a checkpoint that is loaded
with ``assign=True``: all train on, each rank with its own gradient, and nothing in ``backward`` could tell.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy


class Roster:
    """At construction: who is there. ``check`` compares, in about half a microsecond per submodule."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = list(module.named_parameters())
        for name, parameter in named:
            if is_lazy(parameter):
                raise ValueError(f"parameter {name!r} has no shape yet: run one forward, then wrap")
        self.trainable = [(name, p) for name, p in named if p.requires_grad]
        self.frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._take()

    def check(self) -> None:
        """Raise ``ValueError`` if a parameter that was not there, or was frozen, would be trained now."""
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when the model was wrapped and is not now; its gradient "
                    "would stay on this rank: unfreeze first, then wrap"
                )
        if all(_ids(module) == ids for module, ids in self._modules):
            return
        known = {id(p) for _, p in [*self.trainable, *self.frozen]}
        new = [(name, p) for name, p in self.module.named_parameters() if id(p) not in known]
        for name, parameter in new:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was not there when the model was wrapped; its gradient would stay "
                    "on this rank: add or replace parameters first, then wrap (a state dict loaded with "
                    "assign=True replaces them; torch.func.functional_call does for its call, so call "
                    "submodules with it, not what is wrapped)"
                )
        self.frozen += new
        self._take()

    def _take(self) -> None:
        # The modules are kept, so that no new one can have the id of an old one.
        self._modules = [(module, _ids(module)) for module in self.module.modules()]


def require_read_only(module: nn.Module) -> None:
    """Raise ``ValueError`` if a module in ``module`` changes its own weights in forward.

    The change would be each rank's own: replicas drift apart, and where weights are gathered it is lost.
    """
    for name, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={m.max_norm}, which rescales rows of its weight in forward, on each "
                "rank those of its own inputs: make it with max_norm=None, and bound the norm of what it "
                "returns, or of the weights with an optimizer's weight_decay"
            )


def _ids(module: nn.Module) -> tuple[list[int], list[int]]:
    return list(map(id, module._parameters.values())), list(map(id, module._modules.values()))
