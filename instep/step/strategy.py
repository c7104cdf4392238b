"""What the reducer asks of a strategy: which gradients travel together, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from instep.ordered.buckets import Bucket, Caps
from instep.work import Work


class Strategy(Protocol):
    """In a step: ``begin``, ``ready`` for each whole bucket during backward, ``finish`` after it.

    ``overlaps``: buckets are told of as soon as they are whole, not only when backward has ended.
    """

    overlaps: bool

    def __init__(self, launch: Callable[[Bucket], Work]) -> None: ...

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]: ...

    def begin(self, buckets: Sequence[Bucket]) -> None: ...

    def ready(self, bucket: Bucket) -> None: ...

    def finish(self) -> None: ...
