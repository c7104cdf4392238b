"""The numerical configuration: everything the bits of a run may depend on, as one flat dictionary.

Runs with equal fields give equal bits on every placement; so placement (ranks, strategy, buckets, network)
is not in it, and a run that resumed with other fields would silently become another run. The caller brings
the fields of its configuration (model, seed, data, batch, optimizer); :func:`describe` adds what the process
knows about its model, its libraries and its processor. What fields cannot tell, the canary does
(``canary.py``).
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import inspect
import json
import platform
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

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
    first, reference = group.ranks[0], json.loads(everyone[0])
    for rank, data in zip(group.ranks, everyone, strict=True):
        lines = differences(reference, json.loads(data), (f"on rank {first}", f"on rank {rank}"))
        if lines:
            error = ContractBroken(
                f"rank {rank} would compute other bits than rank {first}; make these the same:\n  "
                + "\n  ".join(lines)
            )
            raise_on_all(group, error)


# What a model is made of, so that a changed layer is refused by its name:
#
#     model.code.instep.models.transformer        of the whole file: helpers count, too
#     model.code.FeedForward                      of each class that the model uses
#     model.layer.blocks.0.feed_forward.up        Linear(in_features=128, out_features=512, bias=True)
#     model.parameter.blocks.0.feed_forward.up.weight             float32 [512, 128]
#
# Code is hashed without comments, docstrings and layout. torch's own classes are left out: they come with the
# version of torch. A module that is divided counts as what it was before: where weights are is placement.

UNKNOWN = "no source"
SHORT = 16  # hex digits
# Before Python 3.11.9 two threads that parse at once break each other (python/cpython#106905).
PARSING = Lock()
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def module_fields(module: nn.Module) -> dict[str, Scalar]:
    """Code, layers, parameters and buffers of ``module``."""
    fields: dict[str, Scalar] = {}
    for path, layer in module.named_modules():
        kind = layer.sharding.kind if isinstance(layer, FullySharded) else type(layer)
        if not kind.__module__.startswith("torch."):
            fields[f"model.code.{kind.__module__}"] = _code_of_file(kind.__module__)
            fields[f"model.code.{kind.__qualname__}"] = _code_of_class(kind)
        if not any(True for _ in layer.children()):
            fields[f"model.layer.{path or '(whole)'}"] = f"{kind.__name__}({layer.extra_repr()})"
    for name, x in _tensors(module):
        fields[name] = f"{str(x.dtype).removeprefix('torch.')} {list(shape_of(x))}"
    return fields


def optimizer_fields(optimizer: torch.optim.Optimizer) -> dict[str, Scalar]:
    """Which optimizer it is, and which of torch's implementations: they differ in the last bit."""
    kind = type(optimizer)
    flags = {key: value for key, value in optimizer.defaults.items() if value is None or type(value) is bool}
    fields: dict[str, Scalar] = {f"optimizer.{key}": value for key, value in flags.items()}
    fields["optimizer.kind"] = f"{kind.__module__}.{kind.__qualname__}"
    if not kind.__module__.startswith("torch."):
        fields["optimizer.code"] = _code_of_class(kind)
    return fields


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, a tied one once and a frozen one marked, then buffers."""
    for name, p in module.named_parameters():
        yield f"model.{'parameter' if p.requires_grad else 'frozen'}.{name}", p
    for name, b in module.named_buffers():
        yield f"model.buffer.{name}", b


def _code_of_class(kind: type) -> str:
    with PARSING:
        known = _code_in(sys.modules.get(kind.__module__)).get(kind.__qualname__)
        if known is not None:
            return known
        try:  # a notebook has no file, and inspect knows its cells
            return _code_of(textwrap.dedent(inspect.getsource(kind)))[kind.__name__]
        except (OSError, TypeError, SyntaxError, KeyError):
            return UNKNOWN


def _code_of_file(name: str) -> str:
    with PARSING:
        return _code_in(sys.modules.get(name)).get("", UNKNOWN)


@cache
def _code_in(module: ModuleType | None) -> dict[str, str]:
    """Hashes of the file of ``module``: "" is the whole, the rest are its classes by qualified name."""
    try:
        return {} if module is None else _code_of(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}


def code_of_script(path: Path) -> str:
    """The hash of the code in the file at ``path``, without comments, docstrings and layout."""
    with PARSING:
        try:
            return _code_of(path.read_text(encoding="utf-8"))[""]
        except (OSError, ValueError, SyntaxError):
            return UNKNOWN


def _code_of(source: str) -> dict[str, str]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return {
        name: hashlib.sha256(ast.dump(node).encode()).hexdigest()[:SHORT] for name, node in _classes(tree)
    }


def _classes(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The module as "", and the classes below it, those in functions too."""
    if isinstance(node, ast.Module):
        yield "", node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from _classes(child, prefix)
            continue
        name = f"{prefix}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield name, child
        yield from _classes(child, f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>.")
