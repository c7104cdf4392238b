"""``instep show``: what it prints fits a terminal, and is what the algorithm does."""

from itertools import pairwise

import pytest

from instep.cli.exit_codes import DONE
from instep.cli.show import MOST_RANKS, PHASES, WIDTH, algorithms, chosen, lines, main

EVERY = sorted(set(algorithms().values()))

# As in the drawing of ``comm/ring.py``, where 3 ranks add their parts in turn: bca, cab, abc.
RING = """\
all-reduce by ring on 3 ranks (instep/comm/ring.py)

a to c   what ranks 0 to 2 begin with; abc is a sum, in that order
[j]      part j of x, which is cut into 3
>        has just arrived

part     0    1    2
start
 rank 0  a    a    a
 rank 1  b    b    b
 rank 2  c    c    c

reduce-scatter: parts are added on the way; each rank ends with the sum of one
round 1  0 -> 1 [2]   1 -> 2 [0]   2 -> 0 [1]
 rank 0  a   >ca   a
 rank 1  b    b   >ab
 rank 2 >bc   c    c

round 2  0 -> 1 [1]   1 -> 2 [2]   2 -> 0 [0]
 rank 0 >bca  ca   a
 rank 1  b   >cab  ab
 rank 2  bc   c   >abc

all-gather: finished parts are passed on, until each rank has all of them
round 3  0 -> 1 [0]   1 -> 2 [1]   2 -> 0 [2]
 rank 0  bca  ca  >abc
 rank 1 >bca  cab  ab
 rank 2  bc  >cab  abc

round 4  0 -> 1 [2]   1 -> 2 [0]   2 -> 0 [1]
 rank 0  bca >cab  abc
 rank 1  bca  cab >abc
 rank 2 >bca  cab  abc

rounds                                  4
messages                               12
bytes sent by the busiest rank    1.333 S
bytes sent by all                     4 S

time     4 alpha + 1.333 S beta
alpha    latency: seconds per message, whatever its size
beta     seconds per byte: 1 / bandwidth
S        bytes of x

with alpha = 20 us and beta = 1 ns (1 GB/s):
S = 1 kB   0.08 ms of latency + 0.00133 ms of bytes = 0.0813 ms
S = 100 MB 0.08 ms of latency + 133 ms of bytes = 133 ms
"""
TREE = """\
broadcast by tree on 6 ranks (instep/comm/binomial_tree.py)

a        what rank 0 begins with
.        not there yet
>        has just arrived

rank     0    1    2    3    4    5
start
         a    .    .    .    .    .

round 1  0 -> 4
         a    .    .    .   >a    .

round 2  0 -> 2   4 -> 5
         a    .   >a    .    a   >a

round 3  0 -> 1   2 -> 3
         a   >a    a   >a    a    a
"""


def test_a_ring_of_three(capsys):
    assert main(["ring", "-n", "3"]) == DONE
    assert capsys.readouterr().out == RING


def test_a_tree_of_six(capsys):
    assert main(["broadcast-tree", "-n", "6"]) == DONE
    assert capsys.readouterr().out.startswith(TREE)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_line_fits_a_terminal(collective, name):
    for size in range(2, MOST_RANKS + 1):
        printed = list(lines(collective, name, size))
        assert max(map(len, printed)) <= WIDTH
        assert not any(line != line.rstrip() for line in printed)


@pytest.mark.parametrize(
    ("word", "size", "phases"),
    [
        ("naive", 4, {1: "reduce", 4: "broadcast"}),
        ("direct", 4, {1: "reduce-scatter", 4: "all-gather"}),
        ("halving-doubling", 4, {1: "reduce-scatter", 3: "all-gather"}),
        ("halving-doubling", 3, {1: "reduce", 2: "reduce-scatter", 3: "all-gather", 4: "broadcast"}),
        ("recursive-doubling", 3, {1: "reduce", 2: "all-reduce", 3: "broadcast"}),
        ("scatter-allgather", 6, {1: "scatter", 3: "all-gather"}),
        ("recursive-doubling", 4, {}),  # one phase alone needs no name
        ("all-gather-ring", 4, {}),
    ],
)
def test_an_algorithm_of_several_collectives_names_each_where_it_begins(word, size, phases):
    printed = list(lines(*chosen(word), size))
    named = {after: line for line, after in pairwise(printed) if line.partition(": ")[0] in PHASES}
    assert {int(after.split()[1]): line.partition(": ")[0] for after, line in named.items()} == phases


@pytest.mark.parametrize(
    ("word", "chosen_one"),
    [
        ("ring", ("all_reduce", "ring")),
        ("tree", ("broadcast", "tree")),
        ("reduce-tree", ("reduce", "tree")),
        ("halving_doubling", ("all_reduce", "halving_doubling")),
        ("all-gather-ring", ("all_gather", "ring")),
        ("reduce-broadcast", ("all_reduce", "reduce_broadcast")),
    ],
)
def test_words_are_those_of_the_benchmark_and_the_collective_before_them_if_need_be(word, chosen_one):
    assert chosen(word) == chosen_one
