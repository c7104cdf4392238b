"""What the card, the driver and the libraries are, and which tests of the package pass on them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu.part import Part, main
from instep.bench.tables import checked_out

NEEDED = ("numpy", "safetensors", "rich", "tyro", "matplotlib", "jinja2", "pytest", "hypothesis")
ASKED = "name,driver_version,memory.total,compute_mode,mig.mode.current,clocks.sm,power.limit"
PLAIN = ("-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "--import-mode=importlib")


def environment(part: Part) -> None:
    found = {
        "date": date.today().isoformat(),
        "commit": checked_out() or "",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "missing packages": ", ".join(name for name in NEEDED if not importlib.util.find_spec(name))
        or "none",
        "native core": re.sub(r"\S*/", "", printed(sys.executable, "-m", "instep.native.build")),
        "float32 matrix products": torch.get_float32_matmul_precision(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }
    for name, value in found.items():
        part.found(name, "info", value=value)
    if part.on_gpu:
        asked = "nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"
        part.found("nvidia-smi", "info", value=printed(*asked))
        x = torch.ones(256, 256, device=part.device)
        part.found("the card computes", "same" if float((x @ x).sum()) == 256.0**3 else "differs")
        for name, value in of_card(part.device).items():
            part.found(name, "info", value=value)


def of_card(device: str) -> dict[str, object]:
    """What the bits and the times may depend on, as torch sees it."""
    card = torch.cuda.get_device_properties(device)
    matmul = torch.backends.cuda.matmul
    packages = [x for x in importlib.metadata.distributions() if str(x.name).startswith("nvidia-")]
    return {
        "GPU": f"{card.name}, {card.multi_processor_count} SMs, compute capability {card.major}.{card.minor}",
        "CUDA, cuDNN, NCCL": (torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.nccl.version()),
        "NVIDIA's packages": ", ".join(sorted(f"{x.name[7:]} {x.version}" for x in packages)),
        "BLAS": str(torch.backends.cuda.preferred_blas_library()),
        "TF32 of matmul, cuDNN": (matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "reduced precision in bf16": matmul.allow_bf16_reduced_precision_reduction,
    }


def printed(*command: str) -> str:
    """What a command prints, or why it does not start."""
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        return str(error)
    return ended.stdout.strip()


def tests(part: Part) -> None:
    """Those that need a GPU, in one process, without the plugins that a machine may lack."""
    missing = [name for name in ("pytest", "hypothesis") if not importlib.util.find_spec(name)]
    if missing:
        part.found("pytest", "skipped", why=f"not installed: {', '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", *PLAIN, f"--junitxml={file}"]
        code = subprocess.run(command).returncode
        cases = list(ElementTree.parse(file).getroot().iter("testcase")) if file.exists() else []
    for case in cases:
        outcomes = {outcome.tag: str(outcome.get("message"))[:300] for outcome in case}
        verdict = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        word = next((verdict[tag] for tag in outcomes if tag in verdict), "passed")
        part.found(str(case.get("name")), word, why="; ".join(outcomes.values()))
    if code or not cases:
        part.found("pytest", "failed", why=f"exit code {code}, {len(cases)} tests")


if __name__ == "__main__":
    main({"environment": environment, "tests": tests})
