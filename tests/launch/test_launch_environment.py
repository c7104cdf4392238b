"""Every launcher's environment is read as its manual promises, and half of one is an error."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace

import pytest

from instep.launch.launch_environment import (
    FIRST_PORT,
    FIRST_SPECIAL_STEP,
    NUM_PORTS,
    LaunchEnvironment,
    detect,
    first_host,
    tasks_on_node,
)

INSTEP = {
    "INSTEP_STORE": "/tmp/x/store",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
# Two hosts of two, this is the first process of the second.
ENV = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "29500",
}
TORCHRUN = ENV | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
# Three nodes with 2, 2 and 1 tasks, this is the last.
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "node[003-006],gpu7",
    "SLURM_STEP_NODELIST": "node[004-005],gpu7",
}
PET = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0",
    "PET_MASTER_PORT": "29400",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
ON_TWO_HOSTS = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
INTERACTIVE = {"SLURM_STEP_ID": str(FIRST_SPECIAL_STEP + 10), "SLURM_PROCID": "0"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


TORCHRUN_PLACE = LaunchEnvironment(2, 4, 0, 2, "torchrun", "host-a", 29500, restart_count=3)

PLACES = {
    "nothing is a world of one": ({"PATH": "/bin", "OMP_NUM_THREADS": "4"}, LaunchEnvironment()),
    "torchrun": (TORCHRUN, TORCHRUN_PLACE),
    "variables set by hand": (ENV, LaunchEnvironment(2, 4, 0, 2, "env", "host-a", 29500)),
    "torchrun without a store of its own": (
        ENV | {"TORCHELASTIC_RESTART_COUNT": "3"},
        replace(TORCHRUN_PLACE, source="env"),
    ),
    "a launcher that says nothing of its host": (
        without(ENV, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        LaunchEnvironment(2, 4, 0, 1, "env", "host-a", 29500, tells_local=False),
    ),
    "a launcher that says the local rank only": (
        without(ENV, "LOCAL_WORLD_SIZE") | {"LOCAL_RANK": "2"},
        LaunchEnvironment(2, 4, 2, 3, "env", "host-a", 29500, tells_local=False),
    ),
    "one process needs no master": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        LaunchEnvironment(source="env", tells_local=False),
    ),
    "instep inside everything": (
        SLURM | OPENMPI | PET | TORCHRUN | INSTEP,
        LaunchEnvironment(1, 2, 1, 2, "instep", store_file="/tmp/x/store"),
    ),
    "torchrun, with the directory of its logs": (
        TORCHRUN | {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_ab/none_cd/attempt_3/0/error.json"},
        replace(TORCHRUN_PLACE, launch=hashlib.sha256(b"/tmp/torchelastic_ab/none_cd").hexdigest()[:16]),
    ),
    "torchrun, with a file for errors of the user's": (
        TORCHRUN | {"TORCHELASTIC_ERROR_FILE": "/home/me/a/b/error.json"},
        TORCHRUN_PLACE,
    ),
    "torchrun inside Slurm and a pod": (SLURM | PET | {"PET_NPROC_PER_NODE": "2"} | TORCHRUN, TORCHRUN_PLACE),
    "pod without torchrun": (PET, LaunchEnvironment(1, 3, 0, 1, "pet", "job-node-0", 29400)),
    "a batch script is one process": (
        without(SLURM, "SLURM_STEP_ID") | {"SLURM_PROCID": "0"},
        LaunchEnvironment(),
    ),
    "an interactive shell is one process": (SLURM | INTERACTIVE, LaunchEnvironment()),
    "a step of one task is one process": (
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "PMI_RANK": "0", "PMIX_RANK": "0"},
        LaunchEnvironment(),
    ),
    "a step of fewer tasks than its job has room for, whose rank PMI says too": (
        SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5", "SLURM_TASKS_PER_NODE": "4(x3)"},
        LaunchEnvironment(4, 5, 0, 1, "slurm", "node004", FIRST_PORT + zlib.crc32(b"1234.0") % NUM_PORTS),
    ),
    "MPICH, of one process": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, LaunchEnvironment()),
}


@pytest.mark.parametrize(("environ", "expected"), PLACES.values(), ids=PLACES.keys())
def test_the_place_that_the_launcher_meant(environ: dict[str, str], expected: LaunchEnvironment) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "name", "jobs"),
    [
        (SLURM, "SLURM_JOB_ID", range(8)),
        (SLURM, "SLURM_STEP_ID", range(8)),
        (OPENMPI, "PMIX_NAMESPACE", [f"prterun-host-{number}@1" for number in range(8)]),
    ],
)
def test_two_jobs_or_steps_of_one_node_do_not_share_a_port(environ, name, jobs) -> None:
    ports = {detect(environ | {name: str(job)}).master_port for job in jobs}
    assert len(ports) == 8
    assert all(port is not None and FIRST_PORT <= port < FIRST_PORT + NUM_PORTS for port in ports)


def test_all_tasks_of_a_step_find_the_same_master_on_its_first_node() -> None:
    nodes = {4: ("2", "0"), 3: ("1", "1"), 0: ("0", "0")}
    places = [
        detect(SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": node, "SLURM_LOCALID": local})
        for rank, (node, local) in nodes.items()
    ]
    assert [place.local_world_size for place in places] == [1, 2, 2]
    assert {(place.source, place.master_addr, place.master_port) for place in places} == {
        ("slurm", "node004", places[0].master_port)
    }
    restarted = detect(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert restarted == replace(places[0], restart_count=1)
    assert (restarted.rank, restarted.world_size, restarted.local_rank) == (4, 5, 0)


ON_ONE_HOST = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "one_host", "store_addr"),
    [
        ({}, True, None),
        (ENV, False, "host-a"),
        (ENV | ON_ONE_HOST, True, "127.0.0.1"),
        (ENV | ON_ONE_HOST | {"MASTER_ADDR": "127.0.1.1"}, True, "127.0.1.1"),
        (ENV | {"MASTER_ADDR": "localhost"}, True, "127.0.0.1"),
        (ENV | {"MASTER_ADDR": "::1"}, True, "::1"),
        (OPENMPI, True, "127.0.0.1"),
        (OPENMPI | {"MASTER_ADDR": "10.0.0.1"}, True, "127.0.0.1"),
        (OPENMPI | ON_TWO_HOSTS | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, False, "10.0.0.1"),
        (PET, False, "job-node-0"),
    ],
)
def test_ranks_of_one_host_meet_on_loopback(environ: dict[str, str], one_host: bool, store_addr: str) -> None:
    environ = environ | ({"RANK": "1"} if environ.get("WORLD_SIZE") == "2" else {})
    place = detect(environ)
    assert (place.one_host, place.store_addr) == (one_host, store_addr)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_told_their_local_number_alone_do_not_guess_differently(rank: int) -> None:
    place = detect(
        without(ENV, "LOCAL_WORLD_SIZE")
        | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        | {"WORLD_SIZE": "2"}
    )
    assert (place.one_host, place.store_addr) == (False, "host-a")


def test_what_the_user_says_of_the_master_wins() -> None:
    said = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    for environ in (SLURM, OPENMPI, OPENMPI | ON_TWO_HOSTS):
        place = detect(environ | said)
        assert (place.master_addr, place.master_port) == ("10.0.0.1", 4000)


def test_mpirun_is_not_the_world_of_its_daemons_under_slurm() -> None:
    place = detect(SLURM | OPENMPI)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 1, 2)
    assert (place.source, place.master_addr) == ("openmpi", "127.0.0.1")


ERRORS = {
    "no world size": (without(ENV, "WORLD_SIZE"), "expected WORLD_SIZE .* torchrun"),
    "no master": (without(ENV, "MASTER_ADDR"), "expected MASTER_ADDR"),
    "rank is a word": (ENV | {"RANK": "one"}, "whole number, at least 0, in RANK, got 'one'"),
    "rank is too large": (ENV | {"RANK": "4"}, "RANK below WORLD_SIZE, got 4 of 4"),
    "a world of none": (ENV | {"WORLD_SIZE": "0"}, "at least 1, in WORLD_SIZE"),
    "local rank is too large": (ENV | {"LOCAL_RANK": "2"}, "LOCAL_RANK < LOCAL_WORLD_SIZE"),
    "port is too large": (ENV | {"MASTER_PORT": "70000"}, "MASTER_PORT below 65536, got 70000"),
    "stale store": (without(INSTEP, "RANK"), "expected RANK .* unset INSTEP_STORE"),
    "empty store": (INSTEP | {"INSTEP_STORE": ""}, "expected INSTEP_STORE"),
    "slurm without nodes": (
        without(SLURM, "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"),
        "SLURM_JOB_NODELIST",
    ),
    "slurm without counts": (without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE .* srun"),
    "slurm contradicts itself": (SLURM | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID below .* got 1 of 1"),
    "pod that wants torchrun": (PET | {"PET_NPROC_PER_NODE": "2"}, "'2', .*torchrun the command"),
    "elastic pod": (PET | {"PET_NNODES": "1:3"}, "PET_NNODES, got '1:3': start the program with torchrun"),
    "PyTorchJob without torchrun": (
        without(ENV, "LOCAL_RANK", "LOCAL_WORLD_SIZE") | {"PET_NPROC_PER_NODE": "2"},
        "PET_NPROC_PER_NODE is '2'",
    ),
    "mpirun across hosts": (OPENMPI | ON_TWO_HOSTS, "world size 2, 1 here.*-x MASTER_ADDR"),
    "MPICH": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK is '1': this process is one of several"),
    "its first process": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is '0'"),
    "PMIx": ({"PMIX_RANK": "0"}, "unset PMIX_RANK"),
    "MVAPICH2": ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK"),
    "Flux": ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, "FLUX_TASK_RANK"),
    "PALS": ({"PALS_RANKID": "1"}, "PALS_RANKID"),
    "Slurm without a step": (without(SLURM, "SLURM_STEP_ID"), "SLURM_PROCID is '4'"),
    "half of torchrun": ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is '0'"),
    "mpirun without a job id": (without(OPENMPI, "PMIX_NAMESPACE"), "expected MASTER_PORT"),
}


@pytest.mark.parametrize(("environ", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_a_half_set_environment_is_an_error_that_names_the_variable(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (first_host, "gpu7", "gpu7"),
        (first_host, "gpu7,gpu8", "gpu7"),
        (first_host, "node[003-010,12],gpu7", "node003"),
        (first_host, "node[12,003-010]", "node12"),
        (first_host, "rack[2-3]-node[08-15]", "rack2-node08"),
        (first_host, "node[1-2].example.org", "node1.example.org"),
        *((first_host, text, None) for text in ("", ",gpu7", "node[", "node[]", "a b", "$(x)[1]]")),
        (
            lambda counts: [tasks_on_node(counts, node) for node in range(6)],
            "2(x3),1,4(x2)",
            [2, 2, 2, 1, 4, 4],
        ),
        *((lambda counts: tasks_on_node(counts, 3), text, None) for text in ("", "2(x)", "two", "2(x3)")),
    ],
)
def test_slurm_s_lists_are_read_or_refused(read, text: str, expected: object) -> None:
    if expected is not None:
        assert read(text) == expected
    else:
        with pytest.raises(ValueError, match=r"expected host names|tasks per node"):
            read(text)
