"""Keywords and methods of torch's ``DistributedDataParallel`` that are not here, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

# All of torch up to 2.15, but for those that are keywords of ``DataParallel``.
REFUSED = {
    "device_ids": "move the module to its device before wrapping it, and inputs in the training loop",
    "output_device": "outputs stay on the device of the module: move them in the training loop",
    "dim": "inputs are not scattered: give each rank a batch of its own",
    "device_mesh": "pass it as process_group",
    "bucket_cap_mb_list": "pass the list as bucket_cap_mb",
    "forward_sync_buffers": "pass broadcast_buffers",
    "check_reduction": "leave it out: every reduction is checked",
    "skip_all_reduce_unused_params": "leave it out: an unused parameter is a zero in a bucket",
    "batched_grad_copy": "leave it out: gradients are copied as they appear",
    "lazy_bucket_allocation": "leave it out: gradients are views of buckets that live as long as the wrapper",
    "delay_all_reduce_named_params": "wrap these parameters in a DataParallel of their own",
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params",
    "mixed_precision": "use torch.autocast in the training loop: gradients are reduced in float32",
}
METHODS = {
    "join": "ranks need not have as many batches: declare steps, for micro_batch in model.micro_batches(G)",
    "_set_static_graph": "pass static_graph=True",
    "_get_ddp_logging_data": "a run records its steps, and instep.trace(model) those of any loop",
}


def require_supported_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise for the first of ``keywords`` that asks for something; None, False and 0 ask for nothing.

    Raises:
        TypeError: a keyword that neither torch nor instep knows.
        ValueError: a keyword of torch's that has no meaning here.
    """
    for name, value in keywords.items():
        if name not in REFUSED:
            raise TypeError(f"DataParallel got an unknown keyword {name!r}")
        if value:
            raise ValueError(f"{name} has no meaning here: {REFUSED[name]}")


def require_group(process_group: Any) -> None:
    """Raise ``TypeError`` for devices as the second argument, which they are in torch's signature."""
    if isinstance(process_group, list | tuple | Integral | str | torch.device):
        raise TypeError(
            f"process_group: expected a mesh or a process group, got {process_group!r}: devices have no "
            f"meaning here: {REFUSED['device_ids']}"
        )
