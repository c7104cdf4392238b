"""A forward and a backward of a model that never is in memory: weights are made where they are used.

    forward     | fill unit 1, compute, drop it | fill unit 2, compute, drop it | ...
    backward    ... | fill a weight, use it, drop it; hash its gradient, drop that |

The values have to depend on nothing but names: then nothing is lost with them, as they can be made again.
Each is made twice, which is what it costs. What backward needs of a weight is noted, not kept, as in
``shard/saved_weights.py``; there the values come from other ranks, here from nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from instep.ordered.hash import Described, described
from instep.shard.units import Members, partition

Fill = Callable[[str, Tensor], None]


class _Place(NamedTuple):
    """Where in a parameter a saved tensor lies."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class Fleeting:
    """``model``, which is on the meta device, as if it had the values of ``fill(name, tensor)``.

    At construction its parameters become placeholders on ``device``. In the forward of a unit they have
    values and memory of their own; ``gradients`` runs that and a backward. The model is used up then.
    """

    def __init__(self, model: nn.Module, fill: Fill, device: torch.device) -> None:
        self.model, self._fill, self._device = model, fill, device
        dtypes = {p.dtype for p in model.parameters()}
        self._nan = {dtype: torch.full((), torch.nan, dtype=dtype, device=device) for dtype in dtypes}
        self._replace()
        self._parameters = dict(model.named_parameters())
        self._shown: dict[int, str] = {}  # storage -> the parameter that it is of
        self._hashed: dict[str, Described] = {}
        for name, p in self._parameters.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._came, name))
        for unit in partition(model):
            unit.module.register_forward_pre_hook(partial(self._show, unit), prepend=True)
            unit.module.register_forward_hook(partial(self._hide, unit), always_call=True)

    def gradients(self, loss_of: Callable[[nn.Module], Tensor]) -> tuple[Tensor, list[Described]]:
        """The loss, and the gradient of each parameter that has one, hashed, in the order of registration.

        Raises:
            RuntimeError: a parameter has got several gradients, of which the first are gone.
        """
        with saved_tensors_hooks(self._pack, self._unpack):
            loss = loss_of(self.model)
        loss.backward()
        return loss.detach(), [self._hashed[name] for name in self._parameters if name in self._hashed]

    def _replace(self) -> None:
        """Placeholders instead of the parameters, tied ones once."""
        made: dict[int, nn.Parameter] = {}
        for m in self.model.modules():
            for key, p in m._parameters.items():
                if p is not None:
                    nothing = self._nan[p.dtype].expand(p.shape)
                    made.setdefault(id(p), nn.Parameter(nothing, p.requires_grad))
                    m._parameters[key] = made[id(p)]

    def _whole(self, name: str) -> Tensor:
        p = self._parameters[name]
        whole = torch.empty(p.shape, dtype=p.dtype, device=self._device)
        with torch.no_grad():
            self._fill(name, whole)
        return whole

    def _show(self, unit: Members, module: nn.Module, args: Any) -> None:
        for name in unit.names:
            whole = self._whole(name)
            self._parameters[name].data = whole
            self._shown[whole.untyped_storage()._cdata] = name

    def _hide(self, unit: Members, module: nn.Module, args: Any, output: Any) -> None:
        for name in unit.names:
            p = self._parameters[name]
            self._shown.pop(p.untyped_storage()._cdata, None)
            p.data = self._nan[p.dtype].expand(p.shape)

    def _pack(self, x: Tensor) -> Tensor | _Place:
        name = self._shown.get(x.untyped_storage()._cdata)
        if name is None or x.dtype != self._parameters[name].dtype:
            return x
        return _Place(name, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def _unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return self._whole(packed.name).as_strided(packed.shape, packed.strides, packed.offset)

    def _came(self, name: str, p: Tensor) -> None:
        if name in self._hashed:
            raise RuntimeError(f"parameter {name!r} has got a second gradient in one backward")
        assert p.grad is not None
        self._hashed[name] = described(name, p.grad)
        p.grad = None
