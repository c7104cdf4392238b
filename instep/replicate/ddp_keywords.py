"""Keywords of torch's ``DistributedDataParallel`` that have no effect here, or are refused, and why."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from instep.mesh.mesh import Mesh

# Of torch up to 2.15. Keyword -> (the value that asks for nothing, why it has no effect here).
NO_EFFECT: dict[str, tuple[Any, str]] = {
    "device_ids": (None, "the module stays where it is and inputs are not moved"),
    "output_device": (None, "the module stays where it is and outputs are not moved"),
    "dim": (0, "inputs are not scattered"),
    "check_reduction": (False, "every reduction is checked, always"),
    "gradient_as_bucket_view": (True, "gradients are views of their buckets, always"),
    "static_graph": (
        False,
        "uses are counted in the first backward, always; only that it allows unused ones",
    ),
    "skip_all_reduce_unused_params": (False, "an unused parameter is a zero in a bucket that travels anyway"),
    "batched_grad_copy": (False, "gradients are copied as they appear"),
    "lazy_bucket_allocation": (False, "gradients are views of their buckets, which stay as long as they do"),
}
REFUSED = {
    "delay_all_reduce_named_params": "reduce these parameters in a wrapper of their own",
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params",
    "mixed_precision": "use torch.autocast in the training loop; instep reduces in float32",
}


def require_no_group(**arguments: Any) -> None:
    """Raise ``TypeError`` if one of ``arguments``, which stand before ``process_group``, could be a group.

    Every rank would else train in the default group. The ranks need not agree: those of another group than
    the one that was meant may never come.
    """
    for name, value in arguments.items():
        parts = value if isinstance(value, list | tuple) else [value]
        odd = [x for x in parts if not isinstance(x, Integral | str | torch.device | None)]
        if odd:
            raise TypeError(
                f"{name}: expected what it is in torch's DistributedDataParallel (devices, numbers), got a "
                f"{type(odd[0]).__name__}: pass a mesh or a process group by name, process_group=..."
            )


def second_place(device_ids: Any, process_group: Any, device_mesh: Any) -> tuple[Any, Any]:
    """The first two, but a mesh in the place of the first, ``DataParallel(module, mesh)``, means the second.

    Raises:
        ValueError: there are two that the ranks could be of.
    """
    if device_mesh is not None and process_group is not None:
        raise ValueError("pass process_group or device_mesh, not both")
    if isinstance(device_ids, Mesh) and process_group is None:
        return None, device_ids
    return device_ids, process_group


def allowed(find_unused_parameters: bool | None, keywords: Mapping[str, Any]) -> bool | None:
    """``find_unused_parameters``, or True where another of ``keywords`` allows it."""
    return (
        True if keywords.get("static_graph") and find_unused_parameters is False else find_unused_parameters
    )


def consume(keywords: Mapping[str, Any]) -> str:
    """Accept what has no effect, and refuse the rest by name.

    Returns:
        The warning that is due, or "".

    Raises:
        TypeError: a keyword that neither torch nor instep knows.
        ValueError: a keyword that would have an effect in torch that instep does not offer.
    """
    idle = []
    for name, value in keywords.items():
        if name in REFUSED:
            if value is not None:
                raise ValueError(f"{name} is not offered: {REFUSED[name]}")
        elif name not in NO_EFFECT:
            raise TypeError(f"DataParallel got an unknown keyword {name!r}")
        elif value is not None and value != NO_EFFECT[name][0]:
            idle.append(f"{name} ({NO_EFFECT[name][1]})")
    return f"without effect in instep: {'; '.join(idle)}" if idle else ""


def shared_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that have to be the same on all ranks."""
    own = ("process_group", "device_mesh", "timeout_s")
    options = {name: value for name, value in arguments.items() if name not in own}
    return {name: "a function" if callable(value) else value for name, value in options.items()}
