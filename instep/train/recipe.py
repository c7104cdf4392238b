"""What is trained: the model, data and loss that a recipe brings, and that nothing else here knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from instep.elastic.rendezvous import WorkerSpec
from instep.mesh.process_group import Group
from instep.train.run_config import RunConfig

MicroBatchData = Any
"""What a recipe's loss is computed of: whatever its ``read`` gives."""


class Data(Protocol):
    """The samples of a run, opened in one process; ``len`` of it is their number."""

    name: str

    @property
    def sha256(self) -> str:
        """Of all that the samples are made of: part of the run's contract."""

    def __len__(self) -> int: ...


class Recipe(Protocol):
    """A config, and what is made of it in any process that trains."""

    loss_unit: str  # "nats per byte"

    @property
    def config(self) -> RunConfig: ...

    @property
    def work(self) -> Callable[[WorkerSpec, Any], None]:
        """A function of a module by which a new process trains ``config``: see ``train.worker``."""

    @property
    def items_per_step(self) -> int:
        """What the throughput counts: tokens, samples."""

    def replaced(self, config: Any) -> Recipe:
        """The same with another ``config``."""

    def validate(self) -> None:
        """Raise ``ValueError``, naming the setting and the fix, for a config that cannot be run."""

    def make_model(self) -> nn.Module:
        """The model, on torch's default device; its values do not matter."""

    def open(self) -> Any:
        """Training data and what is held out; raises if it cannot be read. ``training`` of it is ``Data``."""

    def training(self, data: Any) -> Data:
        """The samples that are trained on."""

    def read(self, data: Any, step: int, micro_batch: int) -> MicroBatchData:
        """Micro-batch number ``micro_batch`` of ``step``, a function of nothing else."""

    def example(self) -> MicroBatchData:
        """A micro-batch of training's shapes, the same in every process at any time."""

    def loss(self, model: nn.Module, data: MicroBatchData, device: torch.device) -> Tensor:
        """The mean loss of one micro-batch, a scalar."""

    def held_out_loss(
        self,
        model: nn.Module,
        data: Any,
        group: Group,
        device: torch.device,
        before_gather: Callable[[], None],
    ) -> float:
        """The mean loss over what is held out, the same for any number of ranks. Collective."""

    def memory_estimate(self, *, ranks: int) -> dict[str, int | float]:
        """Bytes of a rank as the formulas have them, with the state divided among ``ranks``."""
