"""The launch environment: a process's rank and world, read from the variables its launcher set. Pure.

Launchers nest: torchrun runs under Slurm, ``mpirun`` starts its daemons with ``srun``, a pod runs torchrun.
The process then sees the variables of all of them, and those of the outer ones describe the launcher, not
us. So the innermost wins: instep's own launcher, then plain ``RANK``, then Open MPI, Slurm, and ``PET_*``.

    source     set by                          who holds the store
    instep     ``launch`` on this host         a file
    torchrun   torchrun                        torchrun itself
    env        any other that sets RANK        rank 0
    openmpi    mpirun                          rank 0
    slurm      srun                            rank 0
    pet        a Kubeflow pod, no torchrun     rank 0
    single     no launcher                     there is none

A partially set environment is an error: eight worlds of one would train where one of eight was meant.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

# Below the ports that Linux assigns by itself (32768 on) and torchrun's own (29400, 29500).
FIRST_PORT, NUM_PORTS = 10000, 19000
# Step ids of Slurm that belong to no srun start here: batch script, interactive shell, extern, pending.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
LAUNCH_DIGITS = 16
LOOPBACK_ADDR = "127.0.0.1"

FIXES = {
    "instep": "unset INSTEP_STORE, which is only for ranks that instep starts",
    "env": "start the program with torchrun, or unset RANK and WORLD_SIZE for a world of one",
    "openmpi": "start the program with mpirun, or unset the OMPI_COMM_WORLD_* variables",
    "slurm": "start the program with srun, or unset SLURM_STEP_ID for a world of one",
    "pet": "start the program with torchrun, which reads the PET_* variables",
}

# By the rank that it gives a process, the number of ranks: MPICH and Intel MPI, PMIx, MVAPICH2, Flux, PALS, a
# part of torchrun's, and Slurm where no step is named (in a batch script the rank is 0).
OTHER_LAUNCHERS = {
    "PMI_RANK": "PMI_SIZE",
    "PMIX_RANK": "PMIX_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "PALS_RANKID": "PALS_SIZE",
    "LOCAL_RANK": "LOCAL_WORLD_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
}


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process of a world. Ranks count from 0; ``local_*`` are among the processes of this host.

    The store is at ``master_addr`` and ``master_port``; unless ``source`` is "torchrun", rank 0 opens it
    there. They are None with a ``store_file``, and may be None in a world of one. ``local_world_size`` is a
    lower bound unless ``tells_local``. ``launch`` identifies this start by torchrun, and is the same after
    each of its restarts on this host; "" if unknown.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "single"
    master_addr: str | None = None
    master_port: int | None = None
    store_file: str | None = None
    restart_count: int = 0
    launch: str = ""
    tells_local: bool = True

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host. Every rank of a world finds the same."""
        all_here = self.tells_local and self.local_world_size == self.world_size
        on_loopback = self.master_addr == "localhost" or is_address_of_loopback(self.master_addr)
        return self.world_size == 1 or all_here or on_loopback

    @property
    def store_addr(self) -> str | None:
        """Where rank 0 opens the store: ``master_addr``, but on one host never an address of the network."""
        if self.master_addr is None or not self.one_host or is_address_of_loopback(self.master_addr):
            return self.master_addr
        return LOOPBACK_ADDR


def detect(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place of this process according to ``environ``.

    Raises:
        ValueError: a variable is missing, is no number, or contradicts another; the message names it.
    """
    if "INSTEP_STORE" in environ:
        return _instep(_Variables(environ, "instep"))
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _env(_Variables(environ, "env"))
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _openmpi(_Variables(environ, "openmpi"))
    if _started_by_srun(_Variables(environ, "slurm")):
        return _slurm(_Variables(environ, "slurm"))
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ:
        return _pet(_Variables(environ, "pet"))
    _require_alone(environ)
    return LaunchEnvironment()


def _require_alone(environ: Mapping[str, str]) -> None:
    """ValueError if another launcher says that this process is one of several."""
    if environ.get("SLURM_NTASKS") == "1":
        return
    for rank, size in OTHER_LAUNCHERS.items():
        value = environ.get(rank)
        if value is not None and environ.get(size) != "1" and (value, rank) != ("0", "SLURM_PROCID"):
            raise ValueError(
                f"{rank} is {value!r}: this process is one of several, of a launcher whose world is not "
                "known here. Start it with torchrun, srun or Open MPI's mpirun, or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process; for a world of "
                f"one, unset {rank}"
            )


def is_address_of_loopback(host: str | None) -> bool:
    """Whether ``host`` is the number of an address that other hosts cannot reach."""
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def first_host(nodelist: str) -> str:
    """The first name in Slurm's notation: ``node[003-010,12],gpu7`` begins with ``node003``."""
    entry = re.match(r"(?:[^\s,\[\]]|\[\w[\w,-]*\])+", nodelist)
    if entry is None or nodelist[entry.end() :][:1] not in ("", ","):
        raise ValueError(f"expected host names like node[003-010,12],gpu7 from Slurm, got {nodelist!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[0])


def tasks_on_node(counts: str, node: int) -> int:
    """Entry ``node`` of Slurm's run-length notation: ``2(x3),1`` is 2, 2, 2, 1."""
    runs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run) for run in counts.split(",")]
    tasks = [int(run[1]) for run in runs if run is not None for _ in range(int(run[2] or 1))]
    if None in runs or node >= len(tasks):
        raise ValueError(
            f"expected Slurm's tasks per node like 2(x3),1 with an entry for every node, got {counts!r}"
        )
    return tasks[node]


class _Variables:
    """An environment that ``source`` is taken to have set: a gap is an error with its fix."""

    def __init__(self, environ: Mapping[str, str], source: str) -> None:
        self.environ = environ
        self.fix = FIXES[source]

    def text(self, name: str) -> str:
        value = self.environ.get(name)
        self.require(bool(value), f"{name} in the environment, got none")
        return value or ""

    def number(self, name: str, *, least: int = 0, default: int | None = None) -> int:
        if default is not None and name not in self.environ:
            return default
        value = self.text(name)
        self.require(
            value.isdecimal() and int(value) >= least,
            f"a whole number, at least {least}, in {name}, got {value!r}",
        )
        return int(value)

    def position(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """A rank, and the number of ranks."""
        rank, size = self.number(rank_name), self.number(size_name, least=1)
        self.require(rank < size, f"{rank_name} below {size_name}, got {rank} of {size}")
        return rank, size

    def master(self, addr: str | None, port_key: str | None) -> tuple[str, int]:
        """``MASTER_ADDR`` and ``MASTER_PORT``, which a user may set, else ``addr`` and a derived port."""
        port = None if port_key is None else FIRST_PORT + zlib.crc32(port_key.encode()) % NUM_PORTS
        found = self.environ.get("MASTER_ADDR") or addr or self.text("MASTER_ADDR")
        number = self.number("MASTER_PORT", least=1, default=port)
        self.require(number < 65536, f"MASTER_PORT below 65536, got {number}")
        return found, number

    def require(self, condition: bool, expected: str) -> None:
        if not condition:
            raise ValueError(f"expected {expected}: {self.fix}")


def _instep(variables: _Variables) -> LaunchEnvironment:
    world = variables.position("RANK", "WORLD_SIZE")
    local = variables.position("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return LaunchEnvironment(*world, *local, "instep", store_file=variables.text("INSTEP_STORE"))


def _env(variables: _Variables) -> LaunchEnvironment:
    rank, world_size = variables.position("RANK", "WORLD_SIZE")
    if "LOCAL_RANK" not in variables.environ:
        # Kubeflow's PyTorchJob sets RANK and WORLD_SIZE for a pod whose torchrun would start several.
        _one_process_per_pod(variables)
    local_rank = variables.number("LOCAL_RANK", default=0)
    local_world_size = variables.number("LOCAL_WORLD_SIZE", least=1, default=local_rank + 1)
    variables.require(
        local_rank < local_world_size <= world_size,
        f"LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE, got {local_rank}, {local_world_size}, {world_size}",
    )
    alone = world_size == 1 and "MASTER_ADDR" not in variables.environ
    addr, port = (None, None) if alone else variables.master(None, None)
    found = LaunchEnvironment(rank, world_size, local_rank, local_world_size, "env", addr, port)
    restarts = variables.number("TORCHELASTIC_RESTART_COUNT", default=0)
    found = replace(found, restart_count=restarts, tells_local="LOCAL_WORLD_SIZE" in variables.environ)
    # torch's own name for "the agent holds the store, under one prefix per restart".
    if variables.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return found
    launch = _launch(variables.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return replace(found, source="torchrun", launch=launch)


def _launch(error_file: str) -> str:
    """A hash of the directory that torchrun has made for its ranks, under two random names, until it ends.

    A rank's file for errors is ``<directory>/attempt_<restarts>/<local rank>/error.json``.
    """
    path = PurePath(error_file)
    if len(path.parents) < 4 or not path.parents[1].name.startswith("attempt_"):
        return ""
    return hashlib.sha256(str(path.parents[2]).encode()).hexdigest()[:LAUNCH_DIGITS]


def _openmpi(variables: _Variables) -> LaunchEnvironment:
    world = variables.position("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = variables.position("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    one_host = local[1] == world[1]
    if not one_host and "MASTER_ADDR" not in variables.environ:
        raise ValueError(
            f"mpirun spans hosts (world size {world[1]}, {local[1]} here), and does not tell a rank where "
            "rank 0 is: pass -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> to it"
        )
    # Equal on all ranks of a job, different for two jobs of one host: Open MPI 4 and 5, then 4 alone.
    job = variables.environ.get("PMIX_NAMESPACE") or variables.environ.get("OMPI_MCA_ess_base_jobid")
    master = variables.master(LOOPBACK_ADDR if one_host else None, job)
    return LaunchEnvironment(*world, *local, "openmpi", *master)


def _started_by_srun(variables: _Variables) -> bool:
    """Whether srun started this task, one of several.

    A batch script and an interactive shell inside an allocation carry the same variables, of a step with a
    special id; ``python`` typed there means one process.
    """
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"} <= variables.environ.keys():
        return False
    is_step = variables.number("SLURM_STEP_ID") < FIRST_SPECIAL_STEP
    return is_step and variables.number("SLURM_NTASKS", least=1) > 1


def _slurm(variables: _Variables) -> LaunchEnvironment:
    rank, world_size = variables.position("SLURM_PROCID", "SLURM_NTASKS")
    local_rank = variables.number("SLURM_LOCALID")
    # The tasks of this step on this node: what Slurm did, before what the user requested.
    counts = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name := next((name for name in counts if name in variables.environ), None):
        local_world_size = tasks_on_node(variables.text(name), variables.number("SLURM_NODEID"))
    else:
        local_world_size = variables.number("SLURM_NTASKS_PER_NODE", least=1)
    variables.require(
        local_rank < local_world_size <= world_size,
        f"SLURM_LOCALID below the tasks of this node, got {local_rank} of {local_world_size}",
    )
    # The step may use fewer nodes than its job; rank 0 is on the first of the step's.
    nodes = variables.environ.get("SLURM_STEP_NODELIST") or variables.text("SLURM_JOB_NODELIST")
    # Two steps of one job may run at a time on one node.
    step = f"{variables.number('SLURM_JOB_ID')}.{variables.number('SLURM_STEP_ID')}"
    master = variables.master(first_host(nodes), step)
    restarts = variables.number("SLURM_RESTART_COUNT", default=0)
    found = LaunchEnvironment(rank, world_size, local_rank, local_world_size, "slurm", *master)
    return replace(found, restart_count=restarts)


def _pet(variables: _Variables) -> LaunchEnvironment:
    _one_process_per_pod(variables)
    rank, world_size = variables.position("PET_NODE_RANK", "PET_NNODES")
    addr = variables.text("PET_MASTER_ADDR")
    port = variables.number("PET_MASTER_PORT", least=1)
    return LaunchEnvironment(rank, world_size, source="pet", master_addr=addr, master_port=port)


def _one_process_per_pod(variables: _Variables) -> None:
    """Outside torchrun a pod is one process, whatever number its torchrun was meant to start."""
    value = variables.environ.get("PET_NPROC_PER_NODE", "1")
    if value != "1":
        raise ValueError(
            f"PET_NPROC_PER_NODE is {value!r}, but this process was not started by torchrun: "
            "make torchrun the command of the pod, or set it to 1"
        )
