"""A communication hook: the user's own reduction of a bucket, in place of the ordered one.

    backward, in this thread    | bucket 0: headers | hook |  ...  | bucket 1: headers | hook |
    the group of the hook                            |-- what it has started --|        |------ ...
    after backward                                                                 | futures -> .grad |

A hook uses a group of the user's, on which the program may communicate too. So it is called in the thread of
the program, in the order of the buckets, as by torch; and it is called when the headers have been compared: a
rank in another step would else pair its messages with those of this one. The cost: backward waits, bucket by
bucket, for the slowest rank.

What a hook returns is not examined. So the promises of bits end with it, ranks may hold different weights,
and declared steps, which promise the same bits on any number of ranks, are refused.
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
    """What a hook is given, as torch's ``dist.GradBucket``, which cannot be made in Python.

    The buffer has alignment gaps, which hold -0.0, and the dtype of the bucket: float32 (float64).
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        self._bucket, self._buffer, self._is_last = bucket, bucket.home, is_last
        self._parameters = [parameters[slot.position] for slot in bucket.slots]

    def index(self) -> int:
        """Its number in the order of the exchanges."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """This rank's gradients, flat (n,), not divided by anything."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """From now on ``buffer`` is another tensor, say in another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the bucket, each in the shape of its parameter."""
        return list(self._bucket.views(self._bucket.home))

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
        """Wait for the futures, and copy their values into the buckets.

        Raises:
            PeerLost: a future was not done before the deadline.
            ValueError: its value is no tensor of the size of its bucket.
        """
        for bucket, future in self._started:
            name, home = f"the communication hook of bucket {bucket.index}", bucket.home
            group.run(partial(awaited, future.wait, name), name)
            result: Any = future.wait()  # done: on a GPU, this thread's stream waits for it
            result = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
            if not isinstance(result, Tensor) or result.numel() != home.numel():
                got = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(
                    f"{name}: expected its future to hold a tensor of {home.numel()} elements, got {got}"
                )
            if result.data_ptr() != home.data_ptr() or result.dtype != bucket.dtype:
                home.copy_(result.detach().view(-1))
        self._started.clear()
