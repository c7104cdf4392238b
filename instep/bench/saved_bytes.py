"""Autograd's saved tensors, counted as they are saved: the memory of activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class SavedBytes:
    """The bytes of the storages that graphs made within ``watch`` keep, but for those of ``known`` tensors.

    ``nbytes`` is that of now, ``peak`` the most there was.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.nbytes = self.peak = 0
        self._known = {x.untyped_storage().data_ptr() for x in known}
        self._users: Counter[int] = Counter()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what the forward in here keeps; backward may follow."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: _Kept(x.detach(), self), lambda kept: kept.tensor
        ):
            yield

    def keeps(self, x: Tensor) -> bool:
        """Whether the memory of ``x`` is among what is kept now."""
        return self._users[x.untyped_storage().data_ptr()] > 0

    def add(self, storage: torch.UntypedStorage, users: int) -> None:
        """So many more users of ``storage``, or fewer."""
        key = storage.data_ptr()
        if key not in self._known:
            before = self._users[key]
            self._users[key] += users
            self.nbytes += storage.nbytes() * ((before + users > 0) - (before > 0))
            self.peak = max(self.peak, self.nbytes)


class _Kept:
    """A tensor in a graph, for as long as the graph has it."""

    def __init__(self, tensor: Tensor, saved: SavedBytes) -> None:
        self.tensor, self._saved = tensor, saved
        saved.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._saved.add(self.tensor.untyped_storage(), -1)


def saved_beside(module: nn.Module, inputs: Iterable[Tensor] = ()) -> SavedBytes:
    """For what is computed with ``module``: parameters, buffers and ``inputs`` are there anyway."""
    return SavedBytes([*module.parameters(), *module.buffers(), *inputs])
