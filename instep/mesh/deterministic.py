"""Deterministic kernels on a GPU: settings for reproducible bits, which PyTorch leaves off by default.

Two launches of one kernel may add in different orders (atomics), and cuBLAS may choose another algorithm
while several streams share its workspace. The settings below exclude both; they cost some speed, and
operations without a deterministic kernel raise.
"""

from __future__ import annotations

import os

import torch

from instep.errors import warn

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = (":4096:8", ":16:8")  # documented by cuBLAS as reproducible


def enable() -> None:
    """Use deterministic kernels in this process from now on.

    Raises:
        ValueError: CUDA has started with another cuBLAS workspace, which is then fixed.
    """
    if workspace() not in FIXED_WORKSPACES:
        if torch.cuda.is_initialized():
            raise ValueError(
                f"expected {WORKSPACE}={FIXED_WORKSPACES[0]} before CUDA starts, got {workspace()!r}: set it "
                "in the environment, or make the Run before the first use of a GPU"
            )
        os.environ[WORKSPACE] = FIXED_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def workspace() -> str:
    """The cuBLAS workspace set in the environment; "" leaves the choice to cuBLAS."""
    return os.environ.get(WORKSPACE, "")


def missing() -> list[str]:
    """The settings that are missing, as statements to run."""
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    wanted = {
        f"{WORKSPACE}={FIXED_WORKSPACES[0]} in the environment": workspace() in FIXED_WORKSPACES,
        "torch.use_deterministic_algorithms(True)": (
            torch.are_deterministic_algorithms_enabled() and not warns_only
        ),
        "torch.backends.cudnn.benchmark = False": not torch.backends.cudnn.benchmark,
    }
    return [setting for setting, is_made in wanted.items() if not is_made]


def warn_if_missing() -> None:
    """Warn that a declared step on a GPU may not have the same bits twice. Python shows it once."""
    if settings := missing():
        warn(
            "a declared step on a GPU has the same bits everywhere only with deterministic kernels. Pass "
            f"deterministic=True to instep.Run, or set: {'; '.join(settings)}",
        )
