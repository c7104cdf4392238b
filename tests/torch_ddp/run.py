"""torch's own tests of ``DistributedDataParallel``, with ``instep.DataParallel`` in its place.

They come with torch, as ``torch.testing._internal.distributed.distributed_test``, and need the package
``expecttest``. Most want a GPU per rank; those that wrap a model without one are run, over gloo.

    python tests/torch_ddp/run.py             what passes, and why something does not
    python tests/torch_ddp/run.py --torch     the same tests of torch's own class

A test runs in two processes, forked from this one, which has imported all of it. Exit code 1 if another test
than those of ``DOES_NOT`` fails, or one of them passes.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import unittest
from typing import Any

# torch's tests read it when they are imported.
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = "60"

import torch
from torch import nn
from torch.testing._internal.distributed import distributed_test as theirs

import instep

# All that wrap a model and are not skipped where there is no GPU.
PASSES = (
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_grads_same_across_ranks_with_no_sync",
)
SAVED = "at its end it pickles model.module in the place of the wrapper, which cannot be pickled"
PASSES_BUT_FOR = dict.fromkeys(
    ("test_DistributedDataParallelCPU", "test_DistributedDataParallelCPU_grad_is_view"), SAVED
)
DOES_NOT = {
    "test_ddp_logging_data_cpu": "it reads the private log of torch's C++ reducer (_get_ddp_logging_data)",
    "test_static_graph_api_cpu": "it calls _set_static_graph(): pass static_graph=True when wrapping",
}


class TheirTests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    """torch's tests, in processes that are forked."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Listed(unittest.TestResult):
    """Prints a line per test."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        name = test._testMethodName
        print(f"pass       {name}" + (f"\n           {why}" if (why := PASSES_BUT_FOR.get(name)) else ""))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._not(test, f"was skipped: {reason}")

    def addError(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._not(test, DOES_NOT.get(test._testMethodName) or str(error[1]))

    addFailure = addError  # noqa: N815

    def _not(self, test: unittest.TestCase, why: str) -> None:
        self.failed.append(test._testMethodName)
        print(f"does not   {test._testMethodName}\n           {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="test torch's own class")
    parser.add_argument("names", nargs="*", help="of tests; by default all that run on a CPU")
    arguments = parser.parse_args()
    if not arguments.torch:
        replace_theirs()
    logging.disable()
    names = arguments.names or sorted([*PASSES, *PASSES_BUT_FOR, *DOES_NOT])
    result = Listed()
    with tempfile.TemporaryDirectory() as directory:  # they leave files behind
        tempfile.tempdir = os.environ["TMPDIR"] = directory
        for name in names:
            TheirTests(name).run(result)
        tempfile.tempdir = None
    expected = {} if arguments.torch else DOES_NOT
    return int(set(result.failed) != {name for name in names if name in expected})


def replace_theirs() -> None:
    """``instep.DataParallel`` is what torch's tests find under the name of torch's class."""
    nn.parallel.DistributedDataParallel = theirs.DistributedDataParallel = instep.DataParallel  # type: ignore
    save = torch.save
    torch.save = lambda model, file: save(getattr(model, "module", model), file)


if __name__ == "__main__":
    sys.exit(main())
