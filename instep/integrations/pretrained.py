"""A checkpoint as a folder that ``from_pretrained`` reads, of transformers or, for LoRA adapters, of peft.

    config and tokenizer files     copied from the folder of the weights that training began with
    model.safetensors              the tensors of the model, under the names of its state dict
    or adapter_model.safetensors   the adapter alone, under peft's names, beside adapter_config.json

    ...c_attn.lora_A.default.weight               ->   ...c_attn.lora_A.weight
    ...classifier.modules_to_save.default.bias    ->   ...classifier.bias

Neither library is needed, and nothing is read but the two folders.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

from instep.checkpoint import convert, files, load
from instep.checkpoint.load import FileReader, Found
from instep.errors import CheckpointRejected
from instep.state.hash import described, state_digests
from instep.state.shards import MODEL
from instep.state.stored import Extent, Source, StoredTensor, dtype_name

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
OF_THE_BASE = {CONFIG, "generation_config.json"}
COPIED = (".json", ".txt", ".model", ".jinja")
ADAPTER = re.compile(r"(.*\.)(?:(lora_(?:A|B|embedding_A|embedding_B))|modules_to_save)\.default(\..*)?")


def to_pretrained(found: Found, weights: Path, out: Path) -> Path:
    """Write the checkpoint that was ``found`` as the new folder ``out``, whole or not at all.

    Raises:
        CheckpointRejected: frozen weights that it was saved without are others in ``weights``.
        FileExistsError: ``out`` is there.
        ValueError: ``weights`` lacks what is needed; adapters of a kind that is not supported.
    """
    source = load.open_source(found.path, found.manifest)
    models = found.manifest.extra.get("models", [])
    if len(models) > 1:
        raise ValueError(
            f"{found.path} has several models ({', '.join(models)}): save the one to export alone, "
            "instep.save(dir, step=, model=model)"
        )
    names = {name.removeprefix(MODEL): name for name in source.tensors if name.startswith(MODEL)}
    is_adapter = any(name.startswith("base_model.") or ".lora_" in name for name in names)  # peft's names
    config = _config(weights, ADAPTER_CONFIG if is_adapter else CONFIG)
    if is_adapter:
        names = _adapter_names(names, config)
    else:
        source = _with_frozen(source, weights)
        names |= {name: MODEL + name for name in source.frozen}
        dtypes = [source.tensors[name].dtype for name in names.values()]
        config["dtype"] = next((dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point), None)
        config.pop("torch_dtype", None)  # an older name of it

    def fill(folder: Path) -> None:
        for file in sorted(weights.iterdir()):
            is_index = file.name.endswith(".index.json")
            if file.suffix in COPIED and not is_index and not (is_adapter and file.name in OF_THE_BASE):
                shutil.copyfile(file, folder / file.name)
        text = json.dumps(config, indent=2) + "\n"
        (folder / (ADAPTER_CONFIG if is_adapter else CONFIG)).write_text(text)
        convert.write(source, names, folder / f"{'adapter_' * is_adapter}model.safetensors")

    files.make_directory(out.absolute().parent)
    return files.publish(out.absolute().parent, out.name, fill)


def _config(weights: Path, name: str) -> dict[str, object]:
    """The JSON in file ``name`` of the folder ``weights``."""
    if not weights.is_dir():
        raise ValueError(f"--weights {weights} is no folder: expected one with {name}")
    if not (weights / name).is_file():
        there = ", ".join(sorted(file.name for file in weights.iterdir())) or "nothing"
        fix = "save_pretrained() of the model's config writes it"
        if name == ADAPTER_CONFIG:
            fix = 'model.peft_config["default"].save_pretrained(FOLDER), in the training script, writes it'
        raise ValueError(f"--weights {weights} has no {name}, it has {there}: {fix}")
    found = json.loads((weights / name).read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{weights / name}: expected a JSON object")
    return found


def _adapter_names(names: dict[str, str], config: dict[str, object]) -> dict[str, str]:
    """Names of tensors of the adapter as peft saves them, each with its name in the checkpoint."""
    odd = [
        f"{key}={config[key]!r}"
        for key in ("bias", "use_dora")
        if config.get(key) not in (None, "none", False)
    ]
    odd += [f"peft_type={config['peft_type']!r}"] * (config.get("peft_type") != "LORA")
    odd += [name for name in names if ".default" in name and not ADAPTER.fullmatch(name)]
    if odd:
        raise ValueError(
            f"expected adapters of plain LoRA, got {odd[0]}: load the checkpoint in the script with "
            "instep.load, and call model.save_pretrained"
        )
    matches = {name: match for name in names if (match := ADAPTER.fullmatch(name))}
    found = {}
    for name, match in matches.items():
        before, kind, rest = match[1], match[2] or "", match[3] or ""
        found[(before + kind + rest) if kind else before.removesuffix(".") + rest] = names[name]
    return found


def _with_frozen(source: Source, weights: Path) -> Source:
    """``source`` with the frozen weights that it was saved without, from the files of ``weights``."""
    readers = {file.name: FileReader(file, MODEL) for file in sorted(weights.glob("*.safetensors"))}
    tensors, read = dict(source.tensors), dict(source.readers)
    for name in source.frozen:
        place = next((place for place, reader in readers.items() if name in reader.contents.layout), None)
        if place is None:
            raise ValueError(
                f"the checkpoint was saved without the frozen {name!r}, and no *.safetensors in {weights} "
                "has it: name the folder of the weights that training began with"
            )
        shape, dtype = readers[place].contents.layout[name]
        own = f"weights/{place}"
        read[own] = readers[place]
        tensors[MODEL + name] = StoredTensor(shape, dtype, (Extent(0, math.prod(shape), own),))
    whole = Source(tensors, read, source.ties, source.frozen)
    for name, saved in source.frozen.items():
        _, parts = state_digests([described(name, whole.read_whole(MODEL + name))], 0)
        if parts[name] != saved:
            raise CheckpointRejected(
                f"{weights}: {name!r} ({dtype_name(whole.tensors[MODEL + name].dtype)}) differs from the "
                "frozen weight of training: name the folder that training began with, or save with "
                "frozen=True if the script cast the weights"
            )
    return whole
