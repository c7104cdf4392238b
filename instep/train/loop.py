"""The training loop, as one rank runs it: from text to weights, one declared step at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import contract
from instep.data.loader import micro_batch_indices
from instep.data.text import TextSplits, open_text
from instep.mesh.mesh import Mesh
from instep.models.transformer import GPT, GPTConfig
from instep.ordered.hash import state_entries, state_sha256
from instep.ordered.keys import initialize
from instep.replicate.leaves import Leaf
from instep.train.config import Config, numerical
from instep.train.folder import LEDGER, METRICS, Lines
from instep.train.losses import held_out_loss, mean_loss, text_loss
from instep.train.optimizers import learning_rate, make_optimizer, set_learning_rate
from instep.train.parallel import parallel
from instep.train.progress import Display
from instep.train.together import on_every_rank, require_same

# Variables by which libraries choose other kernels, with other bits.
KERNEL_SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
)
HASH_EVERY = 50  # steps between two entries of the whole state's hash in the ledger


class Trainer:
    """A run on one rank.

    At construction: text, model with weights by name, optimizer; collective over the mesh. Then the state of
    a checkpoint may be loaded into ``module``, ``optimizer`` and ``steps_done``. ``step`` makes one optimizer
    step out of a global batch; ``evaluate`` changes nothing.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.group = mesh["dp"].whole.group
        self.text = self._read_text()
        require_same(mesh.world.group, self.numerical())
        self.module = GPT(GPTConfig(**asdict(config.model)))
        initialize(self.module, config.seed)
        self.module.to(mesh.device)
        self.optimizer: Optimizer = make_optimizer(self.module.parameters(), config.optim)
        self.parallel = parallel(config, mesh, self.module, self.optimizer)
        self.steps_done = 0

    @property
    def cursor(self) -> int:
        """Global position in the stream of samples: the next step begins here."""
        return self.steps_done * self.config.batch.global_size

    def numerical(self) -> dict[str, Any]:
        """All that the bits of this run may depend on."""
        fields = {**numerical(self.config), "data.sha256": self.text.train.sha256}
        fields |= {f"environment.{name}": os.environ.get(name, "") for name in KERNEL_SWITCHES}
        return contract.describe(config=fields, threads=torch.get_num_threads(), device=str(self.mesh.device))

    def state_sha256(self) -> str:
        """The hash of weights, moments and step."""
        return state_sha256(state_entries(self.module, self.optimizer), self.steps_done)

    def step(self) -> dict[str, float]:
        """One optimizer step; its figures, the same on every rank but for the times.

        (With a parameter server, only rank 0 knows the norm.)
        """
        config, recorder = self.config, self.mesh.recorder
        began = time.monotonic()
        recorder.step = self.steps_done
        rate = learning_rate(config.optim, self.steps_done, config.steps)
        set_learning_rate(self.optimizer, rate)
        losses = self.parallel.gradients(self.steps_done, self._loss)
        norm = self.parallel.update()
        loss_value = mean_loss({i: x.item() for i, x in losses.items()}, config.num_leaves, self.group)
        exposed_s = recorder.seconds("exposed", self.steps_done)
        self.steps_done += 1
        step_s = time.monotonic() - began
        tokens = config.batch.global_size * config.model.context
        return {
            "loss": loss_value,
            "rate": rate,
            "norm": norm,
            "step_ms": step_s * 1e3,
            "exposed_ms": exposed_s * 1e3,
            "tokens_per_s": tokens / step_s,
        }

    def evaluate(self) -> float:
        """The held-out loss, in nats per byte. Collective."""
        return held_out_loss(
            self.module,
            self.text.held_out,
            self.group,
            num_windows=self.config.eval.windows,
            micro_size=self.config.batch.micro_size,
            device=self.mesh.device,
            autocast=self.config.autocast,
        )

    def _read_text(self) -> TextSplits:
        """The text, or one error for all ranks."""
        data, context, world = self.config.data, self.config.model.context, self.mesh.world.group
        return on_every_rank(world, "reading the text", lambda: open_text(data, context))

    def _loss(self, model: nn.Module, leaf: Leaf) -> Tensor:
        with self.mesh.recorder.span("data", lane="data", leaf=leaf.index):
            windows = self._windows(leaf.index)
        return text_loss(model, windows, device=self.mesh.device, autocast=self.config.autocast)

    def _windows(self, leaf: int) -> Tensor:
        indices = micro_batch_indices(
            len(self.text.train),
            step=self.steps_done,
            leaf=leaf,
            num_leaves=self.config.num_leaves,
            micro_size=self.config.batch.micro_size,
            seed=self.config.seed,
        )
        return self.text.train.windows(indices)


class Books:
    """Rank 0's ``metrics.jsonl`` and ``ledger.jsonl``; on other ranks, nothing."""

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self.trainer = trainer
        self._lines: list[Lines] = []
        if trainer.mesh.rank == 0:
            done = trainer.steps_done
            # A run that begins once more measures its initial weights once more.
            metrics, ledger = (path / METRICS, done or -1), (path / LEDGER, done)
            self._lines = [Lines(path, until_step=until) for path, until in (metrics, ledger)]

    def started(self, restarts: int) -> None:
        """The run begins, or goes on, here."""
        if self._lines:
            axes = self.trainer.mesh.axes
            placement = dict(zip(axes.names, axes.sizes, strict=True))
            self._lines[1].write(
                step=self.trainer.steps_done,
                event="started",
                restarts=restarts,
                placement=placement,
                strategy=self.trainer.config.parallel.strategy,
            )

    def before_steps(self, held_out: float) -> None:
        """Write down the loss of the initial weights."""
        if self._lines:
            self._lines[0].write(step=0, held_out_loss=held_out)

    def step(self, figures: Mapping[str, float], held_out: float | None, *, last: bool) -> None:
        """Write down the step that has just been made."""
        if not self._lines:
            return
        metrics, ledger = self._lines
        step = self.trainer.steps_done
        extra = {} if held_out is None else {"held_out_loss": held_out}
        metrics.write(step=step, **figures, **extra)
        # Floats as hexadecimal: bits, not digits.
        hashed = {"state_sha256": self.trainer.state_sha256()} if last or step % HASH_EVERY == 0 else {}
        ledger.write(
            step=step,
            cursor=self.trainer.cursor,
            loss=float(figures["loss"]).hex(),
            grad_norm=float(figures["norm"]).hex(),
            world_size=self.trainer.mesh.axes.world_size,
            **hashed,
        )

    def close(self) -> None:
        """Flush to disk."""
        for lines in self._lines:
            lines.close()


def run_steps(trainer: Trainer, books: Books, display: Display, save: Callable[[], None]) -> None:
    """Train until the last step, or until ``stop_after``; ``save()`` whenever a checkpoint is due."""
    config = trainer.config
    last = min(config.stop_after or config.steps, config.steps)

    def evaluate() -> float:
        held_out = trainer.evaluate()
        display.say(f"step {trainer.steps_done}  held out {held_out:.3f} nats per byte")
        return held_out

    def due(every: int) -> bool:
        done = trainer.steps_done
        return done == last or (every > 0 and done % every == 0)

    if trainer.steps_done == 0:
        books.before_steps(evaluate())
    while trainer.steps_done < last:
        figures = trainer.step()
        held_out = evaluate() if due(config.eval.every) else None
        books.step(figures, held_out, last=trainer.steps_done == last)
        display.step(trainer.steps_done, **figures)
        if due(config.checkpoint.every):
            save()
