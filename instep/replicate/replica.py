"""A replica for a thread: the module's weights, gradients of its own, and no random numbers.

Two threads cannot share one module's ``.grad``: who accumulates first would depend on timing. So each has a
shallow copy of the module tree, in which every parameter is an alias, another leaf over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from instep.mesh.device import generators


class Replica:
    """``module`` with the weights of ``original``; ``parameters[i]`` aliases its i-th trainable parameter.

    Buffers are ``original``'s own if ``owns_buffers``, else copies, and what forward writes into those is
    gone with the replica.
    """

    def __init__(self, original: nn.Module, *, owns_buffers: bool) -> None:
        aliases: dict[int, nn.Parameter] = {}
        copies: dict[int, Tensor] = {}
        self.parameters: list[nn.Parameter] = []
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


WAYS_OUT = "set its dropout to 0, call eval(), or use processes (instep.DataParallel)"


@contextmanager
def without_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise ``ValueError`` if ``module`` will drop out, or if the block has drawn random numbers.

    torch's default generator is one for all threads: who draws first would depend on timing.
    """
    for name, part in module.named_modules():
        if part.training and _drops(part):
            raise ValueError(
                f"{name or 'the module'!r} is {type(part).__name__} with dropout in training mode, and "
                f"threads share torch's random generator: {WAYS_OUT}"
            )
    before = [generator.get_state() for generator in generators(device)]
    yield
    after = [generator.get_state() for generator in generators(device)]
    if not all(map(torch.equal, before, after)):
        raise ValueError(
            "forward drew from torch's random generator, which threads share, so the numbers would depend on "
            f"timing: {WAYS_OUT}, or draw from a torch.Generator that each call makes for itself"
        )


def _drops(module: nn.Module) -> bool:
    """Whether a layer of torch drops out."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
