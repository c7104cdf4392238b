"""Memory is aligned, as long as was asked for, and one's own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.memory import align_bytes, allocate


@given(st.integers(0, 5000), st.sampled_from([1, 16, 64, 256, 4096]))
@settings(deadline=None)
def test_every_segment_begins_on_an_aligned_address(nbytes, align):
    segment = allocate(nbytes, align)
    assert segment.tensor.data_ptr() % align == 0
    assert segment.tensor.shape == (nbytes,)
    assert segment.tensor.dtype == torch.uint8
    assert segment.tensor.device.type == "cpu"


def test_segments_do_not_share_memory():
    segments = [allocate(100, 64) for _ in range(20)]
    for number, segment in enumerate(segments):
        segment.tensor.fill_(number)
    for number, segment in enumerate(segments):
        assert set(segment.tensor.tolist()) == {number}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_a_segment_is_seen_as_elements_of_any_dtype(dtype):
    segment = allocate(128, 64)
    elements = segment.elements(dtype)
    assert elements.numel() * dtype.itemsize == 128
    elements.fill_(3)
    assert bytes(segment.tensor.tolist()) == bytes(torch.full_like(elements, 3).view(torch.uint8).tolist())


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
