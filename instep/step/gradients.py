"""``.grad`` on its way into a bucket and out of it.

Autograd accumulates into ``.grad``, so that is where a leaf comes from and where the reduced gradient goes.
In between it is a view of the bucket wherever it can be, which saves the memory of a second copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from instep.reduce.buckets import Bucket, Bundle, wire_dtype

NO_OTHER_USER = 2  # references to an object: one variable, and the argument of the call that counts
LARGE_BYTES = 1 << 16  # smaller gradients are quicker copied many in a call


class Gradients:
    """The ``.grad`` of all ``parameters``.

    In a leaf: the reduction notes in ``came`` the ``.grad`` that autograd has left, and its version (None
    where hooks may still edit it); ``land`` when a bucket is whole. After the exchange: ``attach``.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = names
        self.parameters = parameters
        self.is_large = [parameter.nbytes >= LARGE_BYTES for parameter in parameters]
        self.came: dict[int, tuple[Tensor, int] | None] = {}  # of the open leaf, by parameter
        self._settled: dict[int, Tensor] = {}  # .grad that lies in the bucket of the open leaf, for as long

    def settle(self, i: int, view: Tensor, *, final: bool) -> None:
        """The ``.grad`` of parameter i has come, and moves into ``view`` of its bucket's leaf, if it may.

        ``land`` would do it, later. Now it is in the cache, and its memory serves for the next gradient. Many
        that are freed at once go back to the system, which has to find and zero every page of the next ones.
        A GPU's allocator keeps memory, and many copies are one call there, as those of gradients are that are
        not ``is_large``. Code that keeps a ``.grad`` that is not ``final`` keeps the one in the bucket.
        """
        gradient = self.parameters[i].grad
        if gradient is None or gradient.requires_grad or not gradient.is_cpu:
            return
        if not _look_alike(gradient, view) or _share(gradient, view):
            return
        view.copy_(gradient)
        if final:
            self.parameters[i].grad = self._settled[i] = view.data
        else:
            gradient.data = view

    def land(self, bucket: Bundle, leaf: Tensor, *, adds: bool = False) -> None:
        """Copy the gradients of ``bucket`` into ``leaf``, in one call; -0.0 where there is none. Or, if
        ``adds``, add them to what is there.

        Raises:
            ValueError: a gradient is not what autograd has left, or not of the dtype it had before.
        """
        views, gradients = [], []
        begin, end = leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes
        for slot, view in zip(bucket.slots, bucket.views(leaf), strict=True):
            i = slot.position
            gradient = self.parameters[i].grad
            if gradient is None:
                if i in self.came:
                    raise ValueError(
                        f"the gradient of {self.names[i]!r} was taken away between backward and its "
                        "exchange: call zero_grad() outside of micro_batches(), and let no hook set .grad to "
                        "None"
                    )
                if not adds:
                    _real(view).fill_(-0.0)
                continue
            slot.present = True
            came = self.came.pop(i, None)
            if came is not None and (gradient is not came[0] or gradient._version != came[1]):
                raise ValueError(
                    f"the gradient of {self.names[i]!r} was changed between backward and its exchange: clip "
                    "and edit gradients when they are whole, after micro_batches(), or in a hook of the "
                    "parameter"
                )
            is_wide = gradient.dtype is bucket.dtype or wire_dtype(gradient.dtype) is bucket.dtype
            if not is_wide or gradient.device != bucket.device:
                raise ValueError(
                    f"parameter {self.names[i]!r}: expected a gradient whose sum is in {bucket.dtype} on "
                    f"{bucket.device}, as when the model was wrapped, got {gradient.dtype} on "
                    f"{gradient.device}: convert the module before it is wrapped"
                )
            if gradient.requires_grad:
                gradient = gradient.detach()
            if begin <= gradient.data_ptr() < end:
                if not adds and gradient.data_ptr() == view.data_ptr() and _look_alike(gradient, view):
                    continue
                gradient = gradient.clone()  # from memory that is written to
            views.append(view)
            gradients.append(gradient)
        if views and adds:  # not as complex numbers, whose sum torch multiplies by one
            torch._foreach_add_([_real(view) for view in views], [_real(gradient) for gradient in gradients])
        elif views:
            torch._foreach_copy_(views, gradients)

    def take(self, bucket: Bundle) -> None:
        """The gradients are in the bucket alone from now on; code that has kept a ``.grad`` has a copy."""
        self._remove([slot.position for slot in bucket.slots])

    def attach(self, bucket: Bucket, numbers: Iterable[int], *, whole: bool) -> None:
        """Make ``.grad`` of the slots ``numbers`` a view of the bucket's home.

        Where dtype or layout have to be others it is a copy, if the gradient is ``whole``.
        Optimizers rely on a gradient having the dtype of its parameter; fused ones read parameter and
        gradient in the order of memory, so they need the layout too. A tensor that is ``.grad`` already
        stays ``.grad``, because code that has kept it may rely on that.
        """
        views = bucket.views(bucket.counter.home)
        for k in numbers:
            view, parameter = views[k], self.parameters[bucket.slots[k].position]
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                gradient = None
            if view.dtype != parameter.dtype or view.stride() != parameter.stride():
                if whole:
                    if gradient is None or gradient.stride() != parameter.stride():
                        gradient = parameter.grad = torch.empty_like(parameter.detach())
                    gradient.copy_(view)
            elif gradient is None:
                parameter.grad = view.data  # for users no view: those cannot be detached in place
            elif gradient.data_ptr() != view.data_ptr() or not _look_alike(gradient, view):
                gradient.data = view

    def num_attached(self, bucket: Bucket) -> int:
        """How many are views of the bucket's memory now."""
        home = bucket.home.untyped_storage().data_ptr()
        gradients = [self.parameters[slot.position].grad for slot in bucket.slots]
        return sum(g is not None and g.untyped_storage().data_ptr() == home for g in gradients)

    def drop(self) -> None:
        """No parameter has a gradient any more."""
        self.came.clear()
        self._remove(range(len(self.parameters)))

    def _remove(self, positions: Sequence[int]) -> None:
        for i in positions:
            self.parameters[i].grad = None
        for i in [i for i in positions if i in self._settled] if self._settled else ():
            gradient = self._settled.pop(i)
            if sys.getrefcount(gradient) > NO_OTHER_USER:
                gradient.data = gradient.clone()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _look_alike(x: Tensor, y: Tensor) -> bool:
    return (
        x.dtype == y.dtype
        and x.stride() == y.stride()
        and x.device == y.device
        and x.is_conj() == y.is_conj()
        and x.is_neg() == y.is_neg()
    )


def _share(gradient: Tensor, view: Tensor) -> bool:
    return gradient.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
