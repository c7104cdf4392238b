"""The ``Trainer`` of transformers, whose gradients instep reduces.

    import instep
    from instep.integrations.transformers import Trainer

    mesh = instep.init()  # before TrainingArguments, which use the process group that is there
    Trainer(model=model, args=TrainingArguments(...), train_dataset=...).train()

It stands in the place of ``transformers.Trainer``. For a subclass of it (``Seq2SeqTrainer``, one of yours)
it is a mix-in, named first: ``class MyTrainer(Trainer, transformers.Seq2SeqTrainer): pass``.

accelerate's ``prepare_model`` puts torch's DDP around a model that is to be trained. Here it does what it
does to a model that is only evaluated (device, precision), and ``DataParallel`` is put around that.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from instep.replicate.wrapper import DataParallel

try:
    transformers: Any = importlib.import_module("transformers")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"instep.integrations.transformers: {error}: pip install 'instep[hf]'", name=error.name
    ) from None

REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")  # accelerate's names of what DataParallel stands in for


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` with ``instep.DataParallel`` where that has torch's DDP.

    Give it the plain model. On the same ranks it trains the bits that ``transformers.Trainer`` trains.

    Raises:
        ValueError: the arguments ask for FSDP, DeepSpeed or another way to divide the model.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        kind = self.accelerator.distributed_type.name
        if kind not in REPLICATED:
            raise ValueError(
                f"accelerate is to divide the model ({kind}), and instep's Trainer replicates it: leave fsdp "
                "and deepspeed out of TrainingArguments, or use instep.fully_shard in a loop of your own"
            )
        prepare = self.accelerator.prepare_model

        def prepare_model(
            model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
        ) -> nn.Module:
            prepared: nn.Module = prepare(model, device_placement, evaluation_mode=True)
            return prepared if evaluation_mode else DataParallel(prepared)

        self.accelerator.prepare_model = prepare_model
