"""``instep show ALGORITHM``: a collective, round by round: each rank's messages, and its parts afterwards."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Annotated

import tyro

from instep.cli.exit_codes import DONE, report_error
from instep.comm.algorithms import SCHEDULES
from instep.comm.cost import CollectiveCost, collective_cost
from instep.comm.play import Message, Played, State, cells_of, play

PROGRAM = "instep show"
WIDTH = 80
MARGIN = 8  # of a line, as wide as "round 12"
GAP = 3  # between two messages
MOST_RANKS = 16
ALPHA_S, BETA_S = 20e-6, 1e-9  # of the example: sockets on one host, 1 GB/s
PHASES = {
    "reduce-scatter": "parts are added on the way; each rank ends with the sum of one",
    "all-gather": "finished parts are passed on, until each rank has all of them",
    "scatter": "each rank gets one part",
    "reduce": "whole tensors are added on the way to one rank",
    "all-reduce": "two ranks swap whole tensors, and both add",
    "broadcast": "the sum is copied to the other ranks",
}


def algorithms() -> dict[str, tuple[str, str]]:
    """Collective and algorithm, by word: "ring" alone is that of the first collective that has one."""
    words: dict[str, tuple[str, str]] = {}
    for collective, schedules in SCHEDULES.items():
        for name in schedules:
            found = collective, name
            words.setdefault(_hyphens(name), found)
            words[_hyphens(f"{collective}_{name}")] = found
    return words


def _hyphens(text: str) -> str:
    return text.replace("_", "-")


def _listed() -> str:
    """A line for each collective, with the words of its algorithms."""
    words = algorithms()
    shortest = {found: word for word, found in reversed(words.items())}
    lines = []
    for collective in SCHEDULES:
        names = [word for found, word in shortest.items() if found[0] == collective]
        lines.append(f"  {_hyphens(collective):16}{', '.join(reversed(names))}")
    return "\n".join(lines)


DESCRIPTION = f"""\
Print a collective, round by round: each rank's messages and parts.

These are the steps that the algorithm itself executes (instep/comm), without a process or a tensor. The last
lines count rounds, messages and bytes, and their cost in the alpha-beta model.

Algorithms, by collective:
{_listed()}

Exit codes: 0 done, 1 failed, 2 usage.\
"""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The options of ``instep show``."""

    algorithm: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ALGORITHM")]
    """One of those above, such as ring, halving-doubling or broadcast-tree."""
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 4
    """Number of ranks, 2 to 16."""


def main(args: Sequence[str]) -> int:
    """Print what ``args`` ask for; return the exit code."""
    try:
        options = tyro.cli(ShowOptions, prog=PROGRAM, description=DESCRIPTION, args=list(args))
        print("\n".join(lines(*chosen(options.algorithm), options.ranks)))
        return DONE
    except BrokenPipeError:  # the reader has seen enough
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)


def chosen(word: str) -> tuple[str, str]:
    """Collective and algorithm that ``word`` names.

    Raises:
        ValueError: no algorithm has that name.
    """
    words = algorithms()
    if (word := _hyphens(word)) not in words:
        close = difflib.get_close_matches(word, words, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(words)}"
        raise ValueError(f"unknown algorithm {word!r}: {fix}")
    return words[word]


def lines(collective: str, name: str, size: int) -> Iterator[str]:
    """What is printed of one algorithm on ``size`` ranks, at most ``WIDTH`` characters wide.

    Raises:
        ValueError: fewer than two ranks, or more than such a line has room for.
    """
    if not 2 <= size <= MOST_RANKS:
        raise ValueError(f"expected 2 to {MOST_RANKS} ranks, got {size}")
    schedule = SCHEDULES[collective][name]
    played = play(collective, schedule, size)
    table = _Table(played, size)
    file = f"{schedule.__module__.replace('.', '/')}.py"
    yield f"{_hyphens(collective)} by {_hyphens(name)} on {size} ranks ({file})"
    yield ""
    yield from table.legend(collective)
    yield ""
    yield table.head
    yield "start"
    yield from table.rows([], played.start)
    rounds = list(played.rounds())
    phases = [{phase_of(message, messages) for message in messages} for messages, _ in rounds]
    unnamed = set().union(*phases)
    unnamed = unnamed if len(unnamed) > 1 else set()
    for number, ((messages, held), found) in enumerate(zip(rounds, phases, strict=True), start=1):
        yield ""
        yield from (f"{name}: {text}" for name, text in PHASES.items() if name in unnamed & found)
        unnamed -= found
        yield from _arrows(f"round {number}", messages)
        yield from table.rows(messages, held)
    yield ""
    num_elements = size * played.num_parts
    yield from _account(collective_cost(schedule, size, num_elements), num_elements)


def phase_of(message: Message, messages: Sequence[Message]) -> str:
    """The collective that ``message``, one of a round's ``messages``, is a part of."""
    if message.sent.of > 1:
        spread = "scatter" if message.is_first else "all-gather"
        return spread if message.then == "copy" else "reduce-scatter"
    is_swap = any((other.sender, other.receiver) == (message.receiver, message.sender) for other in messages)
    return "broadcast" if message.then == "copy" else "all-reduce" if is_swap else "reduce"


class _Table:
    """A row per rank and a column per part of x; where x is not cut, one row with a column per rank."""

    def __init__(self, played: Played, size: int) -> None:
        self.num_parts, self.size = played.num_parts, size
        self.num_columns = size if played.num_parts == 1 else played.num_parts
        longest = max(len(cell) for message in played.messages for cell in message.cells)
        self.counts = MARGIN + self.num_columns * (1 + longest) > WIDTH  # so many letters would not fit
        least = 1 + max(3, len(str(size)) if self.counts else longest)  # one for what marks the new
        self.cell_width = least + (MARGIN + self.num_columns * (least + 1) <= WIDTH)

    def legend(self, collective: str) -> Iterator[str]:
        """How to read the table, a line per sign."""
        ranks = f"what ranks 0 to {self.size - 1} begin with"
        if collective in ("broadcast", "scatter"):
            signs = {"a": "what rank 0 begins with"}
        elif self.counts:
            signs = {"1": "what a rank begins with", "2, 3 ..": "so many of them, added"}
        elif collective in ("all_gather", "gather", "all_to_all"):
            signs = {self._letters: ranks}
        else:
            example = ascii_lowercase[: min(self.size, 3)]
            signs = {self._letters: f"{ranks}; {example} is a sum, in that order"}
        if collective in ("all_gather", "gather", "broadcast", "scatter"):
            signs["."] = "not there yet"
        if self.num_parts > 1:
            signs["[j]"] = f"part j of x, which is cut into {self.num_parts}"
        signs[">"] = "has just arrived"
        yield from (f"{sign:{MARGIN}} {meaning}" for sign, meaning in signs.items())

    @property
    def _letters(self) -> str:
        return f"a to {ascii_lowercase[self.size - 1]}"

    @property
    def head(self) -> str:
        """The numbers of the columns."""
        label = "rank" if self.num_parts == 1 else "part"
        return self._line(label, [f" {index}" for index in range(self.num_columns)])

    def rows(self, messages: Sequence[Message], held: State) -> Iterator[str]:
        """``held`` after ``messages``."""
        new = {
            (message.receiver, index)
            for message in messages
            for index in range(self.num_parts)[cells_of(message.piece, self.num_parts)]
        }
        cells = [
            [self._cell(letters, (rank, index) in new) for index, letters in enumerate(row)]
            for rank, row in enumerate(held)
        ]
        if self.num_parts == 1:
            yield self._line("", [own for (own,) in cells])
        else:
            yield from (self._line(f"{f'rank {rank}':>{MARGIN - 1}}", row) for rank, row in enumerate(cells))

    def _cell(self, letters: str, is_new: bool) -> str:
        text = str(len(letters)) if self.counts and letters else letters or "."
        return f"{'>' if is_new else ' '}{text}"

    def _line(self, label: str, cells: Sequence[str]) -> str:
        return (f"{label:{MARGIN}}" + "".join(f"{cell:{self.cell_width}}" for cell in cells)).rstrip()


def _arrows(label: str, messages: Sequence[Message]) -> Iterator[str]:
    """``label``, and who sends what to whom, in columns."""
    arrows = []
    for message in messages:
        first, end, of = message.sent
        what = "" if of == 1 else f" [{first}]" if end == first + 1 else f" [{first}-{end - 1}]"
        arrows.append(f"{message.sender} -> {message.receiver}{what}")
    width = max(map(len, arrows)) + GAP
    fitting = (WIDTH + GAP - MARGIN - 1) // width
    for start in range(0, len(arrows), fitting):
        line = "".join(f"{arrow:{width}}" for arrow in arrows[start : start + fitting])
        yield f"{'' if start else label:{MARGIN}} {line}".rstrip()


def _account(cost: CollectiveCost, S: int) -> Iterator[str]:
    """Rounds, messages and bytes, and the time that they take, for x of ``S`` bytes."""
    rows = {
        "rounds": f"{cost.steps}",
        "messages": f"{sum(cost.messages)}",
        "bytes sent by the busiest rank": f"{max(cost.sent) / S:.4g} S",
        "bytes sent by all": f"{sum(cost.sent) / S:.4g} S",
    }
    yield from (f"{what:32}{number:>9}" for what, number in rows.items())
    share = cost.path_bytes / S
    yield ""
    yield f"time     {cost.steps} alpha + {share:.4g} S beta"
    yield "alpha    latency: seconds per message, whatever its size"
    yield "beta     seconds per byte: 1 / bandwidth"
    yield "S        bytes of x"
    yield ""
    yield f"with alpha = {ALPHA_S * 1e6:g} us and beta = {BETA_S * 1e9:g} ns (1 GB/s):"
    for size, name in ((10**3, "1 kB"), (10**8, "100 MB")):
        latency_ms, bytes_ms = cost.steps * ALPHA_S * 1e3, share * size * BETA_S * 1e3
        formula = f"{latency_ms:.3g} ms of latency + {bytes_ms:.3g} ms of bytes"
        yield f"S = {name:7}{formula} = {latency_ms + bytes_ms:.3g} ms"
