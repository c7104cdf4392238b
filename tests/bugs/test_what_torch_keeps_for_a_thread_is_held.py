"""torch 2.10 keeps an object for a thread without a reference of its own, and gives one back when it lets go.

``ThreadedReplicas`` has it keep a replica, which was freed with a reference too few: in a declared step the
program ended by a segmentation fault.
"""

from __future__ import annotations

import sys

import torch

from instep.replicate.thread_pool import keep_for_thread


def test_it_has_one_reference_more_while_it_is_kept():
    value = object()
    before = sys.getrefcount(value)
    keep_for_thread("a test", value)
    assert sys.getrefcount(value) == before + 1
    assert torch._C._get_obj_in_tls("a test") is value
    keep_for_thread("a test", None)
    assert sys.getrefcount(value) == before
