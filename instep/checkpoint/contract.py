"""The numerical configuration: everything the bits of a run may depend on, as one flat dictionary.

Runs with equal fields give equal bits on every placement; so placement (ranks, strategy, buckets, network)
is not in it, and a run that resumed with other fields would silently become another run. The caller brings
the fields of its configuration (model, seed, data, batch, optimizer); :func:`describe` adds what the process
knows about its model, its libraries and its processor. What fields cannot tell, the canary does
(``canary.py``).
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.checkpoint.canary import agree_on_canary, canary
from instep.checkpoint.fields import ABSENT, differences, fingerprint
from instep.checkpoint.manifest import Scalar
from instep.checkpoint.structure import module_fields, optimizer_fields

__all__ = [
    "ABSENT",
    "KERNEL_SWITCHES",
    "agree_on_canary",
    "canary",
    "describe",
    "differences",
    "fingerprint",
]

# Variables by which libraries choose other kernels or another number of threads, so other bits.
KERNEL_SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
# Lines of torch.__config__.show() that are worth a field of their own.
LIBRARIES = {
    "mkl": r"Math Kernel Library Version (\S+)",
    "onednn": r"MKL-DNN (.+)",
    "openmp": r"OpenMP (\S+)",
    "cuda": r"CUDA Runtime (\S+)",
    "cudnn": r"CuDNN (\S+)",
}


def describe(
    *,
    config: Mapping[str, Scalar],
    threads: int,
    device: str,
    module: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> dict[str, Scalar]:
    """``config`` and what this process adds to it.

    ``threads`` is per rank, and counts because a kernel splits its sums among them. ``device`` is a torch
    device string; its index is placement and is left out. ``module`` is the model itself, not a wrapper.
    """
    kind = torch.device(device).type
    return {
        **config,
        "device": kind,
        "threads": threads,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "libc": " ".join(platform.libc_ver()),  # cos and exp of a schedule are its
        **dict(_libraries(torch.__config__.show())),
        **_flags(kind),
        **(_gpu(device) if kind == "cuda" else _cpu()),
        **({} if module is None else module_fields(module)),
        **({} if optimizer is None else optimizer_fields(optimizer)),
    }


def _libraries(build: str) -> Iterator[tuple[str, Scalar]]:
    """The kernel libraries by name, and a hash of all that torch says of its build."""
    for name, pattern in LIBRARIES.items():
        found = re.search(pattern, build)
        if found:
            yield f"libraries.{name}", found[1].strip()
    yield "libraries.build", hashlib.sha256(build.encode()).hexdigest()[:16]


def _flags(kind: str) -> dict[str, Scalar]:
    """Switches of torch that choose kernels or precision, on any device."""
    on = torch.is_autocast_enabled(kind)
    cuda = torch.backends.cuda  # where these switches are, for CPU kernels too
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal": _flushes_denormals(),
        "autocast_by_default": str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else "off",
        "attention.flash": cuda.flash_sdp_enabled(),
        "attention.memory_efficient": cuda.mem_efficient_sdp_enabled(),
        "attention.math": cuda.math_sdp_enabled(),
    }


def _flushes_denormals() -> bool:
    """Whether this thread's processor takes numbers below 2**-126 for zero; there is nothing to ask."""
    smallest = torch.tensor([1], dtype=torch.int32, device="cpu").view(torch.float32)  # 2**-149
    return not bool(torch.mul(smallest, 2.0).view(torch.int32))


def _cpu() -> dict[str, Scalar]:
    onednn: Any = torch.backends.mkldnn
    return {
        "cpu.kind": _cpu_kind(),
        "cpu.capability": torch.backends.cpu.get_cpu_capability(),
        "cpu.onednn": onednn.is_available() and bool(onednn.enabled),
        "cpu.onednn_deterministic": bool(onednn.deterministic),
        "cpu.onednn_precision": f"matmul={onednn.matmul.fp32_precision} conv={onednn.conv.fp32_precision} "
        f"rnn={onednn.rnn.fp32_precision}",
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
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    kind = torch.cuda.get_device_properties(device)
    return {
        "gpu.kind": kind.name,
        # cuBLAS promises equal bits for equal numbers of multiprocessors, and a slice of a GPU has fewer.
        "gpu.multiprocessors": kind.multi_processor_count,
        "gpu.driver": _gpu_driver(),
        "gpu.cuda": torch.version.cuda,
        "gpu.cudnn": cudnn.version(),
        "gpu.cudnn_flags": f"tf32={cudnn.allow_tf32} benchmark={cudnn.benchmark} det={cudnn.deterministic}",
        "gpu.matmul_tf32": matmul.allow_tf32,
        "gpu.matmul_reduced": f"fp16={matmul.allow_fp16_reduced_precision_reduction} "
        f"bf16={matmul.allow_bf16_reduced_precision_reduction}",
    }


def _gpu_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"
