"""The capabilities of this machine and its problems, in words, each with its fix.

If asked, two ranks are started too, which verify with every strategy that their gradient is that of one
process, on a model small enough to take no time.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.checkpoint import contract
from instep.errors import InstepError
from instep.launch.launch import launch, warm
from instep.launch.launch_environment import LaunchEnvironment, detect
from instep.launch.rank_exit import RankFailed
from instep.mesh import deterministic
from instep.mesh.join import init
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.native import build
from instep.native.library import absence
from instep.net import device
from instep.record.display import follow
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.rng.keys import derive, initialize
from instep.shm import segment
from instep.shm.segment import why_not

OK, WARNING, ERROR = "ok", "warning", "error"
DONE, FAILED = 0, 1
GIB = 1 << 30
LEAST_TORCH = (2, 10)
FEW_FILES = 1024
LITTLE_SHM = 128 << 20  # containers have 64 MiB unless told otherwise
# With the kernel switches and GLOO_SOCKET_IFNAME the only variables that are shown: others hold secrets.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
TIMEOUT_S = 60.0
TRIAL_MODEL = GPTConfig(vocab_size=64, context=16, layers=2, width=32, heads=2, dropout=0.1)
WAYS = [("bucketed", False), *((strategy, True) for strategy in STRATEGIES)]  # strategy, ordered


@dataclass(frozen=True)
class Finding:
    """One line: ``level`` is "ok", "warning" or "error", and ``fix`` is empty if nothing is wrong."""

    name: str
    text: str
    level: str = OK
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """What the checks look at: the environment, the file system from ``root``, and where runs would go."""

    environ: Mapping[str, str]
    root: Path = Path("/")
    directory: Path = Path()

    @property
    def place(self) -> LaunchEnvironment:
        """Where this process stands; a world of one where the environment contradicts itself."""
        try:
            return detect(self.environ)
        except ValueError:
            return LaunchEnvironment()


def run(*, json_wanted: bool, verify: bool) -> int:
    """Look, print, and return the exit code: 0, or 1 if there was an error."""
    if verify:
        warm()  # the process that ranks are forked from loads torch meanwhile
    findings = examine(Machine(os.environ))
    verified = StrategyReports([], [])
    if verify:
        finding, verified = _verify()
        findings.append(finding)
    failed = any(finding.level == ERROR for finding in findings)
    if json_wanted:
        whole = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps({**whole, "verify": verified.reports if verify else None}, indent=1))
    else:
        print("\n".join([*_lines(findings), *_shown(verified)]))
    return FAILED if failed else DONE


def examine(machine: Machine) -> list[Finding]:
    """The findings of all checks; one that cannot be made is a warning that says why."""
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(check(machine))
        except (OSError, RuntimeError, ValueError) as error:
            findings.append(Finding(name, f"could not be looked at: {error}", WARNING))
    return findings


def _shown(verified: StrategyReports) -> list[str]:
    """A line for each way that is right, the whole table of each that is wrong."""
    pairs = zip(verified.reports, verified.tables, strict=True)
    return [table.partition("\n")[0] if report["ok"] else table for report, table in pairs]


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.name:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':7}  {'':{width}}  fix: {finding.fix}")
    return lines


def _python(machine: Machine) -> Finding:
    return Finding("python", f"{platform.python_version()}, {sys.executable}")


def _torch(machine: Machine) -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    text = f"{torch.__version__}, {build} build, threads by {_threads_by()}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return Finding("torch", text, ERROR, f"pip install 'torch>={least}'")
    if not torch.distributed.is_available():
        return Finding("torch", f"{text}, without torch.distributed", ERROR, "install a build that has it")
    return Finding("torch", text)


def _threads_by() -> str:
    lines = torch.__config__.parallel_info().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "parallel backend" in line), "unknown")


def _cpu(machine: Machine) -> Finding:
    kind = contract.describe(config={}, threads=1, device="cpu")
    return Finding("cpu", f"{kind['cpu.kind']}, kernels for {kind['cpu.capability']}")


def _cores(machine: Machine) -> Finding:
    own, limit = len(os.sched_getaffinity(0)), cpu_limit(machine.root)
    text = f"{own} of {os.cpu_count()} for this process"
    if limit is None or limit >= own:
        return Finding("cores", text)
    return Finding(
        "cores",
        f"{text}, but its control group gives time for {limit:.3g}: ranks would be stopped in turn",
        WARNING,
        f"train with -n {max(int(limit), 1)}, or raise the container's CPU limit",
    )


def _threads(machine: Machine) -> Finding:
    given = _set(machine, THREADS)
    return Finding(
        "threads",
        f"torch takes {torch.get_num_threads()} here{' with ' * bool(given)}{', '.join(given)}; instep gives "
        "every CPU rank 1, or --parallel.threads, because their number changes bits",
    )


def _set(machine: Machine, names: Sequence[str]) -> list[str]:
    return [f"{name}={machine.environ[name]}" for name in names if name in machine.environ]


def _gpu(machine: Machine) -> Finding:
    if torch.cuda.is_available():
        kinds = [torch.cuda.get_device_properties(i) for i in range(device.num_gpus())]
        return Finding("gpu", "; ".join(f"{k.name}, {k.total_memory / GIB:.0f} GiB" for k in kinds))
    if not (machine.root / "proc/driver/nvidia/version").exists():
        return Finding("gpu", "none: ranks compute on the CPU")
    if torch.version.cuda is None:
        text = "there is an NVIDIA driver, but this torch is a CPU build"
        return Finding("gpu", text, WARNING, "install a CUDA build of torch to use the GPU")
    text = "there is an NVIDIA driver, but CUDA does not start"
    return Finding("gpu", text, ERROR, "look at nvidia-smi and at CUDA_VISIBLE_DEVICES")


def _shm(machine: Machine) -> Finding:
    problem = shm_problem()
    if problem:
        fix = (
            "use Linux on x86-64, or on aarch64 with the native core, and let the container call "
            "memfd_create and read its own /proc"
        )
        return Finding("shared memory", f"{problem}: ranks would use gloo, which is slower", WARNING, fix)
    return Finding("shared memory", "works: ranks of this host exchange gradients through it")


def _native(machine: Machine) -> Finding:
    if reason := absence():
        text = f"not there ({reason}): ranks of this host use gloo instead of shared memory"
        return Finding("native core", text, WARNING, build.HOW_TO)
    return Finding("native core", "compiled: ranks of this host wait and add without the interpreter")


def shm_problem() -> str:
    """Why the backend shm would not work on this host, or ""."""
    if reason := why_not():
        return reason
    try:
        memory = segment.create(4096)
        segment.attach(os.getpid(), memory.fd)
    except (OSError, ValueError) as error:
        return f"it cannot be made here ({error})"
    return ""


def _open_files(machine: Machine) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEW_FILES:
        text = f"at most {soft}, and every bucket and connection takes one"
        return Finding("open files", text, WARNING, f"ulimit -n {FEW_FILES if hard < 0 else hard}")
    return Finding("open files", "no limit" if soft < 0 else f"at most {soft}")


def _memory(machine: Machine) -> Finding:
    fields = dict(line.split(":") for line in (machine.root / "proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit(machine.root)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    if limit is not None and limit < total:
        text += f"; its control group may have {limit / GIB:.1f} GiB, and is killed beyond it"
    if min(free, limit or free) < GIB:
        return Finding("memory", text, WARNING, "train a smaller model or fewer ranks, or free some memory")
    return Finding("memory", text)


def _dev_shm(machine: Machine) -> Finding:
    path = machine.root / "dev/shm"
    if not path.is_dir():
        return Finding("/dev/shm", "not there; instep does not need it")
    total = shutil.disk_usage(path).total
    text = f"{total / GIB:.1f} GiB"
    if total < LITTLE_SHM:
        fix = "instep needs none, but torch's DataLoader workers do: start the container with --shm-size=2g"
        return Finding("/dev/shm", text, WARNING, fix)
    return Finding("/dev/shm", text)


def _network(machine: Machine) -> Finding:
    """Which interface gloo binds to: the named one, else that of the host name's address."""
    interfaces = [name for _, name in socket.if_nameindex()]
    named = machine.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        if missing := [name for name in named.split(",") if name not in interfaces]:
            text = f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not among {', '.join(interfaces)}"
            return Finding("network", text, ERROR, "name one of them, or unset GLOO_SOCKET_IFNAME")
        return Finding("network", f"gloo uses {named}, from GLOO_SOCKET_IFNAME")
    spread = machine.place.local_world_size < machine.place.world_size
    try:
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        across = f"across hosts it would take {address}"
        good = not str(address).startswith("127.") and address != "::1"
    except OSError:
        across, good = "across hosts it would find no address for this host's name", False
    text = f"gloo uses the loopback on one host; {across}{'' if good else ', which others cannot reach'}"
    if spread and not good:
        others = ", ".join(name for name in interfaces if name != "lo") or "an interface of the network"
        return Finding("network", text, ERROR, f"set GLOO_SOCKET_IFNAME to {others}, or fix /etc/hosts")
    return Finding("network", text)


def _launcher(machine: Machine) -> Finding:
    try:
        place = detect(machine.environ)
    except ValueError as error:
        return Finding("launcher", "the environment is half set", ERROR, str(error))
    if place.source == "single":
        return Finding("launcher", "none: instep train -n N starts the ranks")
    return Finding("launcher", f"{place.source}: rank {place.rank} of {place.world_size}")


def _backend(machine: Machine) -> Finding:
    place = machine.place
    try:
        on = device.resolve(None, None, place.local_world_size)
    except ValueError as error:
        return Finding("backend", "none by default", ERROR, str(error))
    one_host = place.local_world_size == place.world_size
    name, problem = device.default_backend(on, one_host=one_host), shm_problem()
    if name == "nccl":
        return Finding("backend", "nccl, because every rank of this host has a GPU of its own")
    if name == "shm" and not problem:
        return Finding("backend", "shm, because the ranks share this host")
    reason = f"shared memory does not work: {problem}" if one_host else "the ranks are on several hosts"
    return Finding("backend", f"gloo, because {reason}")


def _switches(machine: Machine) -> Finding:
    given = _set(machine, contract.KERNEL_SWITCHES)
    if not given:
        return Finding("kernel switches", "none set")
    text = f"{', '.join(given)}: other kernels, so other bits than without"
    return Finding(
        "kernel switches", text, WARNING, "set the same on every host and for every resume, or none"
    )


def _determinism(machine: Machine) -> Finding:
    flags = [f"deterministic algorithms {'on' if torch.are_deterministic_algorithms_enabled() else 'off'}"]
    flags.append(f"float32 products {torch.get_float32_matmul_precision()}")
    if not torch.cuda.is_available():
        return Finding(
            "determinism",
            f"{', '.join(flags)}; on CPUs kernels are deterministic with a fixed number of threads",
        )
    if settings := deterministic.missing():
        fix = f"instep train sets it; in a script pass deterministic=True to Run, or: {'; '.join(settings)}"
        return Finding("determinism", ", ".join(flags), WARNING, fix)
    return Finding("determinism", ", ".join(flags))


def _directory(machine: Machine) -> Finding:
    return _writable("run directory", machine.directory.resolve(), "cd elsewhere, or pass --run-dir")


def _temporary(machine: Machine) -> Finding:
    path = Path(tempfile.gettempdir())
    return _writable("temporary files", path, "set TMPDIR: a socket for starting ranks is made there")


def _writable(name: str, path: Path, fix: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding(name, f"{path} cannot be written to ({error.strerror})", ERROR, fix)
    free = shutil.disk_usage(path).free
    text = f"{path}, {free / GIB:.1f} GiB free"
    return Finding(name, text, WARNING, fix) if free < GIB else Finding(name, text)


def memory_limit(root: Path) -> int | None:
    """The bytes that this process's container may use, or None for no limit; ``root`` is "/" but in tests.

    A limit of any ancestor of its control group holds too, and inside a container the group's path may not
    exist in what is mounted.
    """
    limits = [int(text) for text in _read(root, "memory.max") if text.isdecimal()]
    return min(limits, default=None)


def cpu_limit(root: Path) -> float | None:
    """How many cores' worth of time its container may use, or None for no limit."""
    pairs = (text.split() for text in _read(root, "cpu.max"))
    limits = [int(quota) / int(period) for quota, period in pairs if quota.isdecimal()]
    return min(limits, default=None)


def _read(root: Path, name: str) -> Iterator[str]:
    """File ``name`` of the process's control group and of its ancestors."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = PurePosixPath(next((line[3:] for line in lines if line.startswith("0::")), "/"))
        for group in (own, *own.parents):
            with suppress(OSError):
                yield (root / "sys/fs/cgroup" / str(group).lstrip("/") / name).read_text().strip()


CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "python": _python,
    "torch": _torch,
    "cpu": _cpu,
    "cores": _cores,
    "threads": _threads,
    "memory": _memory,
    "gpu": _gpu,
    "determinism": _determinism,
    "kernel switches": _switches,
    "launcher": _launcher,
    "backend": _backend,
    "shared memory": _shm,
    "native core": _native,
    "/dev/shm": _dev_shm,
    "open files": _open_files,
    "network": _network,
    "run directory": _directory,
    "temporary files": _temporary,
}


def _verify(num_ranks: int = 2) -> tuple[Finding, StrategyReports]:
    try:
        verified = verify_strategies(num_ranks)
    except (RankFailed, InstepError) as error:
        fix = "if it says too little: INSTEP_DEBUG=1 instep train -n 2 --steps 1"
        return Finding("verify", str(error), ERROR, fix), StrategyReports([], [])
    wrong = [report for report in verified.reports if not report["ok"]]
    if wrong:
        text = f"{len(wrong)} of {len(verified.reports)} ways to sum gradients gave a wrong one"
        return Finding("verify", text, ERROR, wrong[0]["cause"]), verified
    ways = f"{len(verified.reports)} ways to sum gradients on {num_ranks} ranks"
    return Finding("verify", f"{ways} gave the gradient of one process"), verified


@dataclass(frozen=True)
class StrategyReports:
    """What ``verify`` has reported for each of ``WAYS``: for JSON, and as a table for people."""

    reports: list[dict[str, Any]]
    tables: list[str]


def verify_strategies(num_ranks: int) -> StrategyReports:
    """Start ``num_ranks`` ranks and have them verify.

    Raises:
        RankFailed: a rank raised, or died.
    """
    with tempfile.TemporaryDirectory(prefix="instep-verify-") as directory:
        path = Path(directory) / "reports.json"
        launch(verify_on_rank, (str(path),), ranks=num_ranks)
        return StrategyReports(**json.loads(path.read_text()))


def verify_on_rank(path: str) -> None:
    """One rank's part; rank 0 writes the ``StrategyReports`` to ``path``."""
    mesh = init(timeout_s=TIMEOUT_S)
    module, batch = trial(mesh.rank)
    module.to(mesh.device)
    reports = []
    for strategy, ordered in follow(WAYS, "verify", quiet=mesh.rank != 0):
        model = DataParallel(module, process_group=mesh, strategy=strategy, ordered=ordered)
        reports.append(model.verify(batch.to(mesh.device), trial_loss))
        model.close()
    if mesh.rank == 0:
        verified = StrategyReports([report.to_dict() for report in reports], list(map(str, reports)))
        Path(path).write_text(json.dumps(asdict(verified)))
    mesh.close()


def trial(rank: int) -> tuple[nn.Module, Tensor]:
    """A model small enough to take no time, and a batch of ``rank``; the ranks' batches differ in size."""
    module = GPT(TRIAL_MODEL)
    initialize(module, seed=0)
    generator = torch.Generator().manual_seed(derive(0, "proof", rank) % (1 << 31))
    tokens = torch.randint(TRIAL_MODEL.vocab_size, (2 + rank, TRIAL_MODEL.context + 1), generator=generator)
    return module, tokens


def trial_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that goes with ``trial``."""
    logits = model(tokens[:, :-1].contiguous())  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
