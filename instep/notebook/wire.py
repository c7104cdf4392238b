"""One message between a notebook's kernel and a rank: JSON, and the raw bytes of tensors. Never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from instep.memory import as_bytes
from instep.state.stored import DTYPES, MAX_DIMS

JSON_LIMIT_BYTES = 64 << 20
TENSOR_LIMIT_BYTES = 1 << 40
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Message = dict[str, Any]
Tensors = dict[str, Tensor]


def send(connection: Connection, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Send ``message`` and ``tensors`` by name, from any device.

    Raises:
        ValueError: a tensor of a dtype that no file holds, or a message that is too long.
        OSError: the other side has ended.
    """
    tensors = tensors or {}
    for name, x in tensors.items():
        if x.dtype not in NAMES or x.layout != torch.strided or x.is_meta:
            raise ValueError(
                f"{name}: expected a dense tensor of a plain dtype, got {x.layout}, {x.dtype} on {x.device}"
            )
    described = [[name, NAMES[x.dtype], list(x.shape)] for name, x in tensors.items()]
    data = json.dumps({**message, "tensors": described}).encode()
    if len(data) > JSON_LIMIT_BYTES:
        raise ValueError(f"expected at most {JSON_LIMIT_BYTES} bytes outside of tensors, got {len(data)}")
    connection.send_bytes(data)
    for x in tensors.values():
        if x.numel():
            connection.send_bytes(as_bytes(x.detach().cpu()).numpy().data)


def receive(connection: Connection) -> tuple[Message, Tensors]:
    """The next message and its tensors, which are on the CPU.

    Raises:
        EOFError, OSError: the other side has ended.
        ValueError: the bytes are not what ``send`` sends.
    """
    message = json.loads(connection.recv_bytes(JSON_LIMIT_BYTES))
    tensors: Tensors = {}
    try:
        for name, dtype, shape in message.pop("tensors"):
            if len(shape) > MAX_DIMS or prod(shape) * DTYPES[dtype].itemsize > TENSOR_LIMIT_BYTES:
                raise ValueError(f"expected a tensor that fits into memory, got shape {shape}")
            tensors[str(name)] = x = torch.empty(shape, dtype=DTYPES[dtype])
            if x.numel() and connection.recv_bytes_into(as_bytes(x).numpy().data) != x.nbytes:
                raise ValueError(f"expected {x.nbytes} bytes of {name!r}, got fewer")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a message of instep's notebook: {error!r}") from error
    return message, tensors
