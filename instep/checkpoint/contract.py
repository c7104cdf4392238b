"""The numerical configuration: everything the bits of a run may depend on, as one flat dictionary.

Runs with equal fields give equal bits on every placement; so placement (ranks, strategy, buckets, network)
is not in it, and a run that resumed with other fields would silently become another run. The caller brings
the fields of its configuration (model, seed, data, batch, optimizer); :func:`describe` adds what the process
knows about its model, its libraries and its processor. What fields cannot tell, the canary does
(``canary.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint.manifest import Scalar, differences
from instep.errors import ContractBroken
from instep.mesh import deterministic
from instep.net.agree import raise_on_all
from instep.net.process_group import Group
from instep.shard.fully import FullySharded
from instep.state.homes import shape_of

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
CANARY = "canary"
LOADER = ("batch_size", "micro_batch_size", "num_samples", "seed", "shuffle", "groups")
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
        "attention.cudnn": cuda.cudnn_sdp_enabled(),
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
    cudnn, cuda, matmul = torch.backends.cudnn, torch.backends.cuda, torch.backends.cuda.matmul
    kind = torch.cuda.get_device_properties(device)
    conv: Any = cudnn
    return {
        "gpu.kind": kind.name,
        # cuBLAS promises equal bits for equal numbers of multiprocessors, and a slice of a GPU has fewer.
        "gpu.multiprocessors": kind.multi_processor_count,
        "gpu.strict": not torch.is_deterministic_algorithms_warn_only_enabled(),
        "gpu.driver": _gpu_driver(),
        "gpu.cuda": torch.version.cuda,
        "gpu.cublas": _cublas_version(),
        "gpu.blas": str(cuda.preferred_blas_library()).rpartition(".")[2],
        "gpu.workspace": deterministic.workspace(),
        "gpu.cudnn": cudnn.version(),
        "gpu.cudnn_flags": f"benchmark={cudnn.benchmark} det={cudnn.deterministic}",
        "gpu.precision": f"matmul={matmul.fp32_precision} conv={conv.conv.fp32_precision} "
        f"rnn={conv.rnn.fp32_precision}",
        "gpu.matmul_reduced": f"fp16={matmul.allow_fp16_reduced_precision_reduction} "
        f"bf16={matmul.allow_bf16_reduced_precision_reduction} fp16_sum={matmul.allow_fp16_accumulation}",
    }


def _cublas_version() -> str:
    """Of the library that torch has loaded; "unknown" where it goes by another name."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return "unknown"
    numbers = [ctypes.c_int() for _ in range(3)]  # major, minor, patch
    for which, number in enumerate(numbers):
        library.cublasGetProperty(which, ctypes.byref(number))
    return ".".join(str(number.value) for number in numbers)


def _gpu_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"


def require_same(group: Group, fields: Mapping[str, Scalar]) -> None:
    """Raise ``ContractBroken`` on all ranks unless ``fields`` are the same on all. Collective.

    A rank with another build, kind of CPU or text would compute other bits than the rest, without a word.
    """
    everyone = group.all_gather_bytes(json.dumps(dict(fields)).encode(), "the comparison of configurations")
    usual, votes = Counter(everyone).most_common(1)[0]
    odd = [rank for rank, data in zip(group.ranks, everyone, strict=True) if data != usual]
    if not odd:
        return
    first, rank = group.ranks[everyone.index(usual)], odd[0]
    other = json.loads(everyone[group.ranks.index(rank)])
    lines = differences(json.loads(usual), other, (f"on rank {first}", f"on rank {rank}"))
    than = "the others" if 2 * votes > group.size else f"rank {first}, and no majority says which is right"
    error = ContractBroken(
        f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} would compute other bits than {than}; "
        f"{way_out(lines)}:\n  " + "\n  ".join(lines)
    )
    raise_on_all(group, error)


def way_out(lines: Sequence[str]) -> str:
    """What to do about fields that differ."""
    if all(line.startswith(f"{CANARY}:") for line in lines):
        return "only the canary differs, the gradient of one fixed micro-batch: suspect that rank's hardware"
    return "make these the same"


# What a model is made of, so that a changed layer is refused by its name:
#
#     model.code.instep.models.transformer        a hash of the file, which may have changed in words alone
#     model.layer.blocks.0.feed_forward.up        Linear(in_features=128, out_features=512, bias=True)
#     model.parameter.blocks.0.feed_forward.up.weight             float32 [512, 128]
#
# torch's own classes come with the version of torch. A module that is divided counts as what it was before:
# where weights are is placement.

UNKNOWN = "no source"
SHORT = 16  # hex digits


def module_fields(module: nn.Module) -> dict[str, Scalar]:
    """Code, layers, parameters and buffers of ``module``."""
    fields: dict[str, Scalar] = {}
    for path, layer in module.named_modules():
        kind = layer.sharding.kind if isinstance(layer, FullySharded) else type(layer)
        code = f"model.code.{kind.__module__}"
        if not kind.__module__.startswith("torch.") and code not in fields:
            fields[code] = _code_of(kind)
        if not any(True for _ in layer.children()):
            fields[f"model.layer.{path or '(whole)'}"] = f"{kind.__name__}({layer.extra_repr()})"
    for name, x in _tensors(module):
        fields[name] = f"{str(x.dtype).removeprefix('torch.')} {list(shape_of(x))}"
    return fields


def optimizer_fields(optimizer: Optimizer, local: Optimizer) -> dict[str, Scalar]:
    """Of ``optimizer`` the options of each group, as they are before the first step.

    Of ``local``, which steps for it, its class, and which of torch's implementations: they differ in the last
    bit.
    """
    kind = type(local)
    flags = {key: value for key, value in local.defaults.items() if value is None or type(value) is bool}
    fields: dict[str, Scalar] = dict(flags)
    fields["kind"] = f"{kind.__module__}.{kind.__qualname__}"
    if not kind.__module__.startswith("torch."):
        fields["code"] = _code_of(kind)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and key not in flags:
                plain = value.tolist() if isinstance(value, Tensor) else value
                fields[f"groups.{number}.{key}"] = plain if isinstance(plain, Scalar) else str(plain)
    return fields


def loader_fields(loader: Any) -> dict[str, Scalar]:
    """What of a loader says which samples are in which micro-batch, and a hash of these where it is known."""
    found = {name: getattr(loader, name, None) for name in LOADER}
    found["sha256"] = getattr(getattr(loader, "dataset", None), "sha256", None)
    return {name: value for name, value in found.items() if isinstance(value, int | str)}


def file_hash(path: Path | str | None) -> str:
    """A hash of the file at ``path``."""
    try:
        return UNKNOWN if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:SHORT]
    except OSError:
        return UNKNOWN


def _code_of(kind: type) -> str:
    """A hash of the file that defines ``kind``."""
    return file_hash(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, a tied one once and a frozen one marked, then buffers."""
    for name, p in module.named_parameters():
        yield f"model.{'parameter' if p.requires_grad else 'frozen'}.{name}", p
    for name, b in module.named_buffers():
        yield f"model.buffer.{name}", b


# What a difference means for a run that is to go on.

NOTED = re.compile(r"steps|(.*\.)?code(\..*)?")
WARNED = re.compile(
    r"(cpu|gpu|libraries|environment|attention)\..*|device|threads|torch|python|libc|deterministic|"
    r"matmul_precision|flush_denormal|canary"
)


def binding(fields: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Those of ``fields`` that have to be the same for the same bits; the others may be."""
    return {name: value for name, value in fields.items() if not NOTED.fullmatch(name)}


class Changes(NamedTuple):
    """Fields that differ, in words: ``refused`` by name (the training is another one), ``warned`` of (the
    machine or its software, which may round otherwise), ``noted`` (code, or how many steps there will be)."""

    refused: list[str]
    warned: list[str]
    noted: list[str]


def changes(saved: Mapping[str, Scalar], now: Mapping[str, Scalar], where: tuple[str, str]) -> Changes:
    """The fields in which ``saved`` and ``now`` differ."""
    found = Changes([], [], [])
    for line in differences(saved, now, where):
        name = line.partition(":")[0]
        number = 2 if NOTED.fullmatch(name) else 1 if WARNED.fullmatch(name) else 0
        found[number].append(f"{name} has changed" if "code" in name.split(".") else line)
    return found
