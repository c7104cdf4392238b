"""The public names and errors, hooks that survive copies, and memory."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import instep
from instep import errors
from instep.hook import Hook
from instep.memory import align_bytes, allocate


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "InstepError"])
def test_every_error_is_caught_by_the_base_and_shows_its_public_name(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.InstepError)
    assert issubclass(kind, RuntimeError)
    assert f"{kind.__module__}.{kind.__qualname__}" == f"instep.errors.{name}"
    assert f"── {name} " in (errors.__doc__ or "")


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerLost("rank 3 died", ranks=[3, 5], operation="the exchange of bucket 0"),
        errors.ReplicasDiffer("rank 2 is odd", ranks=[2], parameters=["weight", "bias"]),
        errors.Diverged("nan", ranks=[1], parameter="weight"),
        errors.Diverged("nobody knows"),
    ],
)
def test_an_error_arrives_whole_in_another_process(error):
    arrived = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
    assert isinstance(arrived.ranks, tuple)


OBJECTS = [name for name in instep.__all__ if not name.startswith("__")]


def test_the_names_are_sorted_and_few():
    assert list(instep.__all__) == sorted(set(instep.__all__))
    assert len(instep.__all__) <= 24


def test_the_names_are_all_that_a_user_sees():
    assert dir(instep) == list(instep.__all__)
    with pytest.raises(AttributeError, match="module 'instep' has no attribute 'Data'"):
        instep.Data  # noqa: B018


@pytest.mark.parametrize("name", OBJECTS)
def test_every_name_can_be_imported_and_says_so(name):
    public = getattr(instep, name)
    assert public is getattr(instep, name)
    if isinstance(public, ModuleType):
        assert public.__name__ == f"instep.{name}"
    else:
        assert public.__module__ == "instep"


def test_errors_carry_the_public_path():
    for name in instep.errors.__all__:
        assert getattr(instep.errors, name).__module__ == "instep.errors"


def test_importing_instep_imports_no_torch():
    code = "import sys, instep; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def counting(module: nn.Module) -> list[str]:
    """Notes of every forward of ``module``."""
    notes: list[str] = []
    module.register_forward_pre_hook(Hook(lambda *_: notes.append("forward")))
    return notes


def test_a_deep_copy_of_a_module_is_silent():
    module = nn.Linear(2, 2)
    notes = counting(module)
    copy.deepcopy(module)(torch.ones(1, 2))
    assert notes == []
    module(torch.ones(1, 2))
    assert notes == ["forward"]


def test_a_module_with_a_closure_for_a_hook_can_be_sent_to_a_child_process():
    module = nn.Linear(2, 2)
    notes = counting(module)
    arrived = ForkingPickler.loads(ForkingPickler.dumps(copy.deepcopy(module)))
    assert torch.equal(arrived(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert notes == ["forward"]


@given(st.integers(0, 5000), st.sampled_from([1, 16, 64, 256, 4096]))
@settings(deadline=None)
def test_every_segment_begins_on_an_aligned_address(nbytes, align):
    segment = allocate(nbytes, align)
    assert segment.tensor.data_ptr() % align == 0
    assert segment.tensor.shape == (nbytes,)
    assert segment.tensor.dtype == torch.uint8
    assert segment.tensor.device.type == "cpu"


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("cuda", 256), ("cuda:1", 256), ("xpu", 256)])
def test_a_vector_register_on_cpu_and_more_elsewhere(device, expected):
    assert align_bytes(torch.device(device)) == expected


def test_much_memory_is_given_back_with_its_last_tensor_whichever_thread_took_it():
    """malloc keeps it for the thread, and the next thread takes from elsewhere."""
    before = num_resident()
    for _ in range(3):  # once blocks of a size were freed, malloc maps them no more
        view = threads_allocate()
        assert view.item() == 1
        del view
    assert num_resident() <= before + (8 << 20)


def threads_allocate():
    """Four threads at a time take 8 MB each, which are dropped but for a view of one."""
    segments, arrived = [], threading.Barrier(4)

    def take():
        arrived.wait()  # all live at the same time: as many arenas
        segments.append(allocate(8 << 20, 64))
        segments[-1].tensor.fill_(1)
        arrived.wait()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return segments[0].tensor[-1:]


def num_resident():
    """Bytes of private memory of no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10
