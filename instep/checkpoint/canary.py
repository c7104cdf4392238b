"""The canary: one fixed forward and backward whose gradient every rank must reproduce before it takes part.

Versions and flags say what ought to compute alike; the canary computes. It runs the model's own layers, on
tensors of training's shapes, so on the same kernels, but on a copy of the model, with weights that depend on
nothing but their names: a rank that joins at step 1000 gives the hash that the run gave at its start.

So values are never lost, as they can be made again, and a model that fits into no memory can be asked too
(``ParametersOnDemand``): its weights are made where they are used.

    forward     | fill unit 1, compute, drop it | fill unit 2, compute, drop it | ...
    backward    ... | fill a weight, use it, drop it; hash its gradient, drop that |

Each is made twice, which is what it costs. What backward needs of a weight is noted, not kept.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from instep.errors import ContractBroken
from instep.net.device import generators
from instep.net.process_group import Group
from instep.rng.generators import seed_generator, state_of
from instep.rng.keys import derive
from instep.shard.partition import UnitMembers, partition
from instep.state.hash import Described, described, state_digests

LossOf = Callable[[nn.Module], Tensor]
"""The loss of a model on one micro-batch, which is the same at each call."""
OPERATION = "the comparison of canaries"
DIGITS = 16  # of a hash, in a message


def canary(module: nn.Module, loss_of: LossOf, *, seed: int, device: torch.device) -> str:
    """Hex SHA-256 of the loss and the gradients that ``loss_of`` has on a copy of ``module``.

    The copy's weights, its buffers and what is drawn in forward depend on ``seed`` and names alone; it is in
    training or evaluation mode as ``module`` is. Nothing of ``module`` changes, nor do the random generators,
    and hooks of a wrapper do not run. Takes a forward, a backward, and the memory of a second model with
    gradients, until it returns; of a ``module`` on the meta device, that of one unit.
    """
    model = copy.deepcopy(module)
    _fill_buffers(model)
    with _drawing(seed, device), torch.enable_grad():
        if any(p.is_meta for p in model.parameters()):
            loss, gradients = ParametersOnDemand(model, partial(_fill, seed), device).gradients(loss_of)
        else:
            loss, gradients = _gradients(model, loss_of, seed)
    return state_digests([described("loss", loss), *gradients], 0)[0]


def agree_on_canary(group: Group, digest: str, recorded: str | None = None) -> None:
    """Raise ``ContractBroken``, on all ranks alike, unless all have the same ``digest``. Collective.

    With ``recorded``, the digest that the run has had so far, it has to be that one. Otherwise the majority
    is right; where there is none, all are named.
    """
    everyone = [data.decode(errors="replace") for data in group.all_gather_bytes(digest.encode(), OPERATION)]
    agreed, votes = Counter(everyone).most_common(1)[0]
    right = recorded or (agreed if 2 * votes > group.size else None)
    odd = [rank for rank, its in zip(group.ranks, everyone, strict=True) if its != right]
    if not odd:
        return
    digests = ", ".join(
        f"rank {rank} {its[:DIGITS]}" for rank, its in zip(group.ranks, everyone, strict=True)
    )
    raise ContractBroken(
        f"{_verdict(odd, right, recorded)}: {digests}. The gradient of one fixed micro-batch must have the "
        "same bits on every rank and at every start: look for another kind of processor, library build or "
        "number of threads, an environment variable that chooses kernels, or faulty hardware"
    )


def _verdict(odd: Sequence[int], right: str | None, recorded: str | None) -> str:
    names = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    if recorded:
        return f"{names} would compute other bits than this run, whose canary is {recorded[:DIGITS]}"
    if right is None:
        return f"{names} compute other bits than each other, and no majority says which is right"
    return f"{names} would compute other bits than the majority, whose canary is {right[:DIGITS]}"


def _gradients(model: nn.Module, loss_of: LossOf, seed: int) -> tuple[Tensor, list[Described]]:
    """As ``ParametersOnDemand.gradients``, with the whole model in memory."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            _fill(seed, name, p)
    loss = loss_of(model)
    loss.backward()
    came = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return loss, [described(name, _dense(x)) for name, x in came]


def _fill(seed: int, name: str, p: Tensor) -> None:
    """Values from the name alone.

    Matrices keep the size of what passes through them, and vectors are near one, so that neither numbers nor
    gradients vanish or overflow.
    """
    generator = torch.Generator()
    seed_generator(generator, derive(seed, "canary", name))
    kind = p.dtype if p.is_complex() else torch.float32
    drawn = torch.randn(p.shape, generator=generator, dtype=kind, device="cpu")
    p.copy_(drawn.mul_(max(p.shape[1:].numel(), 1) ** -0.5) if p.ndim > 1 else drawn.mul_(0.1).add_(1))


@torch.no_grad()
def _fill_buffers(model: nn.Module) -> None:
    """Those that training changes; others, which a state dict does not carry, are constants, and stay."""
    kept = model.state_dict(keep_vars=True)
    for name, b in model.named_buffers():
        if name in kept:
            b.fill_(b.is_floating_point())


@contextmanager
def _drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the default generators draw from ``seed``; then they go on where they were."""
    used = generators(device)
    before = [state_of(generator) for generator in used]
    try:
        for generator in used:
            seed_generator(generator, derive(seed, "canary"))
        yield
    finally:
        for generator, state in zip(used, before, strict=True):
            generator.set_state(state)


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x


Fill = Callable[[str, Tensor], None]


class _Place(NamedTuple):
    """Where in a parameter a saved tensor lies."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class ParametersOnDemand:
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

    def _show(self, unit: UnitMembers, module: nn.Module, args: Any) -> None:
        for name in unit.names:
            whole = self._whole(name)
            self._parameters[name].data = whole
            self._shown[whole.untyped_storage()._cdata] = name

    def _hide(self, unit: UnitMembers, module: nn.Module, args: Any, output: Any) -> None:
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
