"""One message between a notebook's kernel and a rank: JSON, and tensors as safetensors. Never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

JSON_LIMIT_BYTES = 64 << 20

Message = dict[str, Any]
Tensors = dict[str, Tensor]


def send(connection: Connection, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Send ``message`` and ``tensors`` by name, from any device.

    Raises:
        ValueError: the message is too long.
        OSError: the other side has ended.
    """
    data = json.dumps(message).encode()
    if len(data) > JSON_LIMIT_BYTES:
        raise ValueError(f"expected at most {JSON_LIMIT_BYTES} bytes outside of tensors, got {len(data)}")
    own = {
        name: x.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, x in (tensors or {}).items()
    }
    connection.send_bytes(data)
    connection.send_bytes(save(own))  # which refuses tensors that share memory


def receive(connection: Connection) -> tuple[Message, Tensors]:
    """The next message and its tensors, which are on the CPU.

    Raises:
        EOFError, OSError: the other side has ended.
        ValueError: the bytes are not what ``send`` sends.
    """
    message = json.loads(connection.recv_bytes(JSON_LIMIT_BYTES))
    try:
        return message, load(connection.recv_bytes())
    except SafetensorError as error:
        raise ValueError(f"expected tensors of instep's notebook: {error}") from error
