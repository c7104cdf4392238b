"""The core under sanitizers, with drawn programs of ranks; and compiled for another processor than this."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from instep.native import build, library

STRESS = Path(__file__).with_name("stress.c")
SANITIZERS = ("thread", "address,undefined")
# What the stress has to notice: slots that are written to again too early, in the middle and at the end;
# words that order nothing.
PLANTED = {
    "two slots": ("(piece % 4) / 2) & 1", "0) & 1"),
    "no room at the end": ("if ((r->rounds & 1) != last_half) r->rounds += 1;", ""),
    "no order": (
        "__atomic_load_n((word), __ATOMIC_SEQ_CST)",
        "__atomic_load_n((word), __ATOMIC_RELAXED)",
    ),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(library.core() is None, reason="there is no compiled native core"),
]


def compiled(folder: Path, sanitizer: str, core: Path = build.SOURCE) -> Path:
    """The stress, or a skip with the reason why there is none."""
    target = folder / f"stress-{sanitizer}"
    flags = ("-std=gnu11", "-O1", "-g", "-ffp-contract=off", f"-fsanitize={sanitizer}", "-pthread")
    command = [*next(build.compilers({})), *flags, "-DINSTEP_ONE_TARGET", f"-I{core.parent}"]
    ended = subprocess.run([*command, str(STRESS), "-o", str(target)], capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {ended.stderr.splitlines()[-1]}")
    return target


def run(stress: Path, words: Sequence[object]) -> subprocess.CompletedProcess[str]:
    # The thread sanitizer does not know some layouts of memory that the kernel draws.
    command = ["setarch", "-R", str(stress), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_two_ranks_touch_what_another_writes_and_every_sum_is_right(tmp_path, sanitizer):
    stress = compiled(tmp_path, sanitizer)
    for ranks in (1, 2, 3, 4, 7):
        for seed in range(4):
            ended = run(stress, (ranks, 250, seed))
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "all sums are right\n", ""), (
                ranks,
                seed,
            )


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(tmp_path, planted):
    right, wrong = PLANTED[planted]
    source = build.SOURCE.read_text()
    assert right in source
    (tmp_path / "core.c").write_text(source.replace(right, wrong))
    stress = compiled(tmp_path, "thread", tmp_path / "core.c")
    assert any(run(stress, (ranks, 300, seed)).returncode for seed in range(3) for ranks in (2, 3))


@pytest.mark.skipif(
    find_spec("ziglang") is None, reason="ziglang, which compiles for aarch64, is not installed"
)
@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "x86_64-linux-gnu.2.17"])
def test_it_compiles_for_both_processors(tmp_path, target):
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *build.FLAGS, "-Werror"]
    build.compile_source(command, tmp_path / "core.so")
    assert (tmp_path / "core.so").read_bytes()[:4] == b"\x7fELF"
