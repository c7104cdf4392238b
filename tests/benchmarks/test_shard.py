"""The comparison of sharded training steps: short steps, too, end with the same bits."""

import subprocess
import sys

import pytest

from benchmarks.pages import README, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["update", "weights"])
def test_contestants_whose_samples_have_different_numbers_of_steps_end_with_the_same_bits(chosen, tmp_path):
    """Those of small models were compared after different numbers of steps."""
    words = ["--params", "100K", "--samples", "3", "--set", chosen, "--out", tmp_path]
    subprocess.run([sys.executable, "benchmarks/shard/speed.py", *words], cwd=ROOT, check=True)
    assert f"<!-- {chosen} table -->" in (tmp_path / README).read_text()
