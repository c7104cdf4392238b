"""One program in one placement: trained for real, and what became of it.

Three ways to the same numbers. By hand: autograd on one process, plain adds in the order of the sum tree, and
nothing of instep's but the keys of random numbers and the norm for clipping. On one rank of the library. In
the placement.
"""

from __future__ import annotations

import hashlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import instep
from benchmarks.placement.fuzz.layers import build, first_inputs, inputs, leaves
from benchmarks.placement.fuzz.programs import (
    CRASH,
    HANG,
    INVALID,
    MISMATCH,
    REFUSED,
    REPLICATED,
    SAME,
    Placement,
    Program,
    placements,
    program,
)
from instep.mesh.mesh import Mesh
from instep.rng.keys import LeafKeys
from instep.shard.gather import USED_OUTSIDE
from instep.shard.shard_groups import shard_group_of
from instep.state.alignment import align
from instep.step.micro_batches import MicroBatch
from tests.far import evenly, hosts
from tests.parity import _tree_sum, norms_by_definition, wide, world_of_one
from tests.world import world

IN_WORDS = (ValueError, TypeError, RuntimeError, NotImplementedError, instep.errors.InstepError)
OURS = f"{Path(instep.__file__).parent}/"
PATIENCE_S = 20.0  # of a rank that waits for another
DEADLINE_S = 90.0  # of one part of a training
RATE = {"Adadelta": 1.0, "Adafactor": 0.05}  # the others have 0.02
SERVER = 0
PLAIN = ("server", "threads")  # forms without checkpoints of their own
DIGITS = 16
LR = "lr"

State = dict[str, str]
"""By name: the SHA-256 of each weight, buffer and moment, and the learning rates."""


@dataclass(frozen=True)
class Outcome:
    """What became of a trial; ``where`` is the place in the code that an error comes from."""

    kind: str
    text: str = ""
    where: str = ""


class Training:
    """A program in a placement, one step at a time."""

    def __init__(self, program: Program, placement: Placement, mesh: Mesh) -> None:
        self.program = program
        module, options = build(program), {"find_unused_parameters": placement.find_unused}
        self.close: list[Callable[[], None]] = []
        self.model: Any = module
        form = placement.form
        if form in ("stage2", "stage3"):
            self.model = instep.fully_shard(
                module,
                mesh,
                int(form[-1]),
                overlap=placement.overlap,
                **options,
            )
            self.optimizer: Any = (
                plain(program, module)
                if placement.other_optimizer
                else self._sharded(module, shard_group_of(mesh))
            )
        elif form == "pipeline":
            self.model = instep.Pipeline(
                module,
                mesh,
                placement.schedule,
                cuts=placement.cuts or "layers",
                bucket_cap_mb=placement.bucket_mb,
                **options,
            )
            self.optimizer = (
                self._sharded(module, mesh) if placement.other_optimizer else plain(program, module)
            )
        elif form == "threads":
            self.model = instep.ThreadedReplicas(module, num_replicas=2)
            self.optimizer = plain(program, module)
        elif form == "server":
            self.optimizer = plain(program, module)
            self.model = instep.ParameterServer(module, self.optimizer, mesh)
        else:
            strategy = form if form in REPLICATED else "bucketed"
            self.model = instep.DataParallel(
                module, process_group=mesh, strategy=strategy, bucket_cap_mb=placement.bucket_mb, **options
            )
            sharded = form == "stage1"
            self.optimizer = (
                self._sharded(module, shard_group_of(mesh)) if sharded else plain(program, module)
            )
        self.module = module
        self.form = form
        self.in_slices = placement.other_optimizer and form != "pipeline"
        self.scheduler = ExponentialLR(self.optimizer, 0.7) if program.scheduled else None

    def _sharded(self, module: nn.Module, ranks: Any, **options: Any) -> Optimizer:
        kind, arguments = optimizer_of(self.program)
        return instep.ShardedOptimizer(groups_of(self.program, module), kind, ranks, **options, **arguments)

    def step(self, number: int) -> None:
        num = self.program.num_micro_batches
        if self.form == "threads":
            self.model.micro_batches(num, lambda model, one: leaf(self.program, model, one, number))
        elif self.form == "pipeline":
            self.model.step(
                lambda output, one: loss_of(self.program, output, one),
                lambda one: first_inputs(self.program, number, one.index),
                num,
            )
        else:
            for micro_batch in self.model.micro_batches(num):
                leaf(self.program, self.model, micro_batch, number)
        if self.program.clip is not None:
            instep.clip_grad_norm_(self.module.parameters(), self.program.clip)
        (self.model if self.form == "server" else self.optimizer).step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def state(self, rank: int) -> State:
        is_divided = self.form in ("stage2", "stage3", "pipeline")
        weights = instep.full_state_dict(self.module) if is_divided else self.module.state_dict()
        stepping = self.form != "server" or rank == SERVER
        if self.form == "pipeline" and not isinstance(self.optimizer, instep.ShardedOptimizer):
            return digests(weights, self.optimizer, self.model.home.holds)
        return digests(weights, self.optimizer if stepping and not self.in_slices else None)

    def save(self, folder: Path, step: int, rank: int) -> None:
        """A checkpoint, which any form can load. Of a server and of threads it is that of one process."""
        if self.form not in PLAIN:
            instep.save(folder, step=step, model=self.model, optimizer=self.optimizer)
        elif rank == SERVER:
            instep.save(folder, step=step, model=self.module, optimizer=self.optimizer)

    def load(self, folder: Path) -> int:
        """The step of the checkpoint in ``folder``."""
        model = {"server": getattr(self.model, "model", None), "threads": self.module}.get(
            self.form, self.model
        )
        return instep.load(folder, model=model, optimizer=self.optimizer).step

    def end(self) -> None:
        if isinstance(self.optimizer, instep.ShardedOptimizer):
            self.optimizer.close()
        if self.form != "threads":
            self.model.close()


def optimizer_of(program: Program) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class, and its options."""
    kind = getattr(torch.optim, program.optimizer)
    return kind, {"lr": RATE.get(program.optimizer, 0.02), **dict(program.options)}


def plain(program: Program, module: nn.Module) -> Optimizer:
    kind, options = optimizer_of(program)
    return kind(groups_of(program, module), **options)


def groups_of(program: Program, module: nn.Module) -> Any:
    parameters = list(module.parameters())
    if program.groups == "two":
        matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
        return [{"params": group, "lr": rate} for group, rate in ((matrices, 0.02), (vectors, 0.01)) if group]
    if program.groups == "each":
        return [{"params": [p], "lr": 0.01 + 0.001 * number} for number, p in enumerate(parameters)]
    return parameters


def leaf(program: Program, model: Any, micro_batch: MicroBatch, step: int) -> None:
    """Forward and backward of one micro-batch."""
    index = micro_batch.index
    if program.weights == "zero" and index == 1:
        micro_batch.weight = 0
        return
    args, kwargs = inputs(program, step, index)
    loss = loss_of(program, model(*args, **kwargs), micro_batch)
    if program.loss == "l2":
        named = list(model.named_parameters())
        loss = loss + 1e-3 * sum(p.abs().float().square().sum() for _, p in named if p.requires_grad)
    loss.backward()


def loss_of(program: Program, output: Any, micro_batch: MicroBatch) -> Tensor:
    losses = [x.float().square() for x in leaves(output)]
    if program.weights == "mean":
        return sum((x.mean() for x in losses), torch.zeros(()))
    micro_batch.weight = program.sizes[micro_batch.index]
    return sum((x.mean() * micro_batch.weight for x in losses), torch.zeros(()))


def by_hand(program: Program) -> State:
    """The state after all steps without the library."""
    module = build(program)
    align([*module.parameters(), *module.buffers()])  # as at wrapping: kernels round by where a weight lies
    optimizer = plain(program, module)
    scheduler = ExponentialLR(optimizer, 0.7) if program.scheduled else None
    keys = LeafKeys(module, 0, [torch.default_generator])
    parameters = [p for p in module.parameters() if p.requires_grad]
    for step in range(program.stops[-1]):
        gradients, total = [], 0
        with keys.step(), norms_by_definition(module):
            for index in range(program.num_micro_batches):
                micro_batch = MicroBatch(index, program.num_micro_batches)
                with keys.leaf(step, index):
                    leaf(program, module, micro_batch, step)
                gradients.append([p.grad for p in parameters])
                total += micro_batch.weight
                for p in parameters:
                    p.grad = None
        scale = 1.0 / total if total else 0.0
        for p, by_leaf in zip(parameters, zip(*gradients, strict=True), strict=True):
            added = _tree_sum([None if x is None else wide(x) for x in by_leaf])
            p.grad = None if added is None else (added * scale).to(p.dtype)
        if program.clip is not None:
            instep.clip_grad_norm_(parameters, program.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return digests(module.state_dict(), optimizer)


def digests(
    weights: Mapping[str, Any],
    optimizer: Optimizer | None,
    has_moments: Callable[[Tensor], bool] = lambda parameter: True,
) -> State:
    """A digest of each tensor by name; a moment is "moment/number of its parameter".

    Not of moments of frozen parameters: torch's Adagrad alone makes some, and never uses them.
    """
    found = {name: digest(x) for name, x in weights.items() if isinstance(x, Tensor)}
    if optimizer is None:
        return found
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = optimizer.state_dict()
    for number, moments in saved["state"].items():
        if parameters[number].requires_grad and has_moments(parameters[number]):
            found |= {f"{key}/{number}": digest(x) for key, x in moments.items() if x is not None}
    return found | {f"{LR}/{i}": digest(group[LR]) for i, group in enumerate(saved["param_groups"])}


def digest(value: Any) -> str:
    """Of dtype, shape and bits; all NaNs are alike."""
    if not isinstance(value, Tensor):
        return repr(value)
    x = value.detach().contiguous()
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.nan, x)
    data = x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    mark = "nan " if x.is_floating_point() and not x.isfinite().all() else ""
    return mark + hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode() + data).hexdigest()[:DIGITS]


def live(mesh: Mesh, *, program: Program, placement: Placement, part: int, folder: Path) -> None:
    """A rank's life in part ``part`` of the training; it leaves its state, or its error, in ``folder``."""
    torch.set_num_threads(1)
    answer = folder / f"{part} {mesh.rank}.json"
    try:
        found = {"state": train(program, placement, mesh, part, folder)}
    except BaseException as error:
        answer.write_text(json.dumps({"error": asdict(judged(error))}))
        raise
    answer.write_text(json.dumps(found))


def train(program: Program, placement: Placement, mesh: Mesh, part: int, folder: Path) -> State:
    training = Training(program, placement, mesh)
    first, last = (program.stops[part - 1] if part else 0), program.stops[part]
    if part:
        found = training.load(folder / "saved")
        if found != first:
            raise AssertionError(f"expected a checkpoint of step {first}, got one of {found}")
    for step in range(first, last):
        training.step(step)
    if part + 1 < len(program.stops):
        training.save(folder / "saved", last, mesh.rank)
    state = training.state(mesh.rank)
    training.end()
    return state


def judged(error: BaseException) -> Outcome:
    """Whether it is refused in words: an error that instep raises on purpose, where it can say why."""
    frames = traceback.extract_tb(error.__traceback__)
    innermost = frames[-1]
    ours = [frame for frame in frames if frame.filename.startswith(OURS)]
    last = ours[-1] if ours else innermost
    where = f"{Path(last.filename).name}:{last.lineno} {last.name}"
    # An operator of torch has no frame: what it raises seems to come from the line that calls it.
    on_purpose = innermost.filename.startswith(OURS) and (innermost.line or "").startswith("raise ")
    is_noted = USED_OUTSIDE in getattr(error, "__notes__", ())
    in_words = (isinstance(error, IN_WORDS) and on_purpose) or is_noted
    return Outcome(REFUSED if in_words else CRASH, f"{type(error).__name__}: {error}"[:1000], where)


@lru_cache(maxsize=2)
def reference(whole: Program) -> tuple[Outcome, State]:
    """What one rank of the library gives, and whether it is what comes out by hand."""
    with quiet():
        found, expected = checked_by_hand(whole)
        if found.kind != SAME:
            return found, {}
        try:
            training = Training(whole, Placement("bucketed", 1), world_of_one())
            for step in range(whole.stops[-1]):
                training.step(step)
            state = training.state(0)
            training.end()
        except Exception as error:
            return judged(error), {}
    return compared(state, expected, "one rank, by the library and by hand"), state


def checked_by_hand(whole: Program) -> tuple[Outcome, State]:
    """What comes out by hand, and whether torch can train it at all."""
    try:
        expected = by_hand(whole)
    except Exception as error:
        return Outcome(INVALID, f"{type(error).__name__}: {error}"[:300]), {}
    if any(value.startswith("nan") for value in expected.values()):
        return Outcome(INVALID, "its numbers are not finite"), {}
    return Outcome(SAME), expected


def compared(ours: State, expected: State, where: str) -> Outcome:
    names = [name for name in ours.keys() | expected if ours.get(name) != expected.get(name)]
    if not names:
        return Outcome(SAME)
    shown = ", ".join(f"{name} ({ours.get(name)}, not {expected.get(name)})" for name in sorted(names)[:4])
    return Outcome(MISMATCH, f"{where}: {len(names)} of {len(expected)} differ: {shown}")


def attempt(seed: int, model: int, number: int | None, keep: Sequence[int] | None = None) -> Outcome:
    """Placement ``number`` of a program compared with its reference; the reference itself for None."""
    whole = program(seed, model, None if keep is None else tuple(keep))
    found, expected = reference(whole)
    if number is None or found.kind != SAME:
        return found
    with TemporaryDirectory(prefix="fuzz-") as folder, quiet():
        return placed(whole, placements(seed, model, number), expected, Path(folder))


def placed(whole: Program, parts: Sequence[Placement], expected: State, folder: Path) -> Outcome:
    for part, placement in enumerate(parts):
        run = world(
            placement.world,
            by=placement.by,
            backend=placement.backend,
            timeout_s=PATIENCE_S,
            deadline_s=DEADLINE_S,
            **axes(placement),
        )(live)
        raised: BaseException | None = None
        try:
            with spread(placement):
                run(program=whole, placement=placement, part=part, folder=folder)
        except BaseException as error:
            raised = error
        answers = {
            rank: json.loads(path.read_text())
            for rank in range(placement.world)
            if (path := folder / f"{part} {rank}.json").exists()
        }
        if raised is not None or len(answers) < placement.world:
            return failure(placement, answers, raised)
    where = " then ".join(map(str, parts))
    in_slices = placement.other_optimizer and placement.form != "pipeline"  # no rank has a whole moment
    in_parts = placement.form in ("server", "pipeline") or in_slices  # a rank has some, all ranks have all
    states = {f"rank {rank}": answer["state"] for rank, answer in answers.items()}
    for rank, state in states.items():
        wanted = {name: value for name, value in expected.items() if name in state} if in_parts else expected
        found = compared(state, wanted, f"{rank}, {where}")
        if found.kind != SAME:
            return found
    told = {name: value for state in states.values() for name, value in state.items()}
    return Outcome(SAME) if in_slices else compared(told, expected, where)


def spread(placement: Placement) -> AbstractContextManager[None]:
    if placement.num_hosts == 1:
        return nullcontext()
    return hosts(*evenly(placement.num_hosts, placement.world // placement.num_hosts))


def axes(placement: Placement) -> dict[str, int]:
    if placement.form == "pipeline":
        return {"pp": placement.pp}
    return {} if placement.shard is None else {"shard": placement.shard}


def failure(placement: Placement, answers: Mapping[int, Any], raised: BaseException | None) -> Outcome:
    """What to make of a part in which not every rank came to the end."""
    errors = [Outcome(**answer["error"]) for answer in answers.values() if "error" in answer]
    if isinstance(raised, TimeoutError) and not errors:
        return Outcome(HANG, str(raised)[:2000])
    crashed = [error for error in errors if error.kind == CRASH]
    if crashed:
        return crashed[0]
    if len(errors) == placement.world:
        first = min(errors, key=_consequence)
        if not first.text.startswith("PeerLost"):
            return first
        return Outcome(CRASH, f"all ranks have lost another, and none says why: {first.text}", first.where)
    fared = ", ".join(f"rank {rank}: {'error' if 'error' in x else 'ended'}" for rank, x in answers.items())
    told = errors[0].text if errors else f"{type(raised).__name__}: {raised}"
    return Outcome(
        CRASH, f"not all ranks fare alike ({fared}): {told}"[:2000], errors[0].where if errors else ""
    )


def _consequence(error: Outcome) -> int:
    """Sorts: a rank that was left by another, and one that lost it, only say so."""
    return next((i for i, word in enumerate(("Desync", "PeerLost"), 1) if error.text.startswith(word)), 0)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
