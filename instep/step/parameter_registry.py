"""Which parameters a model had when it was wrapped, and whether it still has these and no others.

A layer that is added or replaced after wrapping, a checkpoint that is loaded with ``assign=True``, a
parameter that is unfrozen: each has no hook and no bucket, and its gradient would stay on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from instep.state.alignment import align


class ParameterRegistry:
    """The parameters that a model had when it was wrapped; one that came later has no hook and no bucket.

    At construction they are written down. ``check`` compares, in about half a microsecond per submodule.
    ``named_modules`` are those of the model, as of the last ``check``.
    """

    def __init__(self, module: nn.Module, *, but: Iterable[Tensor] = ()) -> None:
        self.module = module
        self._others = set(map(id, but))  # left to others
        self._stands_for: dict[int, nn.Parameter] = {}
        named = [(name, p) for name, p in module.named_parameters() if id(p) not in self._others]
        for name, parameter in named:
            if is_lazy(parameter):
                raise ValueError(f"parameter {name!r} has no shape yet: run one forward, then wrap")
        self.trainable = [(name, p) for name, p in named if p.requires_grad]
        self.frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._remember()

    def stand_for(self, whole: nn.Parameter, parameter: nn.Parameter) -> None:
        """``whole`` is in the place of ``parameter`` while a module computes."""
        self._stands_for[id(whole)] = parameter

    def stand_down(self) -> None:
        """Every parameter is in its own place again."""
        self._stands_for.clear()

    def as_wrapped(self) -> AbstractContextManager[None]:
        """Inside, what required gradients when the model was wrapped does, and no other that was there."""
        return requiring([p for _, p in self.trainable], [p for _, p in self.frozen])

    def check(self, *, in_forward: bool = False) -> None:
        """Raise ``ValueError`` if a parameter that was not there, or was frozen, would be trained now.

        Only the latter ``in_forward``, where ``torch.func.functional_call`` may show others for the one call.
        """
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when the model was wrapped and is not now; its gradient "
                    "would stay on this rank: unfreeze first, then wrap"
                )
        now = self._owned()
        if len(now) == len(self._remembered) and all(map(is_, now, self._remembered)):
            return
        known = {id(p) for _, p in [*self.trainable, *self.frozen]} | self._others | {*self._stands_for}
        new = [(name, p) for name, p in self.module.named_parameters() if id(p) not in known]
        if in_forward:
            align(p for _, p in new if isinstance(p, nn.Parameter) and not p.requires_grad)
            return
        for name, parameter in new:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was not there when the model was wrapped; its gradient would stay "
                    "on this rank: add or replace parameters first, then wrap (a state dict loaded with "
                    "assign=True replaces them)"
                )
        align(p for _, p in new)
        self.frozen += new
        self._remember()

    def _remember(self) -> None:
        self.named_modules = list(self.module.named_modules())
        self._remembered = self._owned()

    def _owned(self) -> list[nn.Parameter | nn.Module | None]:
        """All parameters and modules, in the order of their owners."""
        owned: list[nn.Parameter | nn.Module | None] = []
        for _, module in self.named_modules:
            if parameters := module._parameters:
                owned += parameters.values()
            if modules := module._modules:
                owned += modules.values()
        if stands_for := self._stands_for:
            owned = [stands_for.get(id(x), x) for x in owned]
        return owned


@contextmanager
def requiring(trained: Sequence[Tensor], frozen: Sequence[Tensor]) -> Iterator[None]:
    """Inside, ``trained`` require gradients and ``frozen`` do not.

    For ranks that make a wrapper's or an optimizer's memory anew together, one of which may have lost another
    in the middle of a step that freezes some for a while.
    """
    wanted = [(p, True) for p in trained] + [(p, False) for p in frozen]
    before = [(p, p.requires_grad) for p, _ in wanted]
    try:
        for p, on in wanted:
            p.requires_grad_(on)
        yield
    finally:
        for p, on in before:
            p.requires_grad_(on)


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
