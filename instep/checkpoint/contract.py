"""The numerical configuration: everything the bits of a run may depend on, as one flat dictionary.

Runs with equal fields give equal bits on every placement; so placement (ranks, strategy, buckets, network)
is not in it, and a run that resumed with other fields would silently become another run. The caller brings
the fields of its configuration (model, seed, data, batch, optimizer); :func:`describe` adds what the process
knows about its libraries and its processor.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from instep.checkpoint.manifest import Scalar, canonical

ABSENT = "absent"


def describe(*, config: Mapping[str, Scalar], threads: int, device: str) -> dict[str, Scalar]:
    """``config`` and what this process adds to it.

    ``threads`` is per rank, and counts because a kernel splits its sums among them. ``device`` is a torch
    device string; its index is placement and is left out.
    """
    kind = torch.device(device).type
    return {
        **config,
        "device": kind,
        "threads": threads,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "libraries": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],  # MKL, oneDNN, CUDA
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **(_gpu(device) if kind == "cuda" else _cpu()),
    }


def _cpu() -> dict[str, Scalar]:
    return {
        "cpu.kind": _cpu_kind(),
        "cpu.capability": torch.backends.cpu.get_cpu_capability(),
        "cpu.onednn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
    }


def _cpu_kind() -> str:
    """The processor's name where the system gives one: libraries choose kernels and block sizes by it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _gpu(device: str) -> dict[str, Scalar]:
    cudnn = torch.backends.cudnn
    return {
        "gpu.kind": torch.cuda.get_device_name(device),
        "gpu.driver": _gpu_driver(),
        "gpu.cuda": torch.version.cuda,
        "gpu.cudnn": cudnn.version(),
        "gpu.cudnn_flags": f"tf32={cudnn.allow_tf32} benchmark={cudnn.benchmark} det={cudnn.deterministic}",
        "gpu.matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def _gpu_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"


def fingerprint(fields: Mapping[str, Scalar]) -> str:
    """SHA-256 of the fields' canonical JSON: equal exactly when :func:`differences` is empty."""
    return hashlib.sha256(canonical(dict(fields))).hexdigest()


def differences(
    a: Mapping[str, Scalar], b: Mapping[str, Scalar], where: tuple[str, str] = ("in the checkpoint", "now")
) -> list[str]:
    """One line per field that differs, sorted: ``batch.micro_size: 4 in the checkpoint, 8 now``."""
    lines = []
    for name in sorted({*a, *b}):
        first, second = (json.dumps(fields[name]) if name in fields else ABSENT for fields in (a, b))
        if first != second:
            lines.append(f"{name}: {first} {where[0]}, {second} {where[1]}")
    return lines
