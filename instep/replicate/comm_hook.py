"""A communication hook: the user's own reduction of a bucket, in the place of the ordered one.

``register_comm_hook`` takes what torch's DDP takes: ``hook(state, bucket)`` starts what it wants to with
``bucket.buffer()``, usually an all-reduce of something smaller, and returns a future of the new values.

    backward, in this thread    | bucket 0: headers | hook |  ...  | bucket 1: headers | hook |
    the group of the hook                            |-- what it has started --|        |------ ...
    after backward                                                                 | futures -> .grad |

A hook uses a group of the user's, on which the program may communicate too: so it is called in the thread of
the program, in the order of the buckets, as by torch. And it is called when the headers have been compared: a
rank that is in another step would else pair its messages with those of this one, and a step that is given up
would leave some behind. What that costs: backward waits, bucket by bucket, for the slowest rank.

What a hook returns is not looked into. So the promises of bits end with it, ranks may hold different weights
(those that average their models now and then do), and declared steps, which promise the same bits on any
number of ranks, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from instep.net.messages import awaited
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[Tensor]"]


class GradBucket:
    """What a hook is given: torch's ``dist.GradBucket``, which cannot be made in Python.

    The buffer has alignment gaps, which hold -0.0, and the dtype of the bucket: float32 (float64).
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        self._index, self._is_last = bucket.index, is_last
        self._buffer = bucket.home
        self._gradients = list(bucket.views(bucket.home))
        self._parameters = [parameters[slot.position] for slot in bucket.slots]

    def index(self) -> int:
        """Its number in the order in which buckets leave."""
        return self._index

    def buffer(self) -> Tensor:
        """This rank's gradients, flat (n,), not divided by anything."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """From now on ``buffer`` is another tensor, say in another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, each in the shape of its parameter."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients these are."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""
        return self._is_last


class CommHook:
    """``hook`` with its ``state``. In a step: ``start`` for each bucket, then ``finish``."""

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook = state, hook
        self._started: list[tuple[Bucket, torch.futures.Future[Tensor]]] = []

    def begin(self) -> None:
        """A step begins; what is left of one that was given up is not waited for."""
        self._started.clear()

    def start(self, bucket: Bucket, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        """Call the hook on ``bucket``."""
        future = self._hook(self._state, GradBucket(bucket, parameters, is_last=is_last))
        if not hasattr(future, "wait"):
            raise TypeError(
                f"a communication hook has to return a torch.futures.Future, got {type(future).__name__}"
            )
        self._started.append((bucket, future))

    def finish(self, group: Group) -> None:
        """Wait for the futures, and copy what they give into the buckets.

        Raises:
            PeerLost: one was not there before the deadline.
            ValueError: it gives something else than a tensor of the size of its bucket.
        """
        for bucket, future in self._started:
            name = f"the communication hook of bucket {bucket.index}"
            group.run(partial(awaited, future.wait, name), name)
            _take(bucket, future.wait(), name)  # it is there: of a GPU's, this thread's stream waits for it
        self._started.clear()


def _take(bucket: Bucket, result: Any, name: str) -> None:
    result = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
    if not isinstance(result, Tensor) or result.numel() != bucket.home.numel():
        got = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"{name}: expected its future to hold a tensor of {bucket.home.numel()} elements, got {got}"
        )
    if result.data_ptr() != bucket.home.data_ptr() or result.dtype != bucket.dtype:
        bucket.home.copy_(result.detach().view(-1))
