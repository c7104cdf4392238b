"""A replica of a module: another tree of modules over the same weights, with gradients of its own.

Gradients reach it in two ways. What its forward computes with are aliases of the parameters, other leaves of
autograd over the same memory, and each has a ``.grad``. But a forward can come to the module's own parameters
past its replica: by ``layer.compile()`` or a bound method, which keep the layer they were made of, by a
closure, by a weight in a plain list.

    replica's graph   alias ------.                         .--> alias.grad
                                   loss --- backward -------|
    past it           parameter --'         of this thread  '--> hook on the parameter --> alias.grad

In a declared step those gradients are handed to the replica whose backward has made them. In a batch that is
split they accumulate in ``.grad`` by themselves, which is the same sum, in the order in which threads come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from instep.replicate.thread_pool import keep_for_thread


class Replica:
    """``module`` with the weights of ``original``; ``parameters[i]`` aliases its i-th trainable parameter.

    Buffers are ``original``'s own if ``owns_buffers``, else copies, and what forward writes into those is
    gone with the replica.
    """

    def __init__(self, original: nn.Module, *, owns_buffers: bool) -> None:
        aliases: dict[int, nn.Parameter] = {}
        copies: dict[int, Tensor] = {}
        self.parameters: list[nn.Parameter] = []
        self.micro_batch: int | None = None  # whose gradients it receives
        for parameter in original.parameters():
            alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            aliases[id(parameter)] = alias
            if parameter.requires_grad:
                self.parameters.append(alias)
        if not owns_buffers:
            copies = {id(buffer): buffer.detach().clone() for buffer in original.buffers()}
        self.modules = {id(m): m._replicate_for_data_parallel() for m in original.modules()}
        for module in original.modules():
            replica = self.modules[id(module)]
            for name, child in module._modules.items():
                replica._modules[name] = None if child is None else self.modules[id(child)]
            for name, own in module._parameters.items():
                if own is None:
                    replica._parameters[name] = None
                else:
                    setattr(replica, name, aliases[id(own)])  # recurrent layers keep a list besides
            for name, buffer in module._buffers.items():
                replica._buffers[name] = None if buffer is None else copies.get(id(buffer), buffer)
        self.module = self.modules[id(original)]

    @contextmanager
    def receives(self, micro_batch: int) -> Iterator[None]:
        """Inside, ``handed_to_replicas`` hands over to this one what backwards of this thread bring."""
        self.micro_batch = micro_batch
        # Not a threading.local, which the engine's own threads (backward on a GPU) would not see.
        keep_for_thread(_RECEIVER, self)
        try:
            yield
        finally:
            keep_for_thread(_RECEIVER, None)

    def changed_buffer(self, original: nn.Module) -> str | None:
        """The name of a buffer that forward has changed in this replica, or None."""
        for prefix, module in original.named_modules():
            replica = self.modules[id(module)]
            for name, buffer in module._buffers.items():
                mine = replica._buffers[name]
                if (buffer is None) != (mine is None) or (
                    buffer is not None and mine is not None and not torch.equal(buffer, mine)
                ):
                    return f"{prefix}.{name}".lstrip(".")
        return None


_RECEIVER = "instep replica"  # what torch keeps for each thread under this name: a Replica, or None


@contextmanager
def handed_to_replicas(parameters: Sequence[Tensor], strays: set[int]) -> Iterator[None]:
    """Inside, a gradient that comes to one of ``parameters`` goes to its alias in the replica that
    ``receives`` in the thread of that backward, where the sum tree finds it in its micro-batch.

    ``strays`` receives the positions of those for which there was none. What autograd accumulates besides is
    dropped: it is the sum of all threads, in the order of timing.
    """
    hooks = [x.register_hook(partial(_hand_over, i, strays)) for i, x in enumerate(parameters)]
    try:
        yield
    finally:
        for hook, parameter in zip(hooks, parameters, strict=True):
            hook.remove()
            parameter.grad = None


def received_micro_batch() -> int | None:
    """The micro-batch whose gradients a replica receives in this thread; None where none does."""
    replica = _receiver()
    return None if replica is None else replica.micro_batch


def _receiver() -> Replica | None:
    return torch._C._get_obj_in_tls(_RECEIVER) if torch._C._is_key_in_tls(_RECEIVER) else None


def _hand_over(i: int, strays: set[int], gradient: Tensor) -> None:
    replica = _receiver()
    if replica is None:
        strays.add(i)
        return
    alias, gradient = replica.parameters[i], gradient.detach()
    # A copy, because autograd may give the same tensor to others and adds to a .grad in place.
    alias.grad = gradient.clone() if alias.grad is None else alias.grad + gradient
