"""The Trainer of transformers on instep: the bits of DDP, as a class and as a mix-in."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.launch.launch import launch

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed",
)


def test_without_the_library_one_sentence_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import instep.integrations.transformers"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("ModuleNotFoundError: instep.integrations.transformers: ")
    assert ended.stderr.rstrip().endswith("pip install 'instep[hf]'")


def model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


def train(directory: Path) -> None:
    """One rank's part, each way in turn; the hashes of the weights go into a file of its own."""
    import transformers

    from instep.integrations.transformers import Trainer

    class Mixed(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
        pass

    mesh, found = instep.init(), []
    for trainer in (transformers.Trainer, Trainer, Mixed):
        of_mixed = trainer is Mixed
        arguments = transformers.Seq2SeqTrainingArguments if of_mixed else transformers.TrainingArguments
        args = arguments(
            output_dir=str(directory),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        tokens = torch.randint(0, 50, (32, 8), generator=torch.Generator().manual_seed(1))
        made = trainer(
            model=model(), args=args, train_dataset=[{"input_ids": x, "labels": x} for x in tokens]
        )
        made.train()
        assert isinstance(made.model_wrapped, instep.DataParallel) == (trainer is not transformers.Trainer)
        found.append(sha256(made.model))
    (directory / f"rank {mesh.rank}").write_text(" ".join(found))


def sha256(module: torch.nn.Module) -> str:
    weights = b"".join(x.numpy().tobytes() for _, x in sorted(module.state_dict().items()))
    return hashlib.sha256(weights).hexdigest()


@needs_transformers
def test_two_ranks_train_the_bits_of_ddp_as_a_class_and_as_a_mix_in(tmp_path: Path):
    launch(train, (tmp_path,), ranks=2)
    hashes = [(tmp_path / f"rank {rank}").read_text().split() for rank in range(2)]
    assert len(set(hashes[0] + hashes[1])) == 1
    assert hashes[0][0] != sha256(model())


@needs_transformers
def test_a_model_that_accelerate_is_to_divide_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import accelerate
    import transformers

    from instep.integrations.transformers import Trainer

    fsdp = accelerate.utils.DistributedType.FSDP
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", property(lambda self: fsdp))
    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", _accelerate)
    with pytest.raises(ValueError, match=r"divide the model \(FSDP\).*leave fsdp and deepspeed out"):
        Trainer(model=model(), args=transformers.TrainingArguments(str(tmp_path), use_cpu=True))


def _accelerate(self: Any) -> None:
    import accelerate

    self.accelerator = accelerate.Accelerator(cpu=True)
